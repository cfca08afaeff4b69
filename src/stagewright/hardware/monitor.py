"""What a whole run used: peaks, means and sums over its moments. A thread of the supervisor that looks at the machine at a fixed rate; whatever goes wrong with it, the run goes on.

A thread and not a process: it costs no start, no memory, and ends with the supervisor however that ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stagewright.events import GpuUsage, RankUsage, Usage
from stagewright.hardware.gpu import NoNvml, Nvml, open_nvml
from stagewright.hardware.meters import GpuMeter, HostMeter, RankProcess, name_of


@dataclass(slots=True)
class GpuTotals:
    """One GPU over a run."""

    uuid: str
    index: int
    peak_memory: int | None = None
    mean_utilisation: float | None = None
    mean_power: float | None = None  # watts
    energy: float | None = None  # joules
    peak_temperature: float | None = None
    throttled: dict[str, float] = field(default_factory=dict)  # seconds by reason
    throttled_seconds: float = 0.0  # for any of them
    foreign: int = 0  # most processes of others at a time


class _Mean:
    """A mean over time: every value counts for the seconds before it."""

    def __init__(self) -> None:
        self.sum = self.seconds = 0.0

    def add(self, value: float | None, seconds: float) -> None:
        if value is not None:
            self.sum += value * seconds
            self.seconds += seconds

    @property
    def value(self) -> float | None:
        return self.sum / self.seconds if self.seconds else None


class _GpuSeries:
    def __init__(self, use: GpuUsage) -> None:
        self.totals = GpuTotals(use.uuid, use.index)
        self.utilisation, self.power = _Mean(), _Mean()
        self._counted = 0.0  # joules by the GPU's own counter
        self._before: float | None = None

    def add(self, use: GpuUsage, seconds: float) -> None:
        totals = self.totals
        totals.peak_memory = _most(totals.peak_memory, use.memory)
        totals.peak_temperature = _most(totals.peak_temperature, use.temperature)
        totals.foreign = max(totals.foreign, use.foreign)
        self.utilisation.add(use.utilisation, seconds)
        self.power.add(use.power, seconds)
        for reason in use.throttled:
            totals.throttled[reason] = totals.throttled.get(reason, 0.0) + seconds
        totals.throttled_seconds += seconds if use.throttled else 0.0
        if use.energy is not None and self._before is not None:
            self._counted += max(use.energy - self._before, 0.0)  # a driver that is loaded again counts from 0
        self._before = use.energy if use.energy is not None else self._before

    def close(self) -> GpuTotals:
        totals = self.totals
        totals.mean_utilisation = self.utilisation.value
        totals.mean_power = self.power.value
        has_counter = self._before is not None
        totals.energy = self._counted if has_counter else self.power.sum if self.power.seconds else None
        return totals


class Totals:
    """Takes one moment after the other."""

    def __init__(self) -> None:
        self._gpus: dict[str, _GpuSeries] = {}
        self._peaks: dict[int, int] = {}
        self._torch_peaks: dict[int, int] = {}
        self._cores: dict[int, _Mean] = {}
        self._machine = _Mean()
        self._memory = self._moments = 0
        self._seconds = 0.0
        self._last: float | None = None

    def add(self, use: Usage) -> None:
        seconds = 0.0 if self._last is None else max(use.seconds - self._last, 0.0)
        self._last = use.seconds
        self._seconds += seconds
        self._moments += 1
        self._memory = max(self._memory, use.memory)
        self._machine.add(use.cores, seconds)
        for gpu in use.gpus:
            self._gpus.setdefault(gpu.uuid, _GpuSeries(gpu)).add(gpu, seconds)
        for rank in use.ranks:
            self._add_rank(rank, seconds)

    def _add_rank(self, use: RankUsage, seconds: float) -> None:
        self._peaks[use.rank] = max(self._peaks.get(use.rank, 0), use.memory)
        self._cores.setdefault(use.rank, _Mean()).add(use.cores, seconds)
        if use.torch_memory is not None:
            self._torch_peaks[use.rank] = max(self._torch_peaks.get(use.rank, 0), use.torch_memory)

    def describe(self) -> dict[str, Any]:
        """The run's use as its summary has it; what nobody told is None."""
        gpus = [series.close() for series in self._gpus.values()]
        energies = [gpu.energy for gpu in gpus if gpu.energy is not None]
        powers = [gpu.mean_power for gpu in gpus if gpu.mean_power is not None]
        return {
            "moments": self._moments,
            "seconds": self._seconds,
            "peak_machine_memory": self._memory,
            "mean_machine_cores": self._machine.value,
            "ranks": [
                {
                    "rank": rank,
                    "peak_memory": peak,
                    "peak_torch_memory": self._torch_peaks.get(rank),
                    "mean_cores": self._cores[rank].value,
                }
                for rank, peak in sorted(self._peaks.items())
            ],
            "gpus": [asdict(gpu) for gpu in gpus],
            "mean_power": sum(powers) if powers else None,
            "energy": sum(energies) if energies else None,
            "throttled_seconds": max((gpu.throttled_seconds for gpu in gpus), default=None),
            "foreign": max((gpu.foreign for gpu in gpus), default=None),
        }


def _most(one: Any, other: Any) -> Any:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


_FULL_SECONDS = 3600.0  # of which every look becomes a line; later ones thin out, so that files stay small
_SPARSE = 10
_PATIENCE = 2.0  # seconds for a look that is under way when the run ends
_DIGITS = 4


class Monitor:
    """Looks every few seconds, writes lines, and keeps totals."""

    def __init__(
        self,
        path: Path,
        every: float,
        ranks: Callable[[], Sequence[RankProcess]],
        find_gpus: Callable[[Nvml], Collection[str]] | None,
        listen: Callable[[Usage], None],
        warn: Callable[[str], None],
        start: int = 0,
    ) -> None:
        self.totals = Totals()
        self.looks = 0
        self.processor_seconds = 0.0  # that this thread has used
        self._path = path
        self.every = every
        self._ranks = ranks
        self._find_gpus = find_gpus  # None: the run uses none
        self._listen = listen
        self._warn = warn
        self._start = start  # batch that the run goes on from
        self._warned: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and end; one that hangs is left behind."""
        self._ended.set()
        self._thread.join(_PATIENCE)

    def _watch(self) -> None:
        try:
            nvml = self._open()
            gpus = None if nvml is None or self._find_gpus is None else self._meter(nvml, self._find_gpus)
            self._look_on(HostMeter(), gpus)
            if nvml is not None:
                nvml.ask("nvmlShutdown")
        except Exception as error:  # a monitor must never be what ends a run
            self._say(f"the monitor stopped: {type(error).__name__}: {error}")

    def _look_on(self, host: HostMeter, gpus: GpuMeter | None) -> None:
        """One look at once, one every so often, and one at the end."""
        began, before = time.monotonic(), _last_seconds(self._path)
        is_over = False
        while True:
            use = self._look(host, gpus, before + time.monotonic() - began)
            self.totals.add(use)
            self._keep(use, is_over)
            self._listen(use)
            self.looks += 1
            self.processor_seconds = time.thread_time()
            if is_over:
                return
            passed = time.monotonic() - began
            is_over = self._ended.wait((int(passed / self.every) + 1) * self.every - passed)

    def _look(self, host: HostMeter, gpus: GpuMeter | None, seconds: float) -> Usage:
        ranks = self._ranks()
        cores, memory, uses = host.read(ranks)
        seen = () if gpus is None else gpus.read({rank.process for rank in ranks})
        for gpu in seen:
            if gpu.memory is None and gpu.utilisation is None:
                self._say(f"the monitor gets no answer from GPU {gpu.index} ({gpu.uuid}); the run goes on")
        return Usage(seconds, cores, memory, seen, uses, self._start)

    def _keep(self, use: Usage, is_last: bool) -> None:
        """Write a line, or leave it out of a long run's file."""
        is_sparse = self.looks * self.every > _FULL_SECONDS and self.looks % _SPARSE
        if is_sparse and not is_last:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(_rounded(asdict(use)), separators=(",", ":")) + "\n")
        except OSError as error:
            self._say(f"{self._path} could not be written: {error.strerror}; the run goes on")

    def _open(self) -> Nvml | None:
        if self._find_gpus is None:
            return None
        try:
            return open_nvml()
        except NoNvml as error:
            self._say(f"the monitor can't ask GPUs for memory and power: {error}; the run goes on")
            return None

    def _meter(self, nvml: Nvml, find: Callable[[Nvml], Collection[str]]) -> GpuMeter:
        uuids = find(nvml)
        if not uuids:
            self._say("the monitor finds none of the run's GPUs (MIG, or CUDA_VISIBLE_DEVICES?); the run goes on")
        return GpuMeter(nvml, uuids, name_of)

    def _say(self, warning: str) -> None:
        """Warn of each thing once."""
        if warning not in self._warned:
            self._warned.add(warning)
            self._warn(warning)


def _rounded(value: Any) -> Any:
    """The same with numbers as short as they are worth."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _last_seconds(path: Path) -> float:
    """Where a file that a run goes on with has ended; a torn line is closed first."""
    try:
        lines = path.read_bytes()
    except OSError:
        return 0.0
    if lines and not lines.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for line in reversed(lines.splitlines()):
        try:
            return float(json.loads(line)["seconds"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0
