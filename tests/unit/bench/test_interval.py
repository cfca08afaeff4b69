"""Intervals of made series: known answers, coverage over 1,000 draws, and when two series differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stagewright.bench.statistics import Interval, median_interval, paired_ratio, ratio

DRAWS = 1000
Draw = Callable[[np.random.Generator, int], np.ndarray]
SHAPES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda g, n: g.normal(100, 3, n), 100.0),
    "skewed": (lambda g, n: 100 - g.exponential(3, n), 100 - 3 * np.log(2)),
    "heavy-tailed": (lambda g, n: 100 + g.standard_t(3, n), 100.0),
}


def test_a_constant_series_is_known_exactly() -> None:
    assert median_interval([5.0] * 7) == Interval(5.0, 5.0, 5.0)
    assert median_interval([5.0]) == Interval(5.0, 5.0, 5.0)


def test_the_interval_is_about_the_median_and_scales_with_the_values() -> None:
    one = median_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    ten = median_interval([10.0, 20.0, 30.0, 40.0, 1000.0])
    assert one.value == 3.0 and one.low < 3.0 < one.high
    assert (ten.low, ten.high) == pytest.approx((10 * one.low, 10 * one.high))


@pytest.mark.parametrize(
    ("shape", "count"), [("normal", 5), ("normal", 7), ("skewed", 7), ("heavy-tailed", 7), ("normal", 15)]
)
def test_coverage_over_a_thousand_draws(shape: str, count: int) -> None:
    draw, truth = SHAPES[shape]
    generator = np.random.default_rng(count)
    held = sum(median_interval(draw(generator, count)).holds(truth) for _ in range(DRAWS)) / DRAWS
    print(f"{shape}, {count} values: {held:.1%} of {DRAWS} intervals hold the median")
    assert 0.91 <= held <= 0.985


def test_equal_series_are_seldom_told_apart() -> None:
    generator = np.random.default_rng(0)
    apart = (
        sum(not ratio(generator.normal(100, 3, 7), generator.normal(100, 3, 7)).holds(1.0) for _ in range(DRAWS))
        / DRAWS
    )
    print(f"{apart:.1%} of {DRAWS} equal pairs of series were told apart")
    assert 0.01 <= apart <= 0.08


def test_series_that_differ_by_far_more_than_their_spread_are_told_apart() -> None:
    generator = np.random.default_rng(0)
    found = ratio(generator.normal(120, 2, 7), generator.normal(100, 2, 7))
    assert found.low > 1.1 and found.high < 1.3 and found.holds(1.2)


def test_what_disturbs_a_round_cancels_between_interleaved_sides() -> None:
    disturbance = np.array([1.0, 1.3, 5.0, 0.7, 2.0, 1.1, 0.9])
    assert paired_ratio(6 * disturbance, 3 * disturbance) == pytest.approx(Interval(2.0, 2.0, 2.0))
    apart = ratio(6 * disturbance, 3 * disturbance)
    assert apart.value == pytest.approx(2.0) and apart.high > 2.5


def test_intervals_overlap_where_they_share_a_value() -> None:
    assert Interval(1, 0, 2).overlaps(Interval(3, 2, 4)) and Interval(3, 2, 4).overlaps(Interval(1, 0, 2))
    assert Interval(1, 0, 9).overlaps(Interval(3, 2, 4)) and Interval(3, 2, 4).overlaps(Interval(1, 0, 9))
    assert not Interval(1, 0, 1.9).overlaps(Interval(3, 2, 4)) and not Interval(3, 2, 4).overlaps(Interval(1, 0, 1.9))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [([1.0], [], "1 and 0"), ([], [], "at least 1"), ([0.0], [1.0], "above 0"), ([float("nan")], [1.0], "finite")],
)
def test_series_that_mean_nothing_are_refused(ours: list[float], theirs: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        paired_ratio(ours, theirs)
