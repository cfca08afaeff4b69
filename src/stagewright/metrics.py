"""What a run measures: its speed (`steady_rate`, the only definition), its metrics and its timeline. Units of bytes.

A `ThroughputUnit` is what throughput counts: images, or the tokens of a sample. A metric of an evaluation is a total
over a count, both summed over all samples and replicas (`metric_values`); how one is named, written and compared is
here too. `RecentRate` is the speed at one moment of a run, as metrics.jsonl and trackers have it for every step.
A `Timeline`, measured or simulated, has the spans of all ranks; it says how busy they were and becomes a trace for
Perfetto.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol

from stagewright.errors import UserError, did_you_mean

MIB, GIB = 2**20, 2**30  # bytes
MAD_OF_SIGMA = 0.6745  # median absolute deviation of a normal distribution, in standard deviations
_LANES = ("compute", "transfer", "wait")  # in the order that a trace shows them
_WINDOW = 3
_CLOSE = 0.05  # of the level: a time this near has reached it, however little the rest varies
_SPREADS = 3.0
_MOST_SEGMENTS = 40
_RECENT_BATCHES, _RECENT_SECONDS = 20, 1.0


class TimedBatch(Protocol):
    """The part of a step that its speed depends on."""

    @property
    def batch(self) -> int: ...

    @property
    def seconds(self) -> float: ...  # of training when it ended


@dataclass(frozen=True, slots=True)
class SteadyRate:
    """A run's speed after its warm-up."""

    rate: float  # images per second
    warmup: int  # batches before the plateau
    is_steady: bool  # a plateau was found
    times: tuple[float, ...]  # seconds per batch of every segment, including the warm-up
    steady: tuple[float, ...]  # seconds of each batch that counts

    @property
    def steps(self) -> int:
        """How many batches are steady: those that count, or none where there is no plateau."""
        return len(self.steady) if self.is_steady else 0


@dataclass(frozen=True, slots=True)
class ThroughputUnit:
    """What a run's throughput counts, and how many of it a sample has."""

    name: str = "images"
    per_sample: int = 1

    @property
    def rate(self) -> str:
        """The unit of throughput, as in `images/s`."""
        return f"{self.name}/s"

    def of(self, samples: float) -> float:
        """Samples, or samples per second, in this unit."""
        return samples * self.per_sample


IMAGES, SAMPLES = ThroughputUnit(), ThroughputUnit("samples")


def format_rate(speed: float) -> str:
    """A throughput for people: the digits before the point, and where these are few, some behind it."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}" if speed >= 1 else f"{speed:.2g}"


def speed_words(rate: float | None, steady: int | None, unit: ThroughputUnit = IMAGES) -> str:
    """A run's speed for people: how many steps it counts (None: not known), or that none was steady."""
    if rate is None:
        return "speed not known: no step was timed"
    shown = f"{format_rate(unit.of(rate))} {unit.rate}"
    if steady == 0:
        return f"speed not known: no step was steady (about {shown} in the later half)"
    return f"{shown} over the last {steady}" if steady else shown


LOSS = "loss"
_PERPLEXITY = "perplexity"  # its total is of log-losses
_CLASS_OF = "iou/"  # before the number of a class


class _Known(NamedTuple):
    """A metric of which it is known what is better."""

    label: str
    is_lower_better: bool = False
    is_percentage: bool = False


_KNOWN = {
    LOSS: _Known(LOSS, is_lower_better=True),
    "top1": _Known("top-1", is_percentage=True),
    "top5": _Known("top-5", is_percentage=True),
    "accuracy": _Known("accuracy", is_percentage=True),
    "iou": _Known("mean IoU", is_percentage=True),
    "mae": _Known("MAE", is_lower_better=True),
    "mse": _Known("MSE", is_lower_better=True),
    _PERPLEXITY: _Known(_PERPLEXITY, is_lower_better=True),
}


def metric_values(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The value of each metric: total over count; one that counted nothing has none.

    `perplexity` is the exponential of that, and before the `iou/K` of the classes comes `iou`, their mean.
    """
    found: dict[str, float] = {}
    for name, (total, count) in totals.items():
        if count:
            if name.startswith(_CLASS_OF):
                found.setdefault("iou", 0.0)
            found[name] = _exp(total / count) if name == _PERPLEXITY else total / count
    classes = [value for name, value in found.items() if name.startswith(_CLASS_OF)]
    return found | ({"iou": fmean(classes)} if classes else {})


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def headline_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a line has room for: without those of single classes, such as `iou/3`."""
    return {name: value for name, value in metrics.items() if "/" not in name}


def is_percentage(metric: str) -> bool:
    """Whether a metric is a share, which is written in percent."""
    known = _KNOWN.get(metric.partition("/")[0])
    return metric.endswith("_accuracy") if known is None else known.is_percentage


def is_lower_better(metric: str) -> bool:
    """Whether less of a metric is better: of losses and errors."""
    known = _KNOWN.get(metric)
    return f"_{metric}".endswith(("_loss", "_error")) if known is None else known.is_lower_better


@dataclass(frozen=True, slots=True)
class Criterion:
    """Which of two evaluations is better: that with more, or with less, of one metric."""

    metric: str
    is_lower_better: bool

    @staticmethod
    def parse(text: str) -> Criterion:
        """The criterion of `--best`: `loss` or a built-in metric, or `min:NAME` or `max:NAME`."""
        way, colon, name = text.partition(":")
        if name and way in ("min", "max"):
            return Criterion(name, way == "min")
        if text not in _KNOWN or colon:
            raise UserError(
                f"--best '{text}' is unknown (a metric of yours is min:{name or way} or max:{name or way}); "
                f"{did_you_mean(text, _KNOWN)}"
            )
        return Criterion(text, is_lower_better(text))

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best before it, if there was one; one that is not finite never is."""
        if not math.isfinite(value):
            return False
        return best is None or (value < best if self.is_lower_better else value > best)


def metric_label(metric: str) -> str:
    """A metric's name for people."""
    return _KNOWN[metric].label if metric in _KNOWN else metric


def format_metric(metric: str, value: float, digits: int = 1) -> str:
    """A metric's value for people: in percent with so many digits, or as a number."""
    return f"{value:.{digits}%}" if is_percentage(metric) else f"{value:.{digits + 3}g}"


def metric_words(metrics: Mapping[str, float], digits: int = 1) -> list[str]:
    """Each metric that a line has room for as its name and value, as in `top-1 75.0%`."""
    shown = headline_metrics(metrics)
    return [f"{metric_label(name)} {format_metric(name, value, digits)}" for name, value in shown.items()]


class RecentRate:
    """Images per second over a window: the last 20 batches, or as many more as it takes to span a second.

    The losses of several batches may arrive at once, so the time of a single one says nothing.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._total = 0.0

    def add(self, seconds: float) -> None:
        """Add the time of the next batch."""
        self._times.append(seconds)
        self._total += seconds
        while len(self._times) > _RECENT_BATCHES and self._total - self._times[0] >= _RECENT_SECONDS:
            self._total -= self._times.popleft()

    def rate(self, batch: int) -> float:
        """The speed of batches of so many images; 0 before any time was measured."""
        return batch * len(self._times) / self._total if self._total > 0 else 0.0


def steady_rate(steps: Iterable[TimedBatch], batch: int, interrupted: Collection[int] = ()) -> SteadyRate | None:
    """A run's speed: the images of its steady batches over their seconds; None where no batch is left.

    `interrupted` are the numbers of batches right after an evaluation, a restart or a resume: their times include the
    pause and never count. Of the others, in at most 40 segments of equally many, those count that come after the
    warm-up (`find_plateau`); where there is no plateau, those of the later half. A batch has `batch` images.
    """
    seconds = [took for number, took in batch_seconds(steps).items() if number not in interrupted]
    found = segments(seconds, _MOST_SEGMENTS)
    times = tuple(total / count for count, total in found)
    plateau = find_plateau(times)
    warmup = sum(count for count, _ in found[: plateau.start])
    steady = tuple(seconds[warmup:])
    if batch <= 0 or sum(steady) <= 0:
        return None
    return SteadyRate(batch * len(steady) / sum(steady), warmup, plateau.is_reached, times, steady)


def batch_seconds(steps: Iterable[TimedBatch]) -> dict[int, float]:
    """Seconds of each batch by its number, since the end of the one before; left out where that one is missing."""
    found: dict[int, float] = {}
    last, end = -1, 0.0
    for step in steps:
        if step.batch == last + 1:
            found[step.batch] = max(0.0, step.seconds - end)
        last, end = step.batch, max(end, step.seconds) if step.batch == last + 1 else step.seconds
    return found


def segments(times: Sequence[float], most: int) -> list[tuple[int, float]]:
    """At most `most` segments of equally many neighbouring batches: how many each has, and their total time."""
    size = max(1, -(-len(times) // most))
    whole = len(times) // size * size
    return [(size, sum(times[first : first + size])) for first in range(0, whole, size)]


@dataclass(frozen=True, slots=True)
class Plateau:
    """Where a series becomes steady; where it never does, the start of its later half."""

    start: int
    is_reached: bool


def find_plateau(times: Sequence[float]) -> Plateau:
    """The first segment from which times stay at the level of the later half.

    Windows of three segments are judged by their median, so one disturbed segment neither ends nor delays the warm-up.
    The level must not drift: the medians of the last two quarters must be close to each other.
    """
    half = len(times) // 2
    late = times[half:]
    if len(late) < 2:
        return Plateau(half, False)
    level = median(late)
    spread = median(abs(value - level) for value in late) / MAD_OF_SIGMA
    close = max(_CLOSE * level, _SPREADS * spread)
    middle = len(late) // 2
    drift = abs(median(late[:middle]) - median(late[middle:]))
    if drift > max(_CLOSE * level, spread):
        return Plateau(half, False)
    for start in range(half):
        if abs(median(times[start : start + _WINDOW]) - level) <= close and abs(times[start] - level) <= close:
            return Plateau(start, True)
    return Plateau(half, True)


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank: when it started and ended, in seconds."""

    rank: int
    lane: str  # compute, transfer, or wait (until an action has what it needs)
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

    def bubble(self, ranks: Sequence[int], first: float, last: float) -> float:
        """Share of the ranks' time within a window in which they do not compute."""
        shares = self.busy_shares(max(ranks) + 1, first, last)
        return 1 - fmean(shares[rank] for rank in ranks)

    def busy_shares(self, ranks: int, first: float, last: float) -> tuple[float, ...]:
        """Share of a window that each rank computes; one pass for all ranks."""
        busy = [0.0] * ranks
        for span in self.spans:
            if span.lane == "compute":
                busy[span.rank] += max(0.0, min(span.end, last) - max(span.start, first))
        return tuple(seconds / (last - first) for seconds in busy)

    def since(self, moment: float) -> Timeline:
        """The spans that start at a moment or later, with that moment as zero."""
        kept = (span for span in self.spans if span.start >= moment)
        return Timeline(tuple(replace(span, start=span.start - moment, end=span.end - moment) for span in kept))

    def chrome_trace(self) -> dict[str, Any]:
        """The trace that Perfetto and chrome://tracing open: a process per rank, a thread per lane, nanoseconds."""
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
        """The timeline of a trace that `chrome_trace` made, exact to the nanosecond."""
        events = trace["traceEvents"]
        lanes = {
            (event["pid"], event["tid"]): str(event["args"]["name"]).partition(" ")[0]
            for event in events
            if event["name"] == "thread_name"
        }
        spans = []
        for event in (event for event in events if event["ph"] == "X"):
            rank, start, took = int(event["pid"]), event["ts"], event["dur"]
            lane = lanes.get((event["pid"], event["tid"]), str(event["tid"]))
            kind, name = str(event["cat"]), str(event["name"])
            spans.append(Span(rank, lane, kind, name, start / 1e6, (start + took) / 1e6))
        return Timeline(tuple(spans))

    def _by_lane(self) -> dict[tuple[int, str], list[Span]]:
        found: dict[tuple[int, str], list[Span]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            found.setdefault((span.rank, span.lane), []).append(span)
        return found


def _order(lane: str) -> int:
    return _LANES.index(lane) if lane in _LANES else len(_LANES)


def _tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """Deal overlapping spans to several threads: a trace viewer takes spans that share a thread for nested calls."""
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
