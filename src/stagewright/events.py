"""What was measured, or predicted: spans of time, steps, evaluations and the summary of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One trained batch."""

    batch: int
    epoch: int
    loss: float
    lr: float
    seconds: float  # since the run began to train
    images_per_second: float
    loss_scale: float | None = None  # of its gradients, in fp16


@dataclass(frozen=True, slots=True)
class Replaced:
    """A record that could not be used, so that another one took its place."""

    index: int
    reason: str  # begins with its name


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is on the disk, after `batch` batches."""

    batch: int
    bytes: int
    seconds: float  # that training stood still for the copy


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A checkpoint that could not be written."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The ranks had to begin again, after `batch` batches."""

    batch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run went on after `batch` batches, from a checkpoint that a plan left, as in `stale 7-1`."""

    batch: int
    checkpoint: str
    plan: str


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """One GPU at one moment, as NVML counts it."""

    uuid: str
    index: int
    memory: int | None  # bytes in use, by anyone; None where the driver does not say
    utilisation: float | None  # 0 to 1
    power: float | None = None  # watts
    energy: float | None = None  # joules since the driver was loaded
    temperature: float | None = None  # degrees Celsius
    clock: float | None = None  # of the multiprocessors, in Hz
    throttled: tuple[str, ...] = ()  # why it is slower than it could be
    foreign: int = 0  # processes on it that are not of this run


@dataclass(frozen=True, slots=True)
class RankUsage:
    """One rank's process at one moment."""

    rank: int
    memory: int  # resident bytes
    cores: float  # that it kept busy since the moment before
    torch_memory: int | None = None  # bytes that torch holds on its device


@dataclass(frozen=True, slots=True)
class Usage:
    """What a run uses of its machine at one moment: a line of monitor.jsonl."""

    seconds: float  # since the run began
    cores: float  # that everything on the machine kept busy
    memory: int  # bytes that everything on the machine uses
    gpus: tuple[GpuUsage, ...]
    ranks: tuple[RankUsage, ...]
    start: int = 0  # batch that this part of the run went on from


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over evaluated samples; they add up over replicas."""

    samples: int = 0
    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.samples + other.samples, self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5
        )


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation, after `batch` batches."""

    batch: int
    samples: int
    loss: float
    top1: float
    top5: float

    @staticmethod
    def of(batch: int, scores: Iterable[Score]) -> Evaluated:
        total = sum(scores, Score())
        return Evaluated(
            batch, total.samples, total.loss / total.samples, total.top1 / total.samples, total.top5 / total.samples
        )
