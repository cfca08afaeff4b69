"""A thread of the supervisor that looks at the machine at a fixed rate; whatever goes wrong with it, the run goes on.

A thread and not a process: it costs no start, no memory, and ends with the supervisor however that ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from stagewright.machine.nvml import NoNvml, Nvml, open_nvml
from stagewright.metrics import Use
from stagewright.monitor.gpus import GpuMeter
from stagewright.monitor.host import HostMeter, RankProcess, name_of
from stagewright.monitor.totals import Totals

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
        listen: Callable[[Use], None],
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

    def _look(self, host: HostMeter, gpus: GpuMeter | None, seconds: float) -> Use:
        ranks = self._ranks()
        cores, memory, uses = host.read(ranks)
        seen = () if gpus is None else gpus.read({rank.process for rank in ranks})
        for gpu in seen:
            if gpu.memory is None and gpu.utilisation is None:
                self._say(f"the monitor gets no answer from GPU {gpu.index} ({gpu.uuid}); the run goes on")
        return Use(seconds, cores, memory, seen, uses, self._start)

    def _keep(self, use: Use, is_last: bool) -> None:
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
