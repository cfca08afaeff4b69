"""What happens in a run, as values: records of metrics.jsonl, and moments of monitor.jsonl.

A `Record` is one line of metrics.jsonl; `as_fields` and `as_record` are its only codec. They also read lines of older
runs: a new field has a default. A `Usage`, with its `GpuUsage` and `RankUsage`, is one line of monitor.jsonl. A `Score`
is written nowhere: those of all replicas add up to an `Evaluated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One trained batch."""

    batch: int  # from 0
    epoch: int  # from 0
    loss: float
    lr: float
    seconds: float  # since the run started to train
    images_per_second: float
    loss_scale: float | None = None  # of its gradients, in fp16


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation, after `batch` batches."""

    batch: int
    samples: int
    loss: float
    top1: float  # 0 to 1
    top5: float

    @staticmethod
    def of(batch: int, scores: Iterable[Score]) -> Evaluated:
        """The evaluation that the scores of all replicas add up to."""
        total = sum(scores, Score())
        return Evaluated(
            batch, total.samples, total.loss / total.samples, total.top1 / total.samples, total.top5 / total.samples
        )


@dataclass(frozen=True, slots=True)
class Replaced:
    """A data record that could not be read; another one took its place."""

    index: int
    reason: str  # starts with the record's name


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint after `batch` batches is on the disk."""

    batch: int
    bytes: int
    seconds: float  # that training waited for the copy


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A checkpoint after `batch` batches could not be written."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The ranks started again after a fault, after `batch` batches."""

    batch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run resumed after `batch` batches."""

    batch: int
    checkpoint: str
    plan: str  # of the checkpoint, as in `stale 7-1`


Record = Step | Evaluated | Replaced | Saved | Unsaved | Restarted | Resumed
_KINDS: dict[str, type[Record]] = {
    kind.__name__.lower(): kind for kind in (Step, Evaluated, Replaced, Saved, Unsaved, Restarted, Resumed)
}


def as_fields(record: Record) -> dict[str, Any]:
    """A record as a JSON object: its kind, then its fields; those that are None are left out."""
    known = {name: value for name, value in asdict(record).items() if value is not None}
    return {"kind": type(record).__name__.lower(), **known}


def as_record(fields: Mapping[str, Any]) -> Record:
    """The record of a JSON object; KeyError or TypeError where it is not one. Values are not checked."""
    return _KINDS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over the samples that one replica has evaluated; scores add up over replicas."""

    samples: int = 0
    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.samples + other.samples, self.loss + other.loss, self.top1 + other.top1, self.top5 + other.top5
        )


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """One GPU at one moment, as NVML reports it; None where the driver does not say."""

    uuid: str
    index: int
    memory: int | None  # bytes in use by all processes
    utilisation: float | None  # 0 to 1
    power: float | None = None  # watts
    energy: float | None = None  # joules since the driver was loaded
    temperature: float | None = None  # degrees Celsius
    clock: float | None = None  # of the multiprocessors, in Hz
    throttled: tuple[str, ...] = ()  # the reasons why its clock is reduced
    foreign: int = 0  # processes on it that do not belong to this run


@dataclass(frozen=True, slots=True)
class RankUsage:
    """One rank's process at one moment."""

    rank: int
    memory: int  # resident bytes
    cores: float  # that it kept busy since the moment before
    torch_memory: int | None = None  # bytes that torch has reserved on its device


@dataclass(frozen=True, slots=True)
class Usage:
    """What a run and its machine use at one moment."""

    seconds: float  # since the run started
    cores: float  # that all processes of the machine kept busy
    memory: int  # bytes that all processes of the machine use
    gpus: tuple[GpuUsage, ...]
    ranks: tuple[RankUsage, ...]
    start: int = 0  # batch at which this part of the run resumed
