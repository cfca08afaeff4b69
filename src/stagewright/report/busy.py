"""Where the time of a run went, read off its timeline."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stagewright.metrics import Span, Timeline
from stagewright.report.page import Curve, Curves, Point
from stagewright.report.record import Run

_WINDOWS = 60
_LATE = 0.05  # of the whole: a rank that begins earlier has only waited for the pipeline to fill
_NUMBERED = re.compile(r"[0-9]+[FB]([0-9]{1,15})@")
_MOST_CURVES = 16


@dataclass(frozen=True, slots=True)
class Busy:
    """Share of its time that each rank computed, while all of them trained."""

    shares: tuple[float, ...]

    @property
    def busiest(self) -> int:
        return max(range(len(self.shares)), key=lambda rank: self.shares[rank])

    @property
    def bubble(self) -> float:
        return 1 - sum(self.shares) / len(self.shares)


def is_training(span: Span) -> bool:
    """Whether a compute trains: the forwards of an evaluation have no version."""
    return span.lane == "compute" and (span.kind != "F" or "@" in span.name)


def find_busy(run: Run) -> Busy | None:
    """From when every rank had begun to train until the first had ended, without pauses; None without a timeline."""
    ranks = len(run.layout.ranks)
    by_rank: list[list[Span]] = [[] for _ in range(ranks)]
    for span in run.timeline.spans if run.timeline else ():
        if 0 <= span.rank < ranks and is_training(span):
            by_rank[span.rank].append(span)
    if not by_rank or not all(by_rank):
        return None
    first = max(min(span.start for span in spans) for spans in by_rank)
    last = min(max(span.end for span in spans) for spans in by_rank)
    trained = last - first - _paused(run, [span for spans in by_rank for span in spans], first, last)
    if trained <= 0:
        return None
    busy = [sum(max(0.0, min(span.end, last) - max(span.start, first)) for span in spans) for spans in by_rank]
    return Busy(tuple(min(1.0, seconds / trained) for seconds in busy))


def _paused(run: Run, spans: list[Span], first: float, last: float) -> float:
    """Seconds for which the pipeline stood drained, for an evaluation or a checkpoint."""
    microbatches = int(run.plan.get("microbatches") or 0)
    numbered = sorted((int(match[1]), span.start, span.end) for span in spans if (match := _NUMBERED.match(span.name)))
    numbers = [number for number, _, _ in numbered]
    ended = list(accumulate((end for _, _, end in numbered), max))  # when all up to here were done
    begun = list(accumulate((start for _, start, _ in reversed(numbered)), min))[::-1]  # when the first from here began
    total = 0.0
    for batch in {evaluated.batch for evaluated in run.evaluations} | set(run.saved):
        at = bisect_left(numbers, batch * microbatches)
        if 0 < at < len(numbers):
            total += max(0.0, min(begun[at], last) - max(ended[at - 1], first))
    return total


def common(timeline: Timeline) -> Timeline:
    """From when all ranks are in it: each keeps its last actions, and busy ranks do not reach back as far as others."""
    begun: dict[int, float] = {}
    for span in timeline.spans:
        begun[span.rank] = min(span.start, begun.get(span.rank, span.start))
    since = max(begun.values(), default=0.0)
    return timeline.since(since) if since > _LATE * timeline.end else timeline


def over_time(timeline: Timeline, labels: tuple[str, ...]) -> Curves | None:
    """The share of each stretch that ranks compute; the mean over all where there are too many to tell apart."""
    end = timeline.end
    if not end:
        return None
    edges = [end * number / _WINDOWS for number in range(_WINDOWS + 1)]
    shares = [[0.0] * _WINDOWS for _ in labels]
    for span in timeline.spans:
        if span.lane == "compute" and span.rank < len(labels):
            _spread(shares[span.rank], span, end)
    middles = [(left + right) / 2 for left, right in pairwise(edges)]
    if len(labels) > _MOST_CURVES:
        shares = [[sum(column) / len(labels) for column in zip(*shares, strict=True)]]
        labels = (f"mean of {len(labels)} ranks",)
    curves = tuple(
        Curve(label, tuple(Point(x, 100 * min(1.0, y)) for x, y in zip(middles, row, strict=True)))
        for label, row in zip(labels, shares, strict=True)
    )
    return Curves("Computing over time", "seconds of the timeline", "% of the time", curves)


def _spread(row: list[float], span: Span, end: float) -> None:
    """Add a span to the windows that it covers."""
    width = end / _WINDOWS
    for window in range(max(0, int(span.start / width)), min(_WINDOWS, int(span.end / width) + 1)):
        covered = min(span.end, (window + 1) * width) - max(span.start, window * width)
        row[window] += max(0.0, covered) / width
