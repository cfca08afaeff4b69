"""Medians, ratios and intervals of made series whose answers are known."""

from __future__ import annotations

import pytest

from stagewright.bench.peers.cases import at_least, at_most, not_slower
from stagewright.bench.statistics import Ratio, median_of, median_ratio


def test_median_of_odd_and_even_series() -> None:
    assert median_of([3.0, 1.0, 2.0]) == 2.0
    assert median_of([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_constant_series_have_an_exact_ratio() -> None:
    assert median_ratio([3.0] * 5, [4.0] * 5) == Ratio(0.75, 0.75, 0.75)


def test_the_ratio_is_that_of_the_medians() -> None:
    ratio = median_ratio([1.0, 2.0, 9.0], [4.0, 4.0, 1.0])
    assert ratio.value == 0.5
    assert ratio.low <= 0.5 <= ratio.high


def test_what_disturbs_both_sides_of_a_repeat_cancels() -> None:
    disturbance = [1.0, 1.3, 5.0, 0.7, 2.0, 1.1, 0.9]
    ratio = median_ratio([6.0 * d for d in disturbance], [3.0 * d for d in disturbance])
    assert ratio.value == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == pytest.approx((2.0, 2.0))


def test_the_interval_of_one_deviating_repeat_in_three() -> None:
    """A draw's median is 2 when the odd repeat is drawn at least twice: 7 of 27 draws, more than 2.5 %."""
    ratio = median_ratio([1.0, 1.0, 2.0], [1.0, 1.0, 1.0])
    assert ratio == Ratio(1.0, 1.0, 2.0)


def test_the_interval_of_one_deviating_repeat_in_nine() -> None:
    """A draw's median is 2 when the odd repeat is drawn at least 5 times of 9: 0.2 % of draws, outside the interval."""
    assert median_ratio([1.0] * 8 + [2.0], [1.0] * 9) == Ratio(1.0, 1.0, 1.0)


def test_the_interval_has_the_width_of_the_spread() -> None:
    """Order statistics bound the median of 7: 95 % of draws have it from the second to the sixth."""
    ratio = median_ratio([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 7)
    assert ratio == Ratio(4.0, 2.0, 6.0)


def test_the_same_series_give_the_same_interval() -> None:
    ours, theirs = [1.0, 1.5, 1.2, 0.8], [2.0, 1.9, 2.5, 2.2]
    assert median_ratio(ours, theirs) == median_ratio(ours, theirs)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_series_that_are_not_interleaved_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match="repeats"):
        median_ratio(ours, theirs)


def test_goals() -> None:
    ratio = Ratio(0.95, 0.9, 1.01)
    assert not_slower().is_met(ratio)
    assert not not_slower().is_met(Ratio(0.95, 0.9, 0.99))
    assert at_most(0.95).is_met(ratio) and not at_most(0.5).is_met(ratio)
    assert at_least(0.95).is_met(ratio) and not at_least(1.2).is_met(ratio)
