"""Measurements of configurations, and what becomes of their repeats, without training anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from stagewright.bench import run as rounds
from stagewright.bench.result import Repeat
from stagewright.bench.run import Length, Measurements, measured_row, run_repeats, with_speedups
from stagewright.bench.statistics import steady_speed
from stagewright.bench.suite import SuiteOptions, configurations_of, read_suite
from stagewright.config.toml import make_config
from stagewright.events import Step

CONFIGS = {name: make_config() for name in "ABC"}


def repeat(rate: float) -> Repeat:
    return Repeat(rate, 0, True, (1.0,), 2.0, "run")


def test_configurations_take_turns_and_each_turn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    heard: list[int] = []

    def take(turn: Measurements, number: int, folder: Path) -> None:
        turn.repeats.append(repeat(number))

    def after(turns: Mapping[str, Measurements]) -> None:
        heard.append(sum(len(turn.repeats) for turn in turns.values()))

    monkeypatch.setattr(rounds, "run_once", take)
    found = run_repeats(CONFIGS, Length(2), tmp_path, order.append, after)
    assert order == [f"repeat {number} of 2: {name}" for number in (1, 2) for name in "ABC"]
    assert heard == [1, 2, 3, 4, 5, 6] and [len(turn.repeats) for turn in found.values()] == [2, 2, 2]


def test_one_that_fails_is_left_out_of_later_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def take(turn: Measurements, number: int, folder: Path) -> None:
        turn.repeats.append(repeat(1.0))
        if len(order) == 2:
            turn.failure = "it broke"

    monkeypatch.setattr(rounds, "run_once", take)
    run_repeats(CONFIGS, Length(3), tmp_path, order.append, lambda turns: None)
    assert [text[-1] for text in order] == ["A", "B", "C", "A", "C", "A", "C"]


def test_rounds_end_with_the_time_there_is() -> None:
    assert Length(3).allows(2, 1e9) and not Length(3).allows(3, 0.0)
    hurried = Length(5, limit=90.0)
    assert hurried.allows(0, 500.0), "one round there must be"
    assert hurried.allows(2, 60.0) and not hurried.allows(2, 60.1), "the third would take it beyond"


def step(number: int, rate: float) -> Step:
    return Step(number, 0, 2.0, 0.1, float(number), rate)


def test_the_warm_up_does_not_count() -> None:
    speed = steady_speed([step(number, 10.0 if number < 3 else 100.0) for number in range(20)], 50)
    assert (speed.warmup, speed.is_steady, len(speed.times)) == (3, True, 20)
    assert speed.rate == pytest.approx(100.0) and len(speed.steady) == 17


def test_rates_are_images_over_seconds_not_means_of_rates() -> None:
    """Two batches in 1 s and two in 3 s: 4 batches in 8 s, half a batch a second."""
    speed = steady_speed([step(number, 50.0 / (1 + 2 * (number % 2))) for number in range(8)], 50)
    assert speed.warmup == 0 and speed.rate == pytest.approx(25.0)


def test_many_batches_become_segments() -> None:
    speed = steady_speed([step(number, 100.0) for number in range(400)], 50)
    assert len(speed.times) == 40 and speed.times[0] == pytest.approx(0.5)


def test_an_outlier_is_marked_and_counts_all_the_same() -> None:
    case = configurations_of(read_suite("quick"), SuiteOptions(5, 1))[0]
    rates = [100.0, 101.0, 99.0, 100.0, 10.0, 11.0, 12.0]
    row = measured_row(case, Measurements(make_config(), [repeat(rate) for rate in rates]))
    assert row.rate is not None and row.rate.value == 99.0, "the median of all seven"
    assert [entry.rate for entry in row.repeats] == rates
    steady = measured_row(
        case, Measurements(make_config(), [repeat(rate) for rate in (100, 101, 99, 100, 102, 98, 10)])
    )
    assert steady.outliers == (6,) and len(steady.repeats) == 7


def test_speedups_are_over_the_baseline_round_by_round() -> None:
    dp, stale = configurations_of(read_suite("quick"), SuiteOptions(5, 1))
    disturbance = (1.0, 0.5, 2.0, 0.9, 1.2)
    rows = with_speedups(
        [
            measured_row(dp, Measurements(make_config(), [repeat(100 * d) for d in disturbance])),
            measured_row(stale, Measurements(make_config(), [repeat(130 * d) for d in disturbance])),
        ]
    )
    assert rows[0].is_baseline and rows[0].speedup is not None and rows[0].speedup.value == 1.0
    assert rows[1].speedup is not None and rows[1].speedup.low == pytest.approx(1.3)
    assert not rows[1].speedup.holds(1.0) and rows[1].speedup.high == pytest.approx(1.3)


def test_memory_is_the_most_of_all_repeats() -> None:
    case = configurations_of(read_suite("quick"), SuiteOptions(2, 1))[0]
    repeats = [Repeat(1.0, 0, True, (), None, "r", memory=memory) for memory in ((5, 9), (7, 3))]
    assert measured_row(case, Measurements(make_config(), repeats)).memory == (7, 9)
