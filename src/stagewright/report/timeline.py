"""Timelines of a run: when it paused, which share of the time each rank computes, what a page shows of it at first,
and the compact encoding that a page's script reads.

The encoding takes a few bytes per bar. Every bar is seven numbers: start since the bar before, duration, operation, and
stage, microbatch, version and peer, each as the difference to the bar before in its lane. A name that is not an action
has an index into a table of names in place of the stage.
"""

from __future__ import annotations

import base64
import math
import re
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from stagewright.metrics import Span, Timeline
from stagewright.report.page import Curve, Curves, Mark, Pipeline, Point
from stagewright.report.read import Run

MOST_BARS = 30_000  # of a page: half a megabyte of text
_WINDOWS = 60  # points of a curve over time
_LATE = 0.05  # of the whole timeline: a rank that begins earlier than that was only waiting for the pipeline to fill
_LANES = ("compute", "transfer", "wait")
_ABSENT = -1
_ACTION = re.compile(r"([0-9]{1,9})([A-Z]{1,2})([0-9]{1,15})?(?:@([0-9]{1,15}))?(?:[<>]([0-9]{1,9}))?")
_MICROBATCH = re.compile(r"[0-9]+[FB]([0-9]{1,15})@")
_MOST_CURVES = 16
_FEW_BARS = 80  # of a rank: a timeline with no more is shown whole at first
_FIRST_BARS = 40  # of the busiest rank in the first view of a longer one
KINDS = ("forward", "backward", "update", "evaluation", "transfer", "reduce", "waiting")
_KIND_OF_ACTION = {"F": "forward", "B": "backward", "U": "update", "R": "reduce", "T": "reduce", "A": "reduce"}
_EVALUATED = re.compile(r"[0-9]+F[0-9]+")
ACTION_WORDS = {  # of every action's mark, as its text has it
    "F": "forward",
    "B": "backward",
    "U": "update",
    "R": "reduce gradients",
    "T": "sum gradients of tied weights",
    "A": "agree on gradient norms",
    "SA": "send activations",
    "SG": "send gradients",
    "RA": "receive activations",
    "RG": "receive gradients",
}


def kind_of(span: Span) -> str:
    """Which of `KINDS` a span belongs to; a forward without a version is one of an evaluation."""
    if span.lane == "wait":
        return "waiting"
    return "evaluation" if is_evaluation(span) else _KIND_OF_ACTION.get(span.kind, "transfer")


def kinds_of(pipeline: Pipeline) -> list[str]:
    """The kinds of spans that a timeline has, in the order of `KINDS`."""
    found = {kind_of(span) for span in pipeline.timeline.spans}
    return [kind for kind in KINDS if kind in found]


def is_evaluation(span: Span) -> bool:
    """Whether a span is a forward of an evaluation, which uses the newest weights and has no version."""
    return span.kind == "F" and span.lane == "compute" and _EVALUATED.fullmatch(span.name) is not None


def action_words(text: str) -> str:
    """An action in words, as in `forward of microbatch 3 at stage 0 on version 2` for `0F3@2`; other text as it is."""
    match = _ACTION.fullmatch(text)
    if match is None or match[2] not in ACTION_WORDS:
        return text
    stage, mark, microbatch, version, peer = match.groups()
    words = [ACTION_WORDS[mark]]
    if microbatch is not None:
        words.append(f"of microbatch {microbatch}")
    words.append(f"at stage {stage}")
    if version is not None:
        words.append(f"{'on' if mark in 'FB' else 'of'} version {version}")
    elif mark == "F":
        words.append("in an evaluation")
    if peer is not None:
        words.append(f"{'to' if mark.startswith('S') else 'from'} rank {peer}")
    return " ".join(words)


def busy_shares(run: Run) -> tuple[float, ...] | None:
    """The share of the time that each rank computes while all ranks are training; None without a timeline.

    Measured from the last rank's start to the first rank's end, without pauses. Every part of a report that tells how
    much ranks compute or wait has it from here.
    """
    by_rank = _training(run)
    if not by_rank or not all(by_rank):
        return None
    first = max(min(span.start for span in spans) for spans in by_rank)
    last = min(max(span.end for span in spans) for spans in by_rank)

    def within(stretches: Iterable[Span | Mark]) -> float:
        return sum(max(0.0, min(one.end, last) - max(one.start, first)) for one in stretches)

    trained = last - first - within(pauses(run))
    return tuple(min(1.0, within(spans) / trained) for spans in by_rank) if trained > 0 else None


def _training(run: Run) -> list[list[Span]]:
    """What each rank computed of the training."""
    by_rank: list[list[Span]] = [[] for _ in run.rank_map.labels]
    for span in run.timeline.spans if run.timeline else ():
        if 0 <= span.rank < len(by_rank) and span.lane == "compute" and not is_evaluation(span):
            by_rank[span.rank].append(span)
    return by_rank


def pauses(run: Run) -> tuple[Mark, ...]:
    """When the pipeline was drained for an evaluation or a checkpoint, in seconds of the timeline."""
    microbatches = int(run.plan.get("microbatches") or 0)
    numbered = sorted(
        (int(match[1]), span.start, span.end)
        for spans in _training(run)
        for span in spans
        if (match := _MICROBATCH.match(span.name))
    )
    if not numbered:
        return ()
    numbers = [number for number, _, _ in numbered]
    ended = list(accumulate((end for _, _, end in numbered), max))  # when all up to this one had ended
    begun = list(accumulate((start for _, start, _ in reversed(numbered)), min))  # when the first from it on began
    begun.reverse()
    scored = [span for span in run.timeline.spans if is_evaluation(span)] if run.timeline else []
    evaluated, saved = {record.batch for record in run.evaluations}, {record.batch for record in run.saved}
    found = []
    for batch in sorted(evaluated | saved):
        at = bisect_left(numbers, batch * microbatches)
        if at == 0:
            continue
        start = ended[at - 1]
        end = begun[at] if at < len(numbers) else max((span.end for span in scored), default=start)
        if batch in evaluated and batch in saved:
            middle = max((span.end for span in scored if start <= span.end <= end), default=end)
            found += [Mark("evaluation", start, middle), Mark("checkpoint", middle, end)]
        else:
            found.append(Mark("evaluation" if batch in evaluated else "checkpoint", start, end))
    return tuple(mark for mark in found if mark.end > mark.start)


def pipeline_of(run: Run, title: str) -> Pipeline | None:
    """The part of a run's timeline that covers all ranks, with its pauses; None without one.

    Each rank keeps its last actions, and those of busy ranks reach back less far.
    """
    if run.timeline is None or not run.timeline.spans:
        return None
    begun: dict[int, float] = {}
    for span in run.timeline.spans:
        begun[span.rank] = min(span.start, begun.get(span.rank, span.start))
    since = max(begun.values())
    whole = Pipeline(title, run.timeline, run.rank_map.labels, shares=busy_shares(run) or (), marks=pauses(run))
    return whole.since(since) if since > _LATE * run.timeline.end else whole


def busy_over_time(pipeline: Pipeline) -> Curves | None:
    """The share of each window that ranks compute; the mean over all ranks where there are too many curves."""
    timeline, labels = pipeline.timeline, pipeline.ranks
    end = timeline.end
    if not end:
        return None
    width, shares = end / _WINDOWS, [[0.0] * _WINDOWS for _ in labels]
    for span in timeline.spans:
        if span.lane == "compute" and span.rank < len(labels):
            for window in range(max(0, int(span.start / width)), min(_WINDOWS, int(span.end / width) + 1)):
                covered = min(span.end, (window + 1) * width) - max(span.start, window * width)
                shares[span.rank][window] += max(0.0, covered) / width
    middles = [(end * window / _WINDOWS + end * (window + 1) / _WINDOWS) / 2 for window in range(_WINDOWS)]
    if len(labels) > _MOST_CURVES:
        shares = [[sum(column) / len(labels) for column in zip(*shares, strict=True)]]
        labels = (f"mean of {len(labels)} ranks",)
    curves = tuple(
        Curve(label, tuple(Point(x, 100 * min(1.0, y)) for x, y in zip(middles, row, strict=True)))
        for label, row in zip(labels, shares, strict=True)
    )
    return Curves("Computing", "seconds of the timeline", "% of the time", curves, marks=pipeline.marks)


def start_of_last(timeline: Timeline, most: int) -> float:
    """The moment from which on a timeline has so many bars; zero where it has no more."""
    spans = timeline.spans
    return 0.0 if len(spans) <= most else sorted(span.start for span in spans)[len(spans) - most]


def first_view(pipeline: Pipeline) -> tuple[float, float]:
    """The stretch to show first: of steady training, in which single bars can be seen; everything, if there are few.

    It is the middle of the longest stretch without a pause, so neither start-up nor the end.
    """
    by_rank: dict[int, list[Span]] = {}
    for span in sorted(pipeline.timeline.spans, key=lambda span: span.start):
        if span.lane == "compute" and not is_evaluation(span):
            by_rank.setdefault(span.rank, []).append(span)
    fullest, end = max(by_rank.values(), key=len, default=[]), pipeline.timeline.end
    if pipeline.is_shown_whole or len(fullest) <= _FEW_BARS:
        return 0.0, end
    marks = sorted(pipeline.marks, key=lambda mark: mark.start)
    steady = zip(accumulate((m.end for m in marks), max, initial=0.0), [*(m.start for m in marks), end], strict=True)
    start, stop = max(steady, key=lambda stretch: stretch[1] - stretch[0])
    own = [span for span in fullest if start <= span.start and span.end <= stop] or fullest
    first = max(0, (len(own) - _FIRST_BARS) // 2)
    shown = own[first : first + _FIRST_BARS]
    return shown[0].start, max(span.end for span in shown)


def encode(timeline: Timeline) -> dict[str, Any]:
    """What the page's script needs, besides the labels of ranks."""
    tick = 10.0 ** math.ceil(math.log10(timeline.end / 1e9)) if timeline.end > 0 else 1.0  # at most a billion of them
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
        "operations": [(mark, kind, ACTION_WORDS.get(mark, "")) for mark, kind in operations],
        "names": list(names),
        "lanes": lanes,
        "bars": base64.b64encode(_varints(numbers)).decode(),
    }


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
