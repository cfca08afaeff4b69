"""A timeline as a short text that the page's own script reads: numbers as differences, a few bytes a bar.

Every bar is seven numbers: start since the bar before, duration, operation, and stage, microbatch, version and peer,
each as the difference to the bar before in its lane. A name that is no action is looked up in a table of names.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any

from stagewright.metrics import Span, Timeline
from stagewright.report.figures import KINDS, kind_of

MOST_BARS = 30_000  # half a megabyte of text
_LANES = ("compute", "transfer", "wait")
_ACTION = re.compile(r"([0-9]{1,9})([A-Z]{1,2})([0-9]{1,15})?(?:@([0-9]{1,15}))?(?:[<>]([0-9]{1,9}))?")
_ABSENT = -1


def newest(timeline: Timeline, most: int) -> Timeline:
    """The last bars of a timeline, all ranks from the same moment on, which becomes zero."""
    spans = timeline.spans
    if len(spans) <= most:
        return timeline
    return timeline.since(sorted(span.start for span in spans)[len(spans) - most])


def encode(timeline: Timeline) -> dict[str, Any]:
    """What the script needs beside the labels of ranks."""
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
    """A power of ten that counts the whole in at most a billion."""
    return float(10.0 ** math.ceil(math.log10(end / 1e9))) if end > 0 else 1.0


def _parse(span: Span, operations: dict[tuple[str, str], int], names: dict[str, int]) -> tuple[int, int, int, int, int]:
    """The operation's number; stage, microbatch, version and peer."""
    match = _ACTION.fullmatch(span.name)
    mark = match[2] if match else "?"
    operation = operations.setdefault((mark, kind_of(span)), len(operations))
    if match is None:
        return operation, names.setdefault(span.name, len(names)), _ABSENT, _ABSENT, _ABSENT
    microbatch, version, peer = (_ABSENT if match[at] is None else int(match[at]) for at in (3, 4, 5))
    return operation, int(match[1]), microbatch, version, peer


def _zigzag(number: int) -> int:
    """Small numbers of either sign as small numbers."""
    return 2 * number if number >= 0 else -2 * number - 1


def _varints(numbers: list[int]) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = bytearray()
    for number in numbers:
        while number >= 128:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)
