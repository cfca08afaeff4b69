"""`monitor`: what the monitor costs, from segments of one run with and without it, and its thread's own time."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.outcome import Outcome, new_outcome, not_slower, ratio_of
from stagewright.bench.result import measured_row
from stagewright.config.toml import FIXED, make_config
from stagewright.events import Record, Step
from stagewright.hardware.monitor import Monitor
from stagewright.run.observe.monitor import make_monitor
from stagewright.run.prepare import prepare
from stagewright.runtime.job import Job
from stagewright.runtime.process.launch import launch
from stagewright.runtime.process.log import Ledger
from stagewright.voice import Voice

ROUNDS = 50  # of four segments: with, without, without, with the monitor
SEGMENT_SECONDS = 1.0
_WARMUP = 40  # batches
_BATCH = 32


class Segments:
    """Receives the steps of a run, and starts the monitor for two of every four segments."""

    def __init__(self, job: Job, segment: int, voice: Voice) -> None:
        self.watched: list[float] = []
        self.alone: list[float] = []
        self.monitors: list[Monitor] = []
        self._job = job
        self._segment = segment
        self._voice = voice
        self._began: Step | None = None

    @property
    def _done(self) -> int:
        return len(self.watched) + len(self.alone)

    def receive(self, record: Record) -> None:
        if not isinstance(record, Step) or record.batch < _WARMUP or self._done == 4 * ROUNDS:
            return
        is_watched = self._done % 4 in (0, 3)
        if self._began is None:
            self._voice.progress(f"segment {self._done + 1} of {4 * ROUNDS}")
            self._began = record
            if is_watched:
                self.monitors.append(make_monitor(self._job, lambda use: None, Voice(warn=self._voice.progress)))
                self.monitors[-1].start()
        elif record.batch - self._began.batch == self._segment:
            if is_watched:
                self.monitors[-1].stop()
            seconds = record.seconds - self._began.seconds
            (self.watched if is_watched else self.alone).append(self._segment * self._job.plan.batch / seconds)
            self._began = None


def measure(voice: Voice) -> Outcome:
    """Train on two ranks: once to time a batch, and once in segments with and without the monitor."""
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
        voice.progress("timing a batch")
        steps: list[Step] = []
        job = _prepare(folder, 2 * _WARMUP)
        _train(job, lambda record: steps.append(record) if isinstance(record, Step) else None)
        batch_seconds = (steps[-1].seconds - steps[_WARMUP].seconds) / (len(steps) - 1 - _WARMUP)
        segment = max(int(SEGMENT_SECONDS / batch_seconds), 1)
        job = _prepare(folder, _WARMUP + 4 * ROUNDS * (segment + 1) + 1)
        segments = Segments(job, segment, voice)
        _train(job, segments.receive)
    return make_outcome(segments, job.config.run.device, job.config.run.monitor_every)


def _prepare(folder: str, steps: int) -> Job:
    device: dict[str, Any] = {"device": "cuda", "share_gpu": True} if torch.cuda.is_available() else {}
    tables: dict[str, dict[str, Any]] = {
        "data": {"samples": 1024},
        "plan": {"placement": "0:0.0:1", "mode": "stale", "batch": _BATCH, "microbatches": 4},
        "run": {"steps": steps, "runs": folder} | device,
    }
    return prepare(make_config(FIXED, tables)).job


def _train(job: Job, receive: Callable[[Record], None]) -> None:
    with Ledger(job, receive) as ledger:
        launch(job, ledger)


def _start_seconds() -> float:
    """Processor time of a process until it could take its first sample."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import stagewright.hardware.monitor"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_outcome(segments: Segments, device: str, every: float) -> Outcome:
    """With over without, by rounds: both sides of a round have the same middle, so slow drifts cancel.

    The share of a core is computed per sample, since a segment begins and ends with one.
    """
    group = f"vgg-small on two {device} ranks, a sample every {every:g} s, segments of {SEGMENT_SECONDS:g} s"
    watched, alone = (
        measured_row(group, name, [(one + other) / 2 for one, other in zip(speeds[::2], speeds[1::2], strict=True)])
        for name, speeds in (("with the monitor", segments.watched), ("without", segments.alone))
    )
    samples = sum(monitor.samples for monitor in segments.monitors)
    sample_seconds = sum(monitor.processor_seconds for monitor in segments.monitors) / samples
    return new_outcome(
        "monitor",
        "What the monitor costs",
        len(watched.repeats),
        rows=(watched, alone),
        ratios=(ratio_of(watched, alone, not_slower()),),
        figures={
            "% of a core that its thread takes": 100 * sample_seconds / every,
            "ms per sample": 1e3 * sample_seconds,
            "samples": samples,
            "ms of a core that a process would take before its first sample": 1e3 * _start_seconds(),
        },
    )
