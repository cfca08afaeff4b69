"""The parts of a script's run: its batches, its rates, and what it has seen before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from stagewright.errors import UserError
from stagewright.events import Evaluated, Step, encode
from stagewright.runtime.checkpoint.history import history_of, parse_history, read_history
from stagewright.runtime.job import Job
from stagewright.runtime.script.feed import Batches, fingerprint
from stagewright.runtime.script.rates import Panel
from tests.parity import Case, make_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    case = Case(placement="0:0-1.0:2", cut="second", mode="stale", staleness=1)
    return make_job(case, tmp_path_factory.mktemp("job"))


def batch_of(job: Job, samples: int | None = None) -> dict[str, torch.Tensor]:
    shapes = {value.name: value.shape[1:] for value in (*job.training.inputs, *job.training.fields)}
    return {name: torch.rand(samples or job.plan.batch, *shape) for name, shape in shapes.items()}


def test_batches_end_with_what_is_no_whole_one(job: Job) -> None:
    told: list[tuple[int, str]] = []
    given = [batch_of(job), batch_of(job), batch_of(job, 5)]
    batches = Batches(job, 7, given, tell=lambda *found: told.append(found))
    assert [batches.has(number) for number in (7, 8, 9)] == [True, True, False] and batches.left_out == 5
    assert told == [(7, fingerprint(given[0])), (8, fingerprint(given[1]))]
    second = batches.microbatch(8 * job.plan.microbatches + 1)
    size = job.plan.samples
    assert all(torch.equal(second[name], given[1][name][size : 2 * size]) for name in second)


def test_a_batch_that_is_not_there_yet_is_waited_for(job: Job) -> None:
    batches = Batches(job, 0)
    assert batches.has(0) is None
    batches.give(batch_of(job))
    assert batches.has(0) is True and batches.has(1) is None
    batches.end()
    assert batches.has(1) is False


def test_batches_of_another_form_are_refused(job: Job) -> None:
    batches = Batches(job, 0)
    (name, *_) = batch_of(job)
    with pytest.raises(UserError, match=f"has no field '{name}'"):
        batches.give({"other": torch.rand(job.plan.batch, 3)})
    with pytest.raises(UserError, match=r"is \[12, 99\]"):
        batches.give(batch_of(job) | {name: torch.rand(job.plan.batch, 99)})


def test_fingerprints_tell_orders_apart() -> None:
    numbers = torch.arange(1000.0)
    assert fingerprint({"a": numbers}) == fingerprint({"a": numbers.clone()})
    assert fingerprint({"a": numbers}) != fingerprint({"a": numbers.flip(0)})


def panel(job: Job, **options: Any) -> Panel:
    made = Panel(torch.optim.SGD([torch.zeros(2)], lr=0.4, momentum=0.9), **options)
    made.begin(job.plan)
    return made


def test_a_rate_acts_from_the_batch_it_was_read_for(job: Job) -> None:
    found = panel(job)
    found.read(3)
    found.optimizer.param_groups[0]["lr"] = 0.1
    found.read(5)
    assert [found.rate(batch) for batch in (3, 4, 5, 9)] == [0.4, 0.4, 0.1, 0.1]
    groups = [{"lr": 0.4, "momentum": 0.9, "steps": 7}]
    found.of(job.plan.stages[0]).apply(5, groups)
    assert groups == [{"lr": 0.1, "momentum": 0.9, "steps": 7}]  # what the stage's optimizer counts is its own


def test_a_scheduler_knows_the_rates_of_batches_ahead(job: Job) -> None:
    rates = panel(job, scheduler=lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5))
    rates.advance(0)
    assert [rates.rate(batch) for batch in range(3)] == [0.4, 0.4, 0.2]


def test_groups_that_come_or_go_are_refused(job: Job) -> None:
    found = panel(job)
    found.optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 1.0})
    with pytest.raises(UserError, match="had 1 groups and has 2 now"):
        found.read(1)


def test_a_history_has_every_loss_before_the_start(job: Job, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "3").mkdir(parents=True)
    records = [Step(batch, 0, 0.5 + batch / 3, 0.1, 1.0, 0.0) for batch in range(5)]
    seen = [Evaluated(2, 8, 0.25, {"top1": 0.5}), Evaluated(4, 8, 0.2, {})]
    (run / "metrics.jsonl").write_text("".join(f"{encode(record)}\n" for record in [*records, *seen]))
    resumed = replace(job, start=3, resume=str(run / "checkpoints" / "3"))
    found = read_history(resumed)
    assert found.losses == tuple(record.loss for record in records[:3]) and found.evaluations == (seen[0],)
    assert parse_history(history_of(resumed)) == found
    with pytest.raises(UserError, match="no loss of batch 5, and the script resumes at batch 6"):
        read_history(replace(resumed, start=6))
