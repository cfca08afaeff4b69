"""Averaged weights equal the reference in every mode, through checkpoints and changes of plan; homes hold the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stagewright.runtime.stage.versions import MovingAverage, VersionRing
from tests.keeping import emulate_job, emulate_keeping, resumed, same_bits, saved_at
from tests.parity import (
    SCALED,
    Case,
    EmulatedRun,
    assert_near,
    assert_parity,
    assert_scores,
    emulate,
    make_job,
    refer,
    refer_skipping,
)

EMA = {"ema": 0.7}
STALE = {"mode": "stale", "staleness": 1}
FEW = {"steps": 4, "eval_every": 4}
EXACT = 1e-12
CASES = [
    Case("plain", "0:0.0:1", "third", optimizer=EMA, **FEW),
    Case("normed", "0:0-1.0:2", "third", microbatches=3, optimizer=EMA, **STALE, **FEW),
    Case("normed", "0:0-1.0:2", "third", mode="pipedream", microbatches=3, optimizer=EMA, **FEW),
    Case("plain", "0:0-2", mode="dp", microbatches=6, optimizer={**EMA, "name": "adamw", "lr": 0.01}, **FEW),
]


def masters(run: EmulatedRun) -> dict[str, Tensor]:
    """The newest weights by name, as every replica has them."""
    found: dict[str, Tensor] = {}
    for worker in run.emulation.workers:
        for replica in worker.replicas.values():
            found |= replica.ring.named(replica.ring.master)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_evaluations_and_exports_use_averaged_weights_and_training_does_not(case: Case, tmp_path: Path) -> None:
    run, result = emulate(case, tmp_path), refer(case)
    assert_parity(case, run, result)
    own = masters(run)
    assert_near({name: run.weights[name] for name in own}, {name: result.averages[name] for name in own}, EXACT)
    assert_near(own, {name: result.weights[name] for name in own}, EXACT)
    assert all(not torch.equal(run.weights[name], own[name]) for name in own)
    assert_scores(case, run, result)


@pytest.mark.parametrize("name", ["one process", "stale"])
@pytest.mark.usefixtures("scaled")
def test_a_skipped_update_is_not_averaged(name: str, tmp_path: Path) -> None:
    """The device skips where there is one process, the host where stages lag."""
    case = Case("steep", "0:0") if name == "one process" else Case("steep", "0:0-1.0:2", "third", **STALE)
    case = replace(case, optimizer={"lr": 1e-5, **EMA}, steps=8, **SCALED)
    expected = refer_skipping(case)
    assert_near(emulate(case, tmp_path).weights, expected.averages | expected.buffers, 1e-6)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> EmulatedRun:
    """A run in mode sync with a checkpoint at 2 of 4 batches."""
    return emulate_keeping(CASES[0], tmp_path_factory.mktemp("kept"), every=2, keep=0)


def test_an_average_beside_the_weights_changes_no_bit_and_resumes_with_the_same(tmp_path: Path) -> None:
    case = CASES[1]
    plain = emulate(replace(case, optimizer={}, eval_every=None), tmp_path)
    whole = emulate_keeping(case, tmp_path, every=2, keep=0)
    assert whole.microbatch_losses == plain.microbatch_losses and same_bits(masters(whole), masters(plain))
    again = emulate_job(resumed(make_job(case, tmp_path), saved_at(whole.job, 2)))
    assert same_bits(again.weights, whole.weights) and same_bits(masters(again), masters(whole))


@pytest.mark.parametrize(
    "plan", [{"placement": "0:0-2", "cut": None, "mode": "dp"}, {"placement": "0:0-1.0:2", "cut": "second"}], ids=str
)
def test_an_average_resumes_under_another_plan(plan: dict[str, str], kept: EmulatedRun, tmp_path: Path) -> None:
    job = resumed(make_job(replace(CASES[0], **plan), tmp_path), saved_at(kept.job, 2))
    run = emulate_job(replace(job, plan=job.plan.starting_at(2)))
    assert_near(run.weights, refer(CASES[0]).averages, EXACT)


def test_an_average_starts_from_the_weights_of_a_checkpoint_without_one(tmp_path: Path) -> None:
    case = replace(CASES[0], optimizer={}, eval_every=None, steps=3)
    plain = emulate_keeping(case, tmp_path, every=2, keep=0)
    run = emulate_job(resumed(make_job(replace(case, optimizer=EMA), tmp_path), saved_at(plain.job, 2)))
    before = saved_at(plain.job, 2).read("master")
    expected = {name: 0.7 * before[name] + 0.3 * newest for name, newest in masters(run).items()}
    assert_near(run.weights, expected, EXACT)


def test_homes_of_a_tied_parameter_hold_the_same_bits_of_its_average(tmp_path: Path) -> None:
    ties = (("embed.weight", (0, 1)),)
    case = Case(
        "language", "0:0-1.0:2", "second", precision="fp32", ties=ties, steps=4, optimizer={"ema": 0.9}, **STALE
    )
    run, result = emulate(case, tmp_path), refer(case)
    assert_parity(case, run, result)
    replicas = [replica for worker in run.emulation.workers for replica in worker.replicas.values()]
    homes = [
        parameter.view(replica.average.flat)
        for replica in replicas
        for parameter in replica.ring.parameters
        if replica.average.flat is not None and {"embed.weight", "head.weight"} & set(parameter.names)
    ]
    assert len(homes) == 3 and all(torch.equal(home, homes[0]) for home in homes)


def test_an_average_of_half_weights_is_in_single_precision() -> None:
    model = nn.Linear(3, 2).bfloat16()
    ring = VersionRing([model], dict(model.named_parameters()).keys(), 1)
    average = MovingAverage(ring, 0.999)
    assert average.flat.dtype == torch.float32
    with torch.no_grad():
        ring.master.fill_(2.0)
    average.flat.fill_(1.0)
    for _ in range(10):
        average.add()
    assert float(average.flat[0]) == pytest.approx(2 - 0.999**10, rel=1e-6)  # in bf16 a step of 0.001 would vanish
    with average.in_use():
        assert model.weight.dtype == torch.bfloat16 and model.weight[0, 0].item() == pytest.approx(1.01, rel=0.01)
    assert model.weight[0, 0].item() == 2.0


def test_an_error_in_an_evaluation_leaves_the_newest_weights() -> None:
    model = nn.Linear(3, 2)
    ring = VersionRing([model], dict(model.named_parameters()).keys(), 1)
    average = MovingAverage(ring, 0.5)
    average.flat.fill_(3.0)
    newest = ring.master.clone()
    with pytest.raises(ZeroDivisionError), average.in_use():
        assert model.weight[0, 0].item() == 3.0
        raise ZeroDivisionError
    assert torch.equal(ring.master, newest)
