"""What was measured, or predicted: spans of time, steps, evaluations and the summary of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from when it began to when it ended."""

    rank: int
    lane: str  # compute, transfer, or wait: for what an action needs
    kind: str  # F, B, U, ...
    name: str  # the action as text
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of all ranks on one clock."""

    spans: tuple[Span, ...]

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, rank: int, first: float, last: float) -> float:
        """Seconds that a rank computes within a window."""
        return sum(
            max(0.0, min(span.end, last) - max(span.start, first))
            for span in self.spans
            if span.rank == rank and span.lane == "compute"
        )

    def bubble(self, ranks: Sequence[int], first: float, last: float) -> float:
        """Share of the ranks' time in a window that is not compute."""
        return 1 - sum(self.busy(rank, first, last) for rank in ranks) / (len(ranks) * (last - first))

    def busy_shares(self, ranks: int, first: float, last: float) -> tuple[float, ...]:
        """Share of a window that each rank computes, all ranks in one pass."""
        busy = [0.0] * ranks
        for span in self.spans:
            if span.lane == "compute":
                busy[span.rank] += max(0.0, min(span.end, last) - max(span.start, first))
        return tuple(seconds / (last - first) for seconds in busy)

    def since(self, moment: float) -> Timeline:
        """What begins at a moment or later; the moment becomes zero."""
        return Timeline(
            tuple(
                replace(span, start=span.start - moment, end=span.end - moment)
                for span in self.spans
                if span.start >= moment
            )
        )

    def chrome_trace(self) -> dict[str, Any]:
        """The trace that Perfetto and chrome://tracing open: a process a rank, a thread a lane, whole nanoseconds."""
        events: list[dict[str, Any]] = []
        for (rank, lane), spans in sorted(self._by_lane().items(), key=lambda item: (item[0][0], _order(item[0][1]))):
            for track, beside in enumerate(_tracks(spans)):
                thread = {"pid": rank, "tid": 100 * _order(lane) + track}
                events.append(_named("thread_name", thread, lane if track == 0 else f"{lane} {track + 1}"))
                events += [_event(span, thread) for span in beside]
        ranks = sorted({span.rank for span in self.spans})
        names = [_named("process_name", {"pid": rank, "tid": 0}, f"rank {rank}") for rank in ranks]
        return {"displayTimeUnit": "ms", "traceEvents": names + events}

    @staticmethod
    def of_trace(trace: dict[str, Any]) -> Timeline:
        """The timeline that a trace was written from, to the nanosecond."""
        events = trace["traceEvents"]
        lanes = {
            (event["pid"], event["tid"]): str(event["args"]["name"]).partition(" ")[0]
            for event in events
            if event["name"] == "thread_name"
        }
        return Timeline(
            tuple(
                Span(
                    int(event["pid"]),
                    lanes.get((event["pid"], event["tid"]), str(event["tid"])),
                    str(event["cat"]),
                    str(event["name"]),
                    event["ts"] / 1e6,
                    (event["ts"] + event["dur"]) / 1e6,
                )
                for event in events
                if event["ph"] == "X"
            )
        )

    def _by_lane(self) -> dict[tuple[int, str], list[Span]]:
        found: dict[tuple[int, str], list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            found.setdefault((span.rank, span.lane), []).append(span)
        return found


_LANES = ("compute", "transfer", "wait")


def _order(lane: str) -> int:
    return _LANES.index(lane) if lane in _LANES else len(_LANES)


def _tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that overlap on threads of their own: a trace viewer takes what shares a thread for nested calls."""
    tracks: list[list[Span]] = []
    for span in spans:
        free = next((track for track in tracks if _nanoseconds(track[-1].end) <= _nanoseconds(span.start)), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _event(span: Span, thread: dict[str, int]) -> dict[str, Any]:
    start, end = _nanoseconds(span.start), _nanoseconds(span.end)
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"name": span.name, "cat": span.kind, "ph": "X", **thread, **times}


def _named(what: str, thread: dict[str, int], name: str) -> dict[str, Any]:
    return {"name": what, "cat": "__metadata", "ph": "M", **thread, "args": {"name": name}}


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
class GpuUse:
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
class RankUse:
    """One rank's process at one moment."""

    rank: int
    memory: int  # resident bytes
    cores: float  # that it kept busy since the moment before
    torch_memory: int | None = None  # bytes that torch holds on its device


@dataclass(frozen=True, slots=True)
class Use:
    """What a run uses of its machine at one moment: a line of monitor.jsonl."""

    seconds: float  # since the run began
    cores: float  # that everything on the machine kept busy
    memory: int  # bytes that everything on the machine uses
    gpus: tuple[GpuUse, ...]
    ranks: tuple[RankUse, ...]
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
