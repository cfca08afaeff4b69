"""The soak itself: its schedules, what its checks find, and how it shrinks a schedule. `make soak` runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.soak.__main__ import table
from tests.soak.check import check_bounds, check_leftovers, check_steps, check_weights, count_partial
from tests.soak.progress import Progress, Start, longest_gap, read_losses
from tests.soak.run import Happened
from tests.soak.sample import Sample, growth, slope
from tests.soak.schedule import (
    FIRST_BATCH,
    PLANS,
    Fault,
    Kind,
    Schedule,
    SoakPlan,
    format_schedule,
    kinds_for,
    make_schedule,
    parse_schedule,
    steps_of,
)
from tests.soak.shrink import shrink

STALE = PLANS["stale"]
LOSSES = [(0, 2.5), (1, 2.25), (2, 2.125)]


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_seed_gives_one_schedule(plan: SoakPlan) -> None:
    schedule = make_schedule(plan, 20, seed=7)
    assert schedule == make_schedule(plan, 20, seed=7) != make_schedule(plan, 20, seed=8)
    assert schedule[:5] == make_schedule(plan, 5, seed=7)
    assert parse_schedule(format_schedule(schedule)) == schedule


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_kind_that_a_plan_can_have_occurs_before_one_repeats(plan: SoakPlan) -> None:
    kinds = kinds_for(plan)
    for seed in range(50):
        schedule = make_schedule(plan, len(kinds), seed)
        assert {fault.kind for fault in schedule} == set(kinds)
    assert set().union(*map(kinds_for, PLANS.values())) == set(Kind)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_faults_name_what_the_plan_has_in_the_order_of_batches(plan: SoakPlan) -> None:
    for seed in range(50):
        schedule = make_schedule(plan, 20, seed)
        batches = [fault.batch for fault in schedule]
        assert batches == sorted(set(batches)) and batches[0] == FIRST_BATCH and batches[-1] < steps_of(schedule)
        ranks = {fault.number for fault in schedule if fault.kind is Kind.KILL_RANK}
        cut = {fault.number for fault in schedule if fault.kind is Kind.CUT}
        assert ranks <= set(range(plan.ranks)) and cut <= set(range(plan.machines))
        assert plan.machines > 1 or not cut


# --- checks -----------------------------------------------------------------------------------------------------------


def test_finds_nothing_wrong_with_the_same_run() -> None:
    weights = {"0.weight": torch.randn(3, 4), "1.count": torch.tensor(5)}
    assert check_steps(LOSSES, LOSSES) == []
    assert check_weights({name: tensor.clone() for name, tensor in weights.items()}, weights) == []


@pytest.mark.parametrize(
    ("found", "piece"),
    [
        (LOSSES[:1] + LOSSES[2:], "1 steps are missing from metrics.jsonl: 1"),
        (LOSSES + LOSSES[2:], "1 steps are in metrics.jsonl more than once: 2"),
        (LOSSES[:2] + [(2, 2.1250000000000004)], "1 steps have another loss: 2"),
        (LOSSES + [(3, 2.0)], "1 steps do not belong to the run: 3"),
        ([LOSSES[1], LOSSES[0], LOSSES[2]], "not in order"),
    ],
)
def test_finds_missing_repeated_and_changed_steps(found: list[tuple[int, float]], piece: str) -> None:
    (wrong,) = check_steps(found, LOSSES)
    assert piece in wrong


def test_finds_a_changed_bit() -> None:
    weights = {"a": torch.randn(7), "b": torch.zeros(2)}
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["a"].view(torch.int32)[3] ^= 1
    (wrong,) = check_weights(changed, weights)
    assert "1 of 2 exported tensors have other bits: a" in wrong
    assert check_weights({"a": weights["a"]}, weights) != []
    assert check_weights(weights | {"b": -weights["b"]}, weights) != []  # minus zero equals zero, but is other bits
    not_a_number = {"a": torch.tensor(float("nan"))}
    assert check_weights(not_a_number, {"a": not_a_number["a"].clone()}) == []


def test_finds_what_is_left_behind(tmp_path: Path) -> None:
    run, shared = tmp_path / "machine-0" / "run", tmp_path / "shm"
    for folder in (run / "checkpoints" / "20", run / "ranks", shared):
        folder.mkdir(parents=True)
    (run / "ranks" / "0.at").touch()
    assert check_leftovers(tmp_path / "machine-0", [], [], [shared]) == []
    (run / "checkpoints" / "30.partial").mkdir()
    (run / "metrics.draft").touch()
    (run / "ranks" / "stage-0.safetensors").touch()
    (shared / "torch_1").touch()
    wrong = check_leftovers(tmp_path / "machine-0", [123], ["machine 0: tcp 127.0.0.1:4000"], [shared])
    for piece in ("30.partial", "metrics.draft", "stage-0.safetensors", "torch_1", "process 123", "127.0.0.1:4000"):
        assert any(piece in line for line in wrong), piece
    assert len(wrong) == 6


def test_counts_checkpoints_that_are_being_written() -> None:
    assert count_partial([".session", "20", "30", "10.partial", "30.old.partial", "40.partial", "50.partial"]) == 2
    assert count_partial(["10.partial"]) == 1 and count_partial([]) == 0


def test_finds_what_grows() -> None:
    samples = [Sample("rank 0", 1, 0, 5, 1, 1)] * 9  # the start, which does not count
    samples += [Sample("rank 0", 1, step, (100 << 20) + step * 4096, 8, 20) for step in range(100, 1100, 10)]
    samples += [Sample("rank 0", 2, step, (300 << 20) + step * 4096, 8, 20) for step in range(2000, 2200, 10)]
    (used,) = growth(samples)
    assert used.rss_slope == pytest.approx(4096 * 1000) and used.threads_slope == 0
    assert check_bounds([used], most_partial=2) == []
    (wrong,) = check_bounds([used], most_partial=2, slopes=True)
    assert "rank 0 grows by 4.1e+06 bytes of memory per 1000 steps" in wrong
    (wrong,) = check_bounds([], most_partial=3)
    assert "3 checkpoints were being written at a time" in wrong
    (wrong,) = check_bounds([replace(used, most_threads=1000)], most_partial=0)
    assert "1000 threads" in wrong
    assert slope([[(1.0, 1.0)]]) is None


def test_follows_a_run_by_its_metrics(tmp_path: Path) -> None:
    run = tmp_path / "machine-0" / "run"
    progress = Progress(tmp_path)
    progress.poll()
    assert progress.run is None and progress.steps == 0
    (run / "checkpoints" / "3").mkdir(parents=True)
    for name in ("4.partial", "5.partial"):
        (run / "checkpoints" / name).mkdir()
    records = [
        {"kind": "step", "batch": batch, "loss": 2.0, "seconds": batch + 7.0 * (batch > 3)} for batch in range(6)
    ]
    lines = [json.dumps(record) + "\n" for record in records]
    (run / "metrics.jsonl").write_text("".join(lines) + '{"kind": "step", "batch": 6, "lo')
    progress.poll()
    assert (progress.steps, progress.most, progress.most_partial, progress.has_checkpoint()) == (6, 6, 2, False)
    draft = run / "metrics.draft"
    draft.write_text("".join(lines[:3]) + '{"kind": "restarted", "batch": 3, "cause": "killed"}\n')
    draft.replace(run / "metrics.jsonl")
    (run / "checkpoints" / "3" / "manifest.json").touch()
    progress.poll()
    assert (progress.steps, progress.most, progress.has_checkpoint()) == (3, 6, True)
    assert progress.starts[1:] == [Start(before=6, steps=3)]
    (run / "metrics.jsonl").write_text("".join(lines))
    assert longest_gap(run, first=2) == longest_gap(run, first=4) == 8.0 and longest_gap(run, first=5) == 1.0
    assert read_losses(run) == [(batch, 2.0) for batch in range(6)]


# --- shrinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", [(0, 1), (3, 17), (9, 10), (0, 19)])
def test_shrinks_to_a_pair_that_fails_only_together(pair: tuple[int, int]) -> None:
    schedule = make_schedule(STALE, 20, seed=1)
    planted = {schedule[index] for index in pair}
    tried: list[Schedule] = []

    def fails(part: Schedule) -> bool:
        tried.append(part)
        return planted <= set(part)

    assert set(shrink(schedule, fails, attempts=100)) == planted
    assert len(tried) == len(set(tried)) <= 60


def test_shrinking_ends_with_a_schedule_that_was_seen_to_fail() -> None:
    schedule = make_schedule(STALE, 20, seed=1)
    failed: set[Schedule] = {schedule}

    def fails(part: Schedule) -> bool:
        does = schedule[4] in part and schedule[12] in part
        failed.update([part] if does else [])
        return does

    for attempts in range(12):
        assert shrink(schedule, fails, attempts) in failed
    assert shrink(schedule[:1], fails, attempts=10) == schedule[:1]
    assert len(shrink(schedule, lambda part: True, attempts=100)) == 1


def test_the_table_has_a_line_per_kind() -> None:
    faults = [Happened(Fault(30, Kind.KILL_RANK, 1), 31, seconds, 5, 1) for seconds in (4.0, 6.0, 14.0)]
    lines = table([*faults, Happened(Fault(50, Kind.CLOCK, 3), 50, 0.02, 0, 0)])
    assert lines[2:] == [
        "| SIGKILL of a rank | 3 | 5, 5 | 6.0, 14.0 |",
        "| the wall clock jumps by hours | 1 | 0, 0 | 0.0, 0.0 |",
    ]
    assert table([]) == []
