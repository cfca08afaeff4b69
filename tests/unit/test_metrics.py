"""The speed of made runs whose answer is known; timelines as traces that Perfetto opens, and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest

from stagewright.errors import UserError
from stagewright.events import Step
from stagewright.metrics import (
    Criterion,
    Plateau,
    RecentRate,
    Span,
    SteadyRate,
    Timeline,
    batch_seconds,
    find_plateau,
    segments,
    steady_rate,
)
from tests.made_runs import timeline

NOISE = [float(value) for value in np.random.default_rng(3).normal(1.0, 0.01, 40)]


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


@pytest.mark.parametrize("warmup", [0, 1, 3, 8, 12])
def test_warmup_ends_where_times_reach_their_level(warmup: int) -> None:
    times = [2.0 - 0.5 * index / max(warmup, 1) for index in range(warmup)] + NOISE
    assert find_plateau(times) == Plateau(warmup, True)


def test_one_fast_segment_does_not_end_the_warmup() -> None:
    """One segment at the final level between slow ones is luck, not the plateau."""
    assert find_plateau([3.0, 1.0, 3.0, 3.0, 3.0, *NOISE]) == Plateau(5, True)


def test_one_slow_segment_does_not_delay_the_plateau() -> None:
    times = NOISE.copy()
    times[4] = 5.0
    assert find_plateau([2.0, 2.0, *times]) == Plateau(2, True)


def test_a_drifting_series_has_no_plateau() -> None:
    falling = [2.0 - index / 40 for index in range(40)]
    assert find_plateau(falling) == Plateau(20, False)
    assert find_plateau(falling[::-1]) == Plateau(20, False)


def test_a_noisy_but_level_series_has_a_plateau() -> None:
    assert find_plateau(list(np.random.default_rng(5).normal(1.0, 0.15, 60))).is_reached


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0]])
def test_too_few_segments_have_no_plateau(times: list[float]) -> None:
    assert find_plateau(times) == Plateau(len(times) // 2, False)


def test_segments_are_equally_long_and_keep_their_time() -> None:
    assert segments([1, 2, 3, 4, 5, 6, 7], 3) == [(3, 6), (3, 15)]  # a segment of the seventh alone would be too short
    assert segments([1.0, 2.0], 5) == [(1, 1.0), (1, 2.0)]
    assert segments([], 5) == []


def steps_of(rates: list[float], batch: int = 50) -> list[Step]:
    """Batches of so many images at these speeds; the rate that is written with each does not matter."""
    ends = accumulate(batch / rate for rate in rates)
    return [Step(number, 0, 2.0, 0.1, end, 1e6) for number, end in enumerate(ends)]


def rate_of(steps: list[Step], batch: int, interrupted: set[int] | None = None) -> SteadyRate:
    found = steady_rate(steps, batch, interrupted or ())
    assert found is not None
    return found


def test_steady_rate_excludes_the_warmup() -> None:
    speed = rate_of(steps_of([10.0 if number < 3 else 100.0 for number in range(20)]), 50)
    assert (speed.warmup, speed.is_steady, len(speed.times)) == (3, True, 20)
    assert speed.rate == pytest.approx(100.0) and len(speed.steady) == 17


def test_steady_rate_is_images_over_seconds_not_a_mean_of_rates() -> None:
    """Two batches in 1 s and two in 3 s: 4 batches in 8 s, half a batch per second."""
    speed = rate_of(steps_of([50.0 / (1 + 2 * (number % 2)) for number in range(8)]), 50)
    assert speed.warmup == 0 and speed.rate == pytest.approx(25.0)


def test_steady_rate_groups_many_batches_into_segments() -> None:
    speed = rate_of(steps_of([100.0] * 400), 50)
    assert len(speed.times) == 40 and speed.times[0] == pytest.approx(0.5)


def test_the_warmup_is_counted_in_batches_however_many_a_segment_has() -> None:
    speed = rate_of(steps_of([10.0 if number < 30 else 100.0 for number in range(400)]), 50)
    assert (speed.warmup, len(speed.steady), len(speed.times)) == (30, 370, 40)
    assert speed.rate == pytest.approx(100.0)


def test_a_batch_that_seems_to_end_before_the_last_one_takes_no_time_and_gives_none_to_the_next() -> None:
    steps = [Step(number, 0, 2.0, 0.1, end, 1e6) for number, end in enumerate([1.0, 3.0, 2.0, 4.0])]
    assert batch_seconds(steps) == {0: 1.0, 1: 2.0, 2: 0.0, 3: 1.0}


def test_steady_rate_leaves_out_batches_right_after_a_pause() -> None:
    """Every fifth batch waits for an evaluation before it."""
    steps = steps_of([10.0 if number % 5 == 0 else 100.0 for number in range(40)])
    speed = rate_of(steps, 50, set(range(0, 40, 5)))
    assert speed.rate == pytest.approx(100.0) and (speed.warmup, len(speed.steady)) == (0, 32)
    assert rate_of(steps, 50).rate < 50, "counted, they would halve the speed"


def test_steady_rate_of_a_few_batches_is_that_of_the_later_half() -> None:
    assert rate_of(steps_of([10.0, 100.0]), 50).rate == pytest.approx(100.0)
    assert rate_of(steps_of([10.0]), 50).rate == pytest.approx(10.0)
    assert not rate_of(steps_of([10.0]), 50).is_steady


def test_there_is_no_rate_without_timed_batches() -> None:
    timed = steps_of([10.0, 10.0])
    assert steady_rate([], 50) is None and steady_rate(timed, 50, {0, 1}) is None and steady_rate(timed, 0) is None
    assert steady_rate([replace(timed[0], seconds=0.0)], 50) is None, "no time has passed"
    assert steady_rate(timed[1:], 50) is None, "when it began is not known"


def test_steps_count_as_steady_only_at_a_plateau() -> None:
    assert rate_of(steps_of([10.0] * 3 + [100.0] * 17), 50).steps == 17
    assert rate_of(steps_of([10.0 * 1.1**number for number in range(40)]), 50).steps == 0


def test_the_recent_rate_spans_twenty_batches_and_a_second() -> None:
    """However many losses arrive at once, no rate is above the real one by more than what the window covers."""
    recent = RecentRate()
    assert recent.rate(64) == 0.0
    for number in range(1000):  # ten batches at a time, every 0.1 s
        recent.add(0.1 if number % 10 == 0 else 0.0)
        assert recent.rate(64) <= 6400.0 * 1.001
    assert recent.rate(64) == pytest.approx(6400.0, rel=0.1)
    for _ in range(20):
        recent.add(1.0)
    assert recent.rate(64) == pytest.approx(64.0), "twenty are enough where they take a second"


@pytest.mark.parametrize(
    ("text", "metric", "is_lower_better"),
    [
        ("loss", "loss", True),
        ("perplexity", "perplexity", True),
        ("mae", "mae", True),
        ("mse", "mse", True),
        ("top1", "top1", False),
        ("iou", "iou", False),
        ("max:dice", "dice", False),
        ("min:dice", "dice", True),
        ("max:loss", "loss", False),
        ("min:a:b", "a:b", True),
    ],
)
def test_a_criterion_knows_what_is_better(text: str, metric: str, is_lower_better: bool) -> None:
    criterion = Criterion.parse(text)
    assert criterion == Criterion(metric, is_lower_better)
    assert criterion.is_better(1.0, 2.0) is is_lower_better and criterion.is_better(2.0, 1.0) is not is_lower_better
    assert criterion.is_better(1.0, None) and not criterion.is_better(1.0, 1.0)
    assert not any(criterion.is_better(value, None) for value in (math.nan, math.inf, -math.inf))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("top11", "did you mean 'top1'"),
        ("dice", "min:dice or max:dice"),
        ("most:dice", "min:dice or max:dice"),
        ("max:", "min:max or max:max"),
        ("", "known: loss"),
    ],
)
def test_a_criterion_of_unknown_direction_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        Criterion.parse(text)
    assert f"'{text}'" in str(refused.value)
