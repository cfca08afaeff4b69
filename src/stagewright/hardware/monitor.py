"""The monitor of a run: a thread of the supervisor that samples the machine at a fixed rate, and totals over the run.

Whatever goes wrong with the monitor is a warning; the run continues. It is a thread and not a process: it takes no time
to start and no memory, and ends with the supervisor however that ends.

It samples the GPUs of the run by UUID through NVML, and the ranks by the process ids in their status files, where GPU
ranks also leave the bytes that torch holds. Each sample is a line of monitor.jsonl, after the first hour one in ten.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.events import GpuUsage, Usage, read_usage
from stagewright.hardware.gpu import NoNvml, Nvml, open_nvml
from stagewright.hardware.meters import GpuMeter, HostMeter, RankProcess, name_of
from stagewright.voice import SILENT, Voice

FULL_SECONDS = 3600.0  # every sample of this first hour becomes a line; later only some do, so that files stay small
_SPARSE = 10  # one line for so many samples, after that
PATIENCE = 2.0  # seconds that `stop` waits for a sample that is under way
_DIGITS = 4


class Monitor:
    """Samples at a fixed rate, writes lines to a file, and keeps totals."""

    def __init__(
        self,
        path: Path,
        every: float,
        ranks: Callable[[], Sequence[RankProcess]],
        find_gpus: Callable[[Nvml], Collection[str]] | None,
        listen: Callable[[Usage], None],
        voice: Voice = SILENT,
        start: int = 0,
    ) -> None:
        self.totals = Totals()
        self.samples = 0
        self.processor_seconds = 0.0  # used by this thread
        self._path = path
        self.every = every
        self._ranks = ranks
        self._find_gpus = find_gpus  # None: the run uses no GPUs
        self._listen = listen
        self._voice = voice
        self._start = start  # batch that the run resumes from
        self._warned: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take one last sample and end; a thread that hangs is left behind."""
        self._ended.set()
        self._thread.join(PATIENCE)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                self._take_samples(HostMeter(), self._open_gpus(stack))
        except Exception as error:  # the monitor must never end a run
            self._warn_once(f"the monitor stopped: {type(error).__name__}: {error}")

    def _take_samples(self, host: HostMeter, gpus: GpuMeter | None) -> None:
        """One sample at once, one at every multiple of `every`, and one at the end."""
        began, before = time.monotonic(), _last_seconds(self._path)
        is_over = False
        while True:
            usage = self._sample(host, gpus, before + time.monotonic() - began)
            self.totals.add(usage)
            self._write(usage, is_over)
            self._listen(usage)
            self.samples += 1
            self.processor_seconds = time.thread_time()
            if is_over:
                return
            passed = time.monotonic() - began
            is_over = self._ended.wait((int(passed / self.every) + 1) * self.every - passed)

    def _sample(self, host: HostMeter, gpus: GpuMeter | None, seconds: float) -> Usage:
        ranks = self._ranks()
        cores, memory, used = host.read(ranks)
        seen = () if gpus is None else gpus.read({rank.process for rank in ranks})
        for gpu in seen:
            if gpu.memory is None and gpu.utilisation is None:
                self._warn_once(f"the monitor gets no answer from GPU {gpu.index} ({gpu.uuid}); the run continues")
        return Usage(seconds, cores, memory, seen, used, self._start)

    def _write(self, usage: Usage, is_last: bool) -> None:
        """Append a line, or skip it in a long run."""
        if self.samples * self.every > FULL_SECONDS and self.samples % _SPARSE and not is_last:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(_rounded(asdict(usage)), separators=(",", ":")) + "\n")
        except OSError as error:
            self._warn_once(f"{self._path} could not be written: {error.strerror}; the run continues")

    def _open_gpus(self, stack: ExitStack) -> GpuMeter | None:
        if self._find_gpus is None:
            return None
        try:
            nvml = stack.enter_context(open_nvml())
        except NoNvml as error:
            self._warn_once(f"the monitor can't read the GPUs' memory and power: {error}; the run continues")
            return None
        uuids = self._find_gpus(nvml)
        if not uuids:
            self._warn_once(
                "the monitor finds none of the run's GPUs (MIG, or CUDA_VISIBLE_DEVICES?); the run continues"
            )
        return GpuMeter(nvml, uuids, name_of)

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            self._voice.warn(warning)


class Totals:
    """Peaks, means and sums over the samples of a run."""

    def __init__(self) -> None:
        self._machine = _Values()
        self._ranks: dict[int, _Values] = {}
        self._gpus: dict[str, _GpuTotals] = {}
        self._samples = 0
        self._seconds = 0.0
        self._last: float | None = None

    def add(self, usage: Usage) -> None:
        seconds = 0.0 if self._last is None else max(usage.seconds - self._last, 0.0)
        self._last = usage.seconds
        self._seconds += seconds
        self._samples += 1
        self._machine.add(seconds, memory=usage.memory, cores=usage.cores)
        for gpu in usage.gpus:
            self._gpus.setdefault(gpu.uuid, _GpuTotals(gpu)).add(gpu, seconds)
        for rank in usage.ranks:
            values = self._ranks.setdefault(rank.rank, _Values())
            values.add(seconds, memory=rank.memory, torch_memory=rank.torch_memory, cores=rank.cores)

    def describe(self) -> dict[str, Any]:
        """The totals as summary.json holds them; unknown values are None."""
        gpus = [gpu.describe() for gpu in self._gpus.values()]
        energies, powers = ([gpu[name] for gpu in gpus if gpu[name] is not None] for name in ("energy", "mean_power"))
        return {
            "moments": self._samples,
            "seconds": self._seconds,
            "peak_machine_memory": self._machine.peak("memory") or 0,
            "mean_machine_cores": self._machine.mean("cores"),
            "ranks": [
                {
                    "rank": rank,
                    "peak_memory": values.peak("memory"),
                    "peak_torch_memory": values.peak("torch_memory"),
                    "mean_cores": values.mean("cores"),
                }
                for rank, values in sorted(self._ranks.items())
            ],
            "gpus": gpus,
            "mean_power": sum(powers) if powers else None,
            "energy": sum(energies) if energies else None,
            "throttled_seconds": max((gpu["throttled_seconds"] for gpu in gpus), default=None),
            "foreign": max((gpu["foreign"] for gpu in gpus), default=None),
        }


class _Values:
    """Peaks of values by name, and their means over time: each value is weighted by the seconds before it."""

    def __init__(self) -> None:
        self._peaks: dict[str, Any] = {}
        self._sums: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def add(self, seconds: float, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._peaks[name] = max(value, self._peaks.get(name, value))
                self._sums[name] = self.sum(name) + value * seconds
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def peak(self, name: str) -> Any:
        return self._peaks.get(name)

    def sum(self, name: str) -> float:
        return self._sums.get(name, 0.0)

    def mean(self, name: str) -> float | None:
        seconds = self._seconds.get(name)
        return self.sum(name) / seconds if seconds else None


class _GpuTotals:
    """One GPU over a whole run."""

    def __init__(self, usage: GpuUsage) -> None:
        self._gpu = usage
        self._values = _Values()
        self._throttled: dict[str, float] = {}  # seconds by reason
        self._throttled_seconds = 0.0  # for any reason
        self._counted = 0.0  # joules, by the GPU's energy counter
        self._before: float | None = None

    def add(self, usage: GpuUsage, seconds: float) -> None:
        names = ("memory", "temperature", "foreign", "utilisation", "power")
        self._values.add(seconds, **{name: getattr(usage, name) for name in names})
        for reason in usage.throttled:
            self._throttled[reason] = self._throttled.get(reason, 0.0) + seconds
        self._throttled_seconds += seconds if usage.throttled else 0.0
        if usage.energy is not None:
            before = usage.energy if self._before is None else self._before
            self._counted += max(usage.energy - before, 0.0)  # a reloaded driver counts from 0 again
            self._before = usage.energy

    def describe(self) -> dict[str, Any]:
        values = self._values
        power = values.mean("power")
        by_power = None if power is None else values.sum("power")
        return {
            "uuid": self._gpu.uuid,
            "index": self._gpu.index,
            "peak_memory": values.peak("memory"),
            "mean_utilisation": values.mean("utilisation"),
            "mean_power": power,  # watts
            "energy": by_power if self._before is None else self._counted,  # joules
            "peak_temperature": values.peak("temperature"),
            "throttled": self._throttled,
            "throttled_seconds": self._throttled_seconds,
            "foreign": values.peak("foreign"),  # most processes at a time that are not of this run
        }


def _rounded(value: Any) -> Any:
    """The same value with floats rounded, which keeps the file small."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _last_seconds(path: Path) -> float:
    """The seconds of the last line of a resumed run's file; a torn last line is ended first."""
    try:
        lines = path.read_bytes()
    except OSError:
        return 0.0
    if lines and not lines.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    return next((usage.seconds for usage in read_usage(reversed(lines.splitlines()))), 0.0)
