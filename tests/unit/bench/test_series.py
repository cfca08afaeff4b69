"""Plateaus, outliers and segments of made series with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.bench.statistics import Plateau, find_plateau, outliers, segments

NOISE = np.random.default_rng(3).normal(1.0, 0.01, 40)


@pytest.mark.parametrize("warmup", [0, 1, 3, 8, 12])
def test_the_warm_up_ends_where_times_reach_their_level(warmup: int) -> None:
    times = [2.0 - 0.5 * index / max(warmup, 1) for index in range(warmup)] + list(NOISE)
    assert find_plateau(times) == Plateau(warmup, True)


def test_a_disturbance_within_the_warm_up_does_not_end_it() -> None:
    """One segment at the final level between slow ones is luck, not the plateau."""
    assert find_plateau([3.0, 1.0, 3.0, 3.0, 3.0, *NOISE]) == Plateau(5, True)


def test_a_disturbance_behind_the_warm_up_does_not_delay_it() -> None:
    times = list(NOISE)
    times[4] = 5.0
    assert find_plateau([2.0, 2.0, *times]) == Plateau(2, True)


def test_a_series_that_drifts_has_no_plateau() -> None:
    falling = [2.0 - index / 40 for index in range(40)]
    assert find_plateau(falling) == Plateau(20, False)
    assert find_plateau(falling[::-1]) == Plateau(20, False)


def test_a_noisy_but_level_series_has_one() -> None:
    assert find_plateau(list(np.random.default_rng(5).normal(1.0, 0.15, 60))).is_reached


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0]])
def test_too_few_segments_have_no_plateau(times: list[float]) -> None:
    assert find_plateau(times) == Plateau(len(times) // 2, False)


def test_outliers_by_the_modified_z_score() -> None:
    """The median of 1 to 7 is 4 and its MAD 2: from 4 + 3.5 * 2 / 0.6745 = 14.4 on a value is one."""
    assert outliers([1, 2, 3, 4, 5, 6, 7]) == ()
    assert outliers([1, 2, 3, 4, 5, 6, 14.3]) == ()
    assert outliers([1, 2, 3, 4, 5, 6, 14.5]) == (6,)
    assert outliers([-20, 2, 3, 4, 5, 6, 30]) == (0, 6)


def test_one_deviation_among_equal_values_is_an_outlier() -> None:
    """Their MAD is 0, so the mean distance stands in."""
    assert outliers([5.0] * 9 + [6.0]) == (9,)
    assert outliers([5.0] * 9) == () and outliers([1.0, 100.0]) == ()


def test_normal_noise_is_seldom_called_an_outlier() -> None:
    generator = np.random.default_rng(0)
    flagged = sum(len(outliers(generator.normal(0, 1, 25))) for _ in range(200)) / 5000
    print(f"{flagged:.2%} of normal values flagged")
    assert flagged < 0.01


def test_segments_are_equally_long_and_keep_their_time() -> None:
    assert segments([1, 2, 3, 4, 5, 6, 7], 3) == [(3, 6), (3, 15)]  # the seventh alone is no segment
    assert segments([1.0, 2.0], 5) == [(1, 1.0), (1, 2.0)]
    assert segments([], 5) == []
