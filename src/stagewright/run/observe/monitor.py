"""The monitor of a run: which processes and GPUs it samples, and what it leaves in the summary."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stagewright.config.sections import Config
from stagewright.errors import UserError
from stagewright.events import Record, Usage
from stagewright.hardware.gpu import Nvml, read_gpus, visible
from stagewright.hardware.meters import RankProcess
from stagewright.hardware.monitor import Monitor
from stagewright.runtime.comm.device import gpu_of
from stagewright.runtime.job import Job
from stagewright.runtime.status_file import read_process, status_path
from stagewright.voice import SILENT, Voice

Callback = Callable[[Record], object]
_SHORTEST = 0.05  # seconds; sampling more often would itself load the machine


def check_monitor_rate(config: Config) -> None:
    """Raise a UserError where --monitor-every is out of bounds."""
    every = config.run.monitor_every
    if not (every == 0 or _SHORTEST <= every < math.inf):
        raise UserError(f"--monitor-every is {every:g}; give at least {_SHORTEST:g} seconds, or 0 for no monitor")


def monitored(
    job: Job, listen: Callable[[Usage], None], voice: Voice = SILENT, machine: int = 0
) -> AbstractContextManager[Monitor | None]:
    """Monitor this machine's ranks at the configured rate; None where the rate is 0."""
    return make_monitor(job, listen, voice, machine) if job.config.run.monitor_every else nullcontext()


def make_monitor(job: Job, listen: Callable[[Usage], None], voice: Voice = SILENT, machine: int = 0) -> Monitor:
    """A monitor of this machine's ranks, not started yet."""
    name = "monitor.jsonl" if machine == 0 else f"monitor-{machine}.jsonl"
    find = (lambda nvml: run_gpus(job, machine, nvml)) if job.config.run.device == "cuda" else None
    every = job.config.run.monitor_every
    ranks = partial(rank_processes, job, machine)
    return Monitor(Path(job.folder) / name, every, ranks, find, listen, voice, job.start)


def fan_out(*listeners: Callable[[Any], None]) -> Callable[[Any], None]:
    """One listener that calls all of these, in order."""

    def call_all(record: Any) -> None:
        for listen in listeners:
            listen(record)

    return call_all


class Callbacks:
    """A script's functions, called with every record; the run stops where one returns True, or raises."""

    def __init__(self, functions: Sequence[Callback] = ()) -> None:
        self._functions = functions
        self.is_stopping = False
        self.error: Exception | None = None  # what one raised

    def __call__(self, record: Record) -> None:
        for function in () if self.error else self._functions:
            try:
                self.is_stopping = function(record) is True or self.is_stopping
            except Exception as error:  # the script's code may raise anything; its weights are saved first
                self.error, self.is_stopping = error, True
                return


def usage_totals(monitor: Monitor | None) -> dict[str, Any] | None:
    """What a run used in total, for its summary."""
    return None if monitor is None else monitor.totals.describe()


def rank_processes(job: Job, machine: int) -> Sequence[RankProcess]:
    """The processes of this machine's ranks that run now; an emulated run is one process."""
    if job.config.run.emulate:
        held = torch.cuda.memory_reserved() if job.config.run.device == "cuda" else None
        return [RankProcess(0, os.getpid(), held)]
    found = []
    for rank, device in enumerate(job.plan.devices):
        if device.machine == machine:
            process, held = read_process(status_path(Path(job.folder), rank))
            if process:
                found.append(RankProcess(rank, process, held))
    return found


def run_gpus(job: Job, machine: int, nvml: Nvml) -> Collection[str]:
    """The GPUs that this machine's ranks are on."""
    shown, run = visible(read_gpus(nvml)), job.config.run
    if not shown:
        return ()
    here = [0 if run.emulate else device.index for device in job.plan.devices if device.machine == machine]
    indices = {gpu_of(index, len(shown), share=run.share_gpu) for index in here}
    return {shown[index].uuid for index in indices if index < len(shown)}
