"""Accuracy, intervals, differences from the baseline and times to a target, from made runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.learning.findings import Study, in_points, mean_interval, target_of
from benchmarks.learning.pages import study_page
from benchmarks.learning.runs import TrainedRun
from stagewright.report.markdown import as_markdown
from tests.benchmarks.learning.made import findings, trained


def test_the_interval_of_a_mean_is_students() -> None:
    interval = mean_interval([1.0, 2.0, 6.0])
    assert interval.value == 3.0
    assert interval.high - 3.0 == pytest.approx(4.303 * np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert mean_interval([4.0]).low == mean_interval([4.0]).high == 4.0


@pytest.mark.parametrize(
    ("count", "factor"), [(2, 12.706), (3, 4.303), (10, 2.262), (11, 2.228), (12, 2.201), (31, 2.042), (1001, 1.962)]
)
def test_the_factor_is_students_for_every_number_of_values(count: int, factor: float) -> None:
    values = [0.0] * (count // 2) + [1.0] * (count - count // 2)
    interval = mean_interval(values)
    assert interval.high - interval.value == pytest.approx(factor * np.std(values, ddof=1) / math.sqrt(count), rel=4e-4)


@pytest.mark.parametrize("count", [2, 3, 5, 14])
def test_the_interval_holds_the_mean_in_95_percent_of_cases(count: int) -> None:
    generator = np.random.default_rng(count)
    hits = sum(mean_interval(list(generator.normal(0.9, 0.01, count))).holds(0.9) for _ in range(1000))
    assert 920 <= hits <= 975, hits


def test_summaries_say_lower_equal_within_noise_or_diverged() -> None:
    runs = [trained("sync", seed, 0.5, 0.90 + 0.01 * seed) for seed in range(3)]
    runs += [trained("same", seed, 0.5, 0.90 + 0.01 * seed + shift) for seed, shift in enumerate((-0.001, 0.002, 0.0))]
    runs += [trained("low", seed, 0.5, 0.89 + 0.01 * seed + shift) for seed, shift in enumerate((-0.001, 0.001, 0.0))]
    runs += [trained("one", 1, 0.5, 0.905)]
    runs += [trained("wild", 0, 0.3, diverged="the loss of batch 14 is nan"), trained("wild", 1, 0.5, 0.91)]
    sync, same, low, one, wild = findings(*runs)
    assert sync.is_baseline and sync.difference is None
    assert same.summary == "as accurate as the baseline within noise (+0.03 points, -0.35 to +0.41)"
    assert low.summary == "lower by 1.00 points (-1.25 to -0.75)"  # although each seed's own accuracy varies as much
    assert low.accuracy is not None and low.accuracy.value == pytest.approx(0.90)
    (_, equal) = findings(trained("sync", 0, 0.9), trained("twin", 0, 0.9))
    assert equal.summary == "equal (one seed: no interval)"
    assert one.summary == "lower by 0.50 points (one seed: no interval)"
    assert wild.summary == "1 of 2 runs diverged: the loss of batch 14 is nan"


def test_diverged_runs_are_left_out_on_both_sides() -> None:
    gone = "the loss of batch 14 is nan"
    runs = [trained("sync", 0, 0.9), trained("sync", 1, 0.2, diverged=gone), trained("sync", 2, 0.3, diverged=gone)]
    runs += [trained("better", seed, 0.8, 0.95, 0.91) for seed in (2, 0, 1)]
    sync, better = findings(*runs)
    assert sync.accuracy is not None and sync.accuracy.value == 0.9
    assert better.pairs == [pytest.approx(0.01)] and better.summary == "higher by 1.00 points (one seed: no interval)"
    assert better.accuracy is not None and better.accuracy.value == pytest.approx(0.91)  # the last, not the best
    assert [run.seed for run in better.runs] == [0, 1, 2]
    assert sync.epochs_to(0.5) is None  # one of three reaches it
    assert [round(interval.value, 4) for _, interval in sync.curve()] == [round((0.9 + 0.2 + 0.3) / 3, 4)]


def test_a_run_that_ended_in_its_first_epoch_does_not_shorten_the_epoch() -> None:
    early = TrainedRun("R", "sync", 1, (), 3, None, "nan")
    (sync,) = findings(TrainedRun("R", "sync", 0, ((5, 0.5), (20, 0.9)), 10), early)
    assert sync.per_epoch == 10 and [epoch for epoch, _ in sync.curve()] == [0.5, 2.0]


def test_targets_are_half_points_below_the_baseline() -> None:
    for base, target in ((0.915, 0.905), (0.145, 0.135), (0.833, 0.82)):
        assert target_of(findings(trained("sync", 0, base))) == target
    assert target_of(findings(trained("a", 0, 0.5), trained("sync", 0, 0.9))) == 0.89  # the baseline's, at any position
    (sync,) = findings(trained("sync", 0, 0.175))
    assert sync.epochs_to(0.17500000000000002) == 1.0
    assert in_points(-1e-6) == "+0.00" and in_points(-0.0037) == "-0.37"


def test_a_metric_of_which_less_is_better_has_its_own_targets_and_words() -> None:
    runs = [replace(trained("sync", seed, 40.0, 20.0 + seed), metric="perplexity") for seed in range(2)]
    runs += [replace(trained("stale", seed, 30.0, 22.0 + seed), metric="perplexity") for seed in range(2)]
    sync, stale = findings(*runs)
    assert target_of([sync, stale]) == pytest.approx(20.5 * 1.01, rel=1e-3)
    assert sync.epochs_to(25.0) == 2.0 and stale.epochs_to(30.0) == 1.0 and stale.epochs_to(20.0) is None
    assert stale.difference is not None and stale.difference.value == pytest.approx(2.0)
    assert stale.summary.startswith("perplexity higher by 2 or 9.8% (")
    study = Study("T", "today", "bench", {}, (sync, stale), {"R": 25.0})
    text = as_markdown(study_page(study))
    assert "R: perplexity against epochs" in text and "epochs to perplexity 25" in text and "%|" not in text


def test_the_time_to_a_target_is_when_half_of_the_runs_reach_it() -> None:
    runs = [trained("sync", 0, 0.5, 0.8, 0.9), trained("sync", 1, 0.5, 0.7, 0.8), trained("sync", 2, 0.8, 0.8, 0.8)]
    (sync,) = findings(*runs, speed=64.0)
    assert sync.epochs_to(0.8) == 2.0
    assert sync.seconds_to(0.8) == 2.0 * 640 / 64.0
    assert sync.epochs_to(0.85) is None and sync.seconds_to(0.85) is None  # one of three reaches it
    (two,) = findings(trained("sync", 0, 0.9, 0.9), trained("sync", 1, 0.5, 0.5))
    assert two.epochs_to(0.8) == 1.0  # one of two
    assert target_of([sync]) == pytest.approx(0.82)  # a point below the mean of 0.833
