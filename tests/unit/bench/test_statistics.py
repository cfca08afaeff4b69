"""Medians, ratios, intervals, plateaus, outliers and speeds of made series with known answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from stagewright.bench.statistics import (
    Interval,
    Plateau,
    find_plateau,
    median_interval,
    median_ratio,
    outliers,
    paired_ratio,
    ratio,
    segments,
    steady_speed,
)
from stagewright.events import Step

DRAWS = 1000
Draw = Callable[[np.random.Generator, int], np.ndarray]
SHAPES: dict[str, tuple[Draw, float]] = {
    "normal": (lambda g, n: g.normal(100, 3, n), 100.0),
    "skewed": (lambda g, n: 100 - g.exponential(3, n), 100 - 3 * np.log(2)),
    "heavy-tailed": (lambda g, n: 100 + g.standard_t(3, n), 100.0),
}
NOISE = np.random.default_rng(3).normal(1.0, 0.01, 40)


def test_median_ratio_of_constant_series_is_exact() -> None:
    assert median_ratio([3.0] * 5, [4.0] * 5) == Interval(0.75, 0.75, 0.75)


def test_median_ratio_divides_the_medians() -> None:
    ratio = median_ratio([1.0, 2.0, 9.0], [4.0, 4.0, 1.0])
    assert ratio.value == 0.5
    assert ratio.low <= 0.5 <= ratio.high


def test_median_ratio_cancels_what_disturbs_both_sides_of_a_repeat() -> None:
    disturbance = [1.0, 1.3, 5.0, 0.7, 2.0, 1.1, 0.9]
    ratio = median_ratio([6.0 * d for d in disturbance], [3.0 * d for d in disturbance])
    assert ratio.value == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 2.0))


def test_median_ratio_interval_includes_one_deviating_repeat_of_three() -> None:
    """A draw's median is 2 when the odd repeat is drawn at least twice: 7 of 27 draws, more than 2.5 %."""
    ratio = median_ratio([1.0, 1.0, 2.0], [1.0, 1.0, 1.0])
    assert ratio == Interval(1.0, 1.0, 2.0)


def test_median_ratio_interval_excludes_one_deviating_repeat_of_nine() -> None:
    """A draw's median is 2 when the odd repeat is drawn at least 5 times of 9: 0.2 % of draws, outside the interval."""
    assert median_ratio([1.0] * 8 + [2.0], [1.0] * 9) == Interval(1.0, 1.0, 1.0)


def test_median_ratio_interval_of_seven_repeats_is_the_second_to_the_sixth() -> None:
    """Order statistics bound the median of 7: 95 % of draws have it from the second to the sixth."""
    ratio = median_ratio([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 7)
    assert ratio == Interval(4.0, 2.0, 6.0)


def test_median_ratio_is_reproducible() -> None:
    ours, theirs = [1.0, 1.5, 1.2, 0.8], [2.0, 1.9, 2.5, 2.2]
    assert median_ratio(ours, theirs) == median_ratio(ours, theirs)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_median_ratio_refuses_series_of_unequal_length(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="repeats"):
        median_ratio(ours, theirs)


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


def test_intervals_that_share_a_value_overlap() -> None:
    assert Interval(1, 0, 2).overlaps(Interval(3, 2, 4)) and Interval(3, 2, 4).overlaps(Interval(1, 0, 2))
    assert Interval(1, 0, 9).overlaps(Interval(3, 2, 4)) and Interval(3, 2, 4).overlaps(Interval(1, 0, 9))
    assert not Interval(1, 0, 1.9).overlaps(Interval(3, 2, 4)) and not Interval(3, 2, 4).overlaps(Interval(1, 0, 1.9))


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [([1.0], [], "1 and 0"), ([], [], "at least 1"), ([0.0], [1.0], "above 0"), ([float("nan")], [1.0], "finite")],
)
def test_paired_ratio_refuses_empty_infinite_and_negative_series(
    ours: list[float], theirs: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        paired_ratio(ours, theirs)


@pytest.mark.parametrize("warmup", [0, 1, 3, 8, 12])
def test_warmup_ends_where_times_reach_their_level(warmup: int) -> None:
    times = [2.0 - 0.5 * index / max(warmup, 1) for index in range(warmup)] + list(NOISE)
    assert find_plateau(times) == Plateau(warmup, True)


def test_one_fast_segment_does_not_end_the_warmup() -> None:
    """One segment at the final level between slow ones is luck, not the plateau."""
    assert find_plateau([3.0, 1.0, 3.0, 3.0, 3.0, *NOISE]) == Plateau(5, True)


def test_one_slow_segment_does_not_delay_the_plateau() -> None:
    times = list(NOISE)
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


def test_segments_are_equally_long_and_keep_their_time() -> None:
    assert segments([1, 2, 3, 4, 5, 6, 7], 3) == [(3, 6), (3, 15)]  # a segment of the seventh alone would be too short
    assert segments([1.0, 2.0], 5) == [(1, 1.0), (1, 2.0)]
    assert segments([], 5) == []


def step(number: int, rate: float) -> Step:
    return Step(number, 0, 2.0, 0.1, float(number), rate)


def test_steady_speed_excludes_the_warmup() -> None:
    speed = steady_speed([step(number, 10.0 if number < 3 else 100.0) for number in range(20)], 50)
    assert (speed.warmup, speed.is_steady, len(speed.times)) == (3, True, 20)
    assert speed.rate == pytest.approx(100.0) and len(speed.steady) == 17


def test_steady_speed_is_images_over_seconds_not_a_mean_of_rates() -> None:
    """Two batches in 1 s and two in 3 s: 4 batches in 8 s, half a batch per second."""
    speed = steady_speed([step(number, 50.0 / (1 + 2 * (number % 2))) for number in range(8)], 50)
    assert speed.warmup == 0 and speed.rate == pytest.approx(25.0)


def test_steady_speed_groups_many_batches_into_segments() -> None:
    speed = steady_speed([step(number, 100.0) for number in range(400)], 50)
    assert len(speed.times) == 40 and speed.times[0] == pytest.approx(0.5)
