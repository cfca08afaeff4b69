"""Medians, ratios, intervals, answers and outliers of made series with known results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stagewright.bench.statistics import (
    Answer,
    Interval,
    judge,
    median_interval,
    outliers,
    paired_ratio,
    ratio,
)

DRAWS = 1000
Draw = Callable[[np.random.Generator, int], np.ndarray]
SHAPES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda g, n: g.normal(100, 3, n), 100.0),
    "skewed": (lambda g, n: 100 - g.exponential(3, n), 100 - 3 * np.log(2)),
    "heavy-tailed": (lambda g, n: 100 + g.standard_t(3, n), 100.0),
}


def test_interval_of_a_constant_series_is_a_point() -> None:
    assert median_interval([5.0] * 7) == Interval(5.0, 5.0, 5.0)
    assert median_interval([5.0]) == Interval(5.0, 5.0, 5.0)


def test_interval_contains_the_median_and_scales_with_the_values() -> None:
    one = median_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    ten = median_interval([10.0, 20.0, 30.0, 40.0, 1000.0])
    assert one.value == 3.0 and one.low < 3.0 < one.high
    assert (ten.low, ten.high) == pytest.approx((10 * one.low, 10 * one.high))


@pytest.mark.parametrize(
    ("shape", "count"), [("normal", 5), ("normal", 7), ("skewed", 7), ("heavy-tailed", 7), ("normal", 15)]
)
def test_intervals_hold_the_true_median_as_often_as_they_claim(shape: str, count: int) -> None:
    draw, truth = SHAPES[shape]
    generator = np.random.default_rng(count)
    held = sum(median_interval(draw(generator, count)).holds(truth) for _ in range(DRAWS)) / DRAWS
    print(f"{shape}, {count} values: {held:.1%} of {DRAWS} intervals hold the median")
    assert 0.91 <= held <= 0.985


def test_equal_series_rarely_differ_significantly() -> None:
    generator = np.random.default_rng(0)
    apart = (
        sum(not ratio(generator.normal(100, 3, 7), generator.normal(100, 3, 7)).holds(1.0) for _ in range(DRAWS))
        / DRAWS
    )
    print(f"{apart:.1%} of {DRAWS} equal pairs of series differ significantly")
    assert 0.01 <= apart <= 0.08


def test_series_that_differ_by_more_than_their_spread_differ_significantly() -> None:
    generator = np.random.default_rng(0)
    found = ratio(generator.normal(120, 2, 7), generator.normal(100, 2, 7))
    assert found.low > 1.1 and found.high < 1.3 and found.holds(1.2)


def test_paired_ratio_cancels_what_disturbs_both_sides_of_a_repeat() -> None:
    disturbance = np.array([1.0, 1.3, 5.0, 0.7, 2.0, 1.1, 0.9])
    assert paired_ratio(6 * disturbance, 3 * disturbance) == pytest.approx(Interval(2.0, 2.0, 2.0))
    apart = ratio(6 * disturbance, 3 * disturbance)
    assert apart.value == pytest.approx(2.0) and apart.high > 2.5


def test_the_interval_of_a_paired_ratio_holds_the_true_ratio_as_often_as_it_claims() -> None:
    """Both sides of a repeat are disturbed alike; the true ratio is 1.1."""
    generator = np.random.default_rng(7)
    held = 0
    for _ in range(DRAWS):
        common = generator.normal(100, 20, 7).clip(50)
        ours, theirs = (common * generator.normal(1, 0.02, 7) for _ in range(2))
        held += paired_ratio(1.1 * ours, theirs).holds(1.1)
    print(f"{held / DRAWS:.1%} of {DRAWS} intervals hold the ratio")
    assert 0.93 <= held / DRAWS <= 0.985


@pytest.mark.parametrize(
    ("ratio", "answer"),
    [
        (Interval(1.00, 0.985, 1.02), Answer.NOT_SLOWER),
        (Interval(0.99, 0.971, 1.01), Answer.NOT_SLOWER),
        (Interval(0.989, 0.971, 1.01), Answer.SLOWER),
        (Interval(0.98, 0.92, 1.03), Answer.UNKNOWN),  # reaches 1, but only because it is wide
        (Interval(1.02, 0.95, 1.09), Answer.UNKNOWN),
        (Interval(0.90, 0.80, 0.98), Answer.SLOWER),  # wide, and all of it is slower
        (Interval(1.18, 1.10, 1.26), Answer.NOT_SLOWER),
        (Interval(1.0, 1.0, 1.0), Answer.UNKNOWN),  # a single repeat
    ],
    ids=str,
)
def test_not_slower_means_at_least_0_99_known_to_0_02(ratio: Interval, answer: Answer) -> None:
    assert judge(ratio) is answer


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [([1.0], [], "1 and 0"), ([], [], "at least 1"), ([0.0], [1.0], "above 0"), ([float("nan")], [1.0], "finite")],
)
def test_paired_ratio_refuses_empty_infinite_and_negative_series(
    ours: list[float], theirs: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        paired_ratio(ours, theirs)


def test_outliers_have_a_modified_z_score_above_3_5() -> None:
    """The median of 1 to 7 is 4 and its MAD 2: values above 4 + 3.5 * 2 / 0.6745 = 14.4 are outliers."""
    assert outliers([1, 2, 3, 4, 5, 6, 7]) == ()
    assert outliers([1, 2, 3, 4, 5, 6, 14.3]) == ()
    assert outliers([1, 2, 3, 4, 5, 6, 14.5]) == (6,)
    assert outliers([-20, 2, 3, 4, 5, 6, 30]) == (0, 6)


def test_one_deviation_among_equal_values_is_an_outlier() -> None:
    """Their MAD is 0, so the mean distance is used instead."""
    assert outliers([5.0] * 9 + [6.0]) == (9,)
    assert outliers([5.0] * 9) == () and outliers([1.0, 100.0]) == ()


def test_normal_noise_is_rarely_an_outlier() -> None:
    generator = np.random.default_rng(0)
    flagged = sum(len(outliers(generator.normal(0, 1, 25))) for _ in range(200)) / 5000
    print(f"{flagged:.2%} of normal values flagged")
    assert flagged < 0.01


def test_a_ratio_of_one_value_to_several_has_an_interval() -> None:
    several = [99.0, 100.0, 101.0]
    assert ratio([200.0], several).value == pytest.approx(2.0)
    assert ratio(several, [200.0]).holds(0.5) and ratio([200.0], [100.0]) == Interval(*[pytest.approx(2.0)] * 3)
