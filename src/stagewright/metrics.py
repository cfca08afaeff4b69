"""Timelines, measured or simulated: spans of all ranks, how busy they were, and traces for Perfetto. Units of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

MIB, GIB = 2**20, 2**30  # bytes
_LANES = ("compute", "transfer", "wait")  # in the order that a trace shows them


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

    def busy(self, rank: int, first: float, last: float) -> float:
        """Seconds that a rank computes within a window of time."""
        return sum(
            max(0.0, min(span.end, last) - max(span.start, first))
            for span in self.spans
            if span.rank == rank and span.lane == "compute"
        )

    def bubble(self, ranks: Sequence[int], first: float, last: float) -> float:
        """Share of the ranks' time within a window in which they do not compute."""
        return 1 - sum(self.busy(rank, first, last) for rank in ranks) / (len(ranks) * (last - first))

    def busy_shares(self, ranks: int, first: float, last: float) -> tuple[float, ...]:
        """Share of a window that each rank computes; one pass for all ranks."""
        busy = [0.0] * ranks
        for span in self.spans:
            if span.lane == "compute":
                busy[span.rank] += max(0.0, min(span.end, last) - max(span.start, first))
        return tuple(seconds / (last - first) for seconds in busy)

    def since(self, moment: float) -> Timeline:
        """The spans that start at a moment or later, with that moment as zero."""
        return Timeline(
            tuple(
                replace(span, start=span.start - moment, end=span.end - moment)
                for span in self.spans
                if span.start >= moment
            )
        )

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
