"""Machines must agree on everything that changes what is computed, and may differ in where their files are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagewright import objects
from stagewright.config.sections import options
from stagewright.model.networks.weights import Start
from stagewright.runtime.job import Job
from stagewright.runtime.multinode.consistency import consistency_values, first_difference
from tests.parity import Case, make_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(Case("plain", "0:0.0:1", "third"), tmp_path)


def with_another(job: Job, key: str) -> Job:
    """The job on a machine whose command gives another value of one option."""
    section, _, name = key.partition(".")
    table: Any = getattr(job.config, section)
    value = getattr(table, name)
    other = not value if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else (value or 0) + 1
    return replace(job, config=replace(job.config, **{section: replace(table, **{name: other})}))


@pytest.mark.parametrize(
    "key",
    [
        *(option.key for option in options("model", "optimizer", "schedule") if option.key != "model.init"),
        *("data.samples", "data.shuffle", "plan.batch", "plan.mode", "run.seed", "run.precision", "run.dynamic"),
    ],
)
def test_machines_agree_on_every_option_that_changes_the_training(job: Job, key: str) -> None:
    found = first_difference(consistency_values(job), consistency_values(with_another(job, key)))
    assert found is not None and found[0] == key


@pytest.mark.parametrize(
    "key", ["model.init", "data.source", "data.loader_threads", "run.runs", "run.log_every", "nodes.index"]
)
def test_machines_may_differ_in_paths_threads_and_messages(job: Job, key: str) -> None:
    assert first_difference(consistency_values(job), consistency_values(with_another(job, key))) is None


def test_a_machine_may_know_another_checkpoint_than_machine_0(job: Job) -> None:
    """A machine whose supervisor was killed resumes from the newest checkpoint; the others started elsewhere."""
    resumed = replace(job, start=4, resume="runs/a/checkpoints/4")
    assert first_difference(consistency_values(job), consistency_values(resumed)) is None


def test_machines_agree_on_the_weights_that_they_start_from(job: Job) -> None:
    some, other, new = (replace(job, weights=start) for start in (Start("a", "12", 3), Start("b", "34", 3), None))
    values = consistency_values(some)
    assert first_difference(values, consistency_values(replace(job, weights=Start("elsewhere", "12", 3)))) is None
    assert first_difference(values, consistency_values(other)) == ("weights of --init", "12", "34")
    assert first_difference(values, consistency_values(new)) == ("weights of --init", "12", "none")


def test_machine_0_may_resume_from_a_checkpoint_while_the_others_wait(job: Job) -> None:
    waiting = replace(job, weights=Start("a", "12", 3))
    resumed = replace(job, start=4, resume="runs/a/checkpoints/4")
    assert first_difference(consistency_values(resumed), consistency_values(waiting)) is None


def test_machines_agree_on_the_data_and_the_plan(job: Job) -> None:
    values = consistency_values(job)
    other_data = replace(job, fingerprint="another data set")
    found = first_difference(values, consistency_values(other_data))
    assert found == ("data fingerprint", job.fingerprint, "another data set")
    other_plan = replace(job, plan=replace(job.plan, cuts=("fourth",)))
    assert first_difference(values, consistency_values(other_plan)) == ("plan cuts", list(job.plan.cuts), ["fourth"])


def test_processes_agree_on_what_the_objects_of_their_script_hold(job: Job) -> None:
    """Each has run the script itself, which may have drawn other weights or other samples."""
    name, source = objects.put(nn.Linear(2, 2), "net"), f"python:{objects.put([(torch.ones(2), 1)], 'samples')}"
    config = replace(
        job.config, model=replace(job.config.model, name=name), data=replace(job.config.data, source=source)
    )
    found = [consistency_values(replace(job, config=config))]
    for what, other in (("net", nn.Linear(2, 2)), ("samples", [(torch.ones(2), 0)])):
        objects.install({what: other})
        found.append(consistency_values(replace(job, config=config)))
    objects.remove(name, "objects:samples")
    weights, data = (first_difference(*pair) for pair in itertools.pairwise(found))
    assert weights is not None and weights[0].startswith("model weights (torch.manual_seed")
    assert data is not None and data[0] == "data fingerprint"
