"""Timelines as traces that Perfetto opens, and back."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from stagewright.metrics import Span, Timeline
from tests.made_runs import timeline


def test_a_trace_names_ranks_and_lanes() -> None:
    events = timeline().chrome_trace()["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    threads = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert threads >= {(0, "compute"), (0, "transfer"), (0, "wait"), (2, "compute")}


def test_overlapping_spans_are_on_separate_threads() -> None:
    spans = tuple(
        Span(0, "transfer", "SA", f"0SA{i}>1", start, end)
        for i, (start, end) in enumerate([(0, 3), (1, 2), (2, 5), (3, 4)])
    )
    events = [event for event in Timeline(spans).chrome_trace()["traceEvents"] if event["ph"] == "X"]
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        by_thread.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 2
    for times in by_thread.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(times))


def test_reads_back_a_trace() -> None:
    for spans in (timeline().spans, (Span(0, "wait", "F", "0F1", 1 / 3, 2 / 3), Span(0, "wait", "F", "0F2", 0.5, 0.7))):
        back = Timeline.of_trace(json.loads(json.dumps(Timeline(spans).chrome_trace())))
        assert sorted((s.rank, s.lane, s.kind, s.name) for s in back.spans) == sorted(
            (s.rank, s.lane, s.kind, s.name) for s in spans
        )
        for one, other in zip(sorted(back.spans, key=str), sorted(spans, key=str), strict=True):
            assert (one.start, one.end) == pytest.approx((other.start, other.end), abs=1e-9)


def test_reads_older_traces_with_lanes_as_threads() -> None:
    event = {"name": "0F0@0", "cat": "F", "ph": "X", "pid": 1, "tid": "compute", "ts": 5.0, "dur": 2.0}
    assert Timeline.of_trace({"traceEvents": [event]}).spans == (Span(1, "compute", "F", "0F0@0", 5e-6, 7e-6),)
