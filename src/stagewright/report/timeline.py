"""Timelines of a run: which share of the time each rank computes, and the compact encoding that a page's script reads.

The encoding takes a few bytes per bar. Every bar is seven numbers: start since the bar before, duration, operation, and
stage, microbatch, version and peer, each as the difference to the bar before in its lane. A name that is not an action
has an index into a table of names in place of the stage.
"""

from __future__ import annotations

import base64
import math
import re
from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import Any

from stagewright.metrics import Span, Timeline
from stagewright.report.charts import KINDS, kind_of
from stagewright.report.page import Curve, Curves, Point
from stagewright.report.read import Run

MOST_BARS = 30_000  # of a page: half a megabyte of text
_WINDOWS = 60  # points of a curve over time
_LATE = 0.05  # of the whole timeline: a rank that begins earlier than that was only waiting for the pipeline to fill
_LANES = ("compute", "transfer", "wait")
_ABSENT = -1
_ACTION = re.compile(r"([0-9]{1,9})([A-Z]{1,2})([0-9]{1,15})?(?:@([0-9]{1,15}))?(?:[<>]([0-9]{1,9}))?")
_MICROBATCH = re.compile(r"[0-9]+[FB]([0-9]{1,15})@")
_MOST_CURVES = 16


def busy_shares(run: Run) -> tuple[float, ...] | None:
    """The share of the time that each rank computes while all ranks are training; None without a timeline.

    Measured from the last rank's start to the first rank's end, without pauses.
    """
    ranks = len(run.rank_map.labels)
    by_rank: list[list[Span]] = [[] for _ in range(ranks)]
    for span in run.timeline.spans if run.timeline else ():
        is_training = span.kind != "F" or "@" in span.name  # the forwards of an evaluation have no version
        if 0 <= span.rank < ranks and span.lane == "compute" and is_training:
            by_rank[span.rank].append(span)
    if not by_rank or not all(by_rank):
        return None
    first = max(min(span.start for span in spans) for spans in by_rank)
    last = min(max(span.end for span in spans) for spans in by_rank)
    trained = last - first - _paused(run, [span for spans in by_rank for span in spans], first, last)
    if trained <= 0:
        return None
    busy = [sum(max(0.0, min(span.end, last) - max(span.start, first)) for span in spans) for spans in by_rank]
    return tuple(min(1.0, seconds / trained) for seconds in busy)


def _paused(run: Run, spans: list[Span], first: float, last: float) -> float:
    """Seconds for which the pipeline was drained for an evaluation or a checkpoint."""
    microbatches = int(run.plan.get("microbatches") or 0)
    numbered = sorted(
        (int(match[1]), span.start, span.end) for span in spans if (match := _MICROBATCH.match(span.name))
    )
    numbers = [number for number, _, _ in numbered]
    ended = list(accumulate((end for _, _, end in numbered), max))  # when all up to this one had ended
    later = list(accumulate((start for _, start, _ in reversed(numbered)), min))
    begun = later[::-1]  # when the first from this one on began
    total = 0.0
    for batch in {evaluated.batch for evaluated in run.evaluations} | set(run.saved):
        at = bisect_left(numbers, batch * microbatches)
        if 0 < at < len(numbers):
            total += max(0.0, min(begun[at], last) - max(ended[at - 1], first))
    return total


def common_window(timeline: Timeline) -> Timeline:
    """The part that covers all ranks: each rank keeps its last actions, and those of busy ranks reach back less far."""
    begun: dict[int, float] = {}
    for span in timeline.spans:
        begun[span.rank] = min(span.start, begun.get(span.rank, span.start))
    since = max(begun.values(), default=0.0)
    return timeline.since(since) if since > _LATE * timeline.end else timeline


def busy_over_time(timeline: Timeline, labels: tuple[str, ...]) -> Curves | None:
    """The share of each window that ranks compute; the mean over all ranks where there are too many curves."""
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


def last_bars(timeline: Timeline, most: int) -> Timeline:
    """The last bars of a timeline, from the same moment on for all ranks; that moment becomes zero."""
    spans = timeline.spans
    if len(spans) <= most:
        return timeline
    return timeline.since(sorted(span.start for span in spans)[len(spans) - most])


def encode(timeline: Timeline) -> dict[str, Any]:
    """What the page's script needs, besides the labels of ranks."""
    tick = _tick(timeline.end)
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start):
        by_lane.setdefault((span.rank, span.lane if span.lane in _LANES else "transfer"), []).append(span)
    operations: dict[tuple[str, str], int] = {}
    names: dict[str, int] = {}
    numbers: list[int] = []
    lanes = []
    for (rank, lane), spans in sorted(by_lane.items()):
        lanes.append((rank, _LANES.index(lane), len(spans)))
        before = [0] * 5
        for span in spans:
            start = round(span.start / tick)
            operation, *parts = _parse(span, operations, names)
            here = [start, *parts]
            deltas = [now - then for now, then in zip(here, before, strict=True)]
            numbers += [deltas[0], max(0, round(span.end / tick) - start), operation, *map(_zigzag, deltas[1:])]
            before = here
    return {
        "tick": tick,
        "end": timeline.end,
        "kinds": KINDS,
        "operations": list(operations),
        "names": list(names),
        "lanes": lanes,
        "bars": base64.b64encode(_varints(numbers)).decode(),
    }


def _tick(end: float) -> float:
    """A power of ten, of which the whole timeline is at most a billion."""
    return float(10.0 ** math.ceil(math.log10(end / 1e9))) if end > 0 else 1.0


def _parse(span: Span, operations: dict[tuple[str, str], int], names: dict[str, int]) -> tuple[int, int, int, int, int]:
    """The number of the operation, then stage, microbatch, version and peer."""
    match = _ACTION.fullmatch(span.name)
    mark = match[2] if match else "?"
    operation = operations.setdefault((mark, kind_of(span)), len(operations))
    if match is None:
        return operation, names.setdefault(span.name, len(names)), _ABSENT, _ABSENT, _ABSENT
    microbatch, version, peer = (_ABSENT if match[at] is None else int(match[at]) for at in (3, 4, 5))
    return operation, int(match[1]), microbatch, version, peer


def _zigzag(number: int) -> int:
    """Map small integers of either sign to small natural numbers."""
    return 2 * number if number >= 0 else -2 * number - 1


def _varints(numbers: list[int]) -> bytes:
    """Seven bits per byte, lowest first; the top bit says that more follow."""
    out = bytearray()
    for number in numbers:
        while number >= 128:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)
