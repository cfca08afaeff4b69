"""`--predict`: lagging stages extrapolate their weights along the momentum, exactly as the reference does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.config.optimizers import OPTIMIZERS as REGISTER
from stagewright.runtime.checkpoint.folder import Checkpoint
from stagewright.runtime.process.emulate import Emulation
from tests import reference
from tests.keeping import emulate_job, keeping, saved_at
from tests.marks import pairs
from tests.parity import (
    SCALED,
    SETTINGS,
    Case,
    assert_equals_reference,
    assert_near,
    assert_parity,
    assert_same_bits,
    emulate,
    make_job,
    refer,
    refer_skipping,
)

CASES = {
    "2+1 stale": Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, microbatches=3),
    "four stages": Case(
        "normed", "0:0-2.0:3-4.0:5-6.0:7", "second,third,head", mode="stale", staleness=3, microbatches=6
    ),
    "four stages, lag 1": Case("normed", "0:0.0:1.0:2.0:3", "second,third,head", mode="stale", staleness=1),
    "versions": Case("dropping", "0:0-1.0:2", "third", mode="stale", versions=(2, 4), dynamic=True),
    "pipedream": Case("normed", "0:0-1.0:2", "third", mode="pipedream", microbatches=3),
    "one stage": Case("normed", "0:0-1", mode="stale", versions=(3,), microbatches=3),
}
OPTIMIZERS = {
    "plain": {},
    "decay": {"momentum": 0.8, "weight_decay": 0.05},
    **{name: options for name, options in SETTINGS.items() if REGISTER[name].extrapolation},
    "clip": {"clip": 0.3},
}


@pytest.mark.parametrize(("name", "options"), pairs(CASES, OPTIMIZERS))
def test_extrapolated_runs_equal_the_reference(name: str, options: str, tmp_path: Path) -> None:
    case = replace(CASES[name], optimizer={"predict": True, **OPTIMIZERS[options]}, steps=10)
    run = assert_equals_reference(case, tmp_path)
    with pytest.raises(AssertionError, match="beyond"):  # otherwise extrapolation would have had no effect
        plain = refer(replace(case, optimizer=OPTIMIZERS[options])).weights
        assert_near({name: run.weights[name] for name in plain}, plain, 1e-6)


@pytest.mark.parametrize(
    "case",
    [
        Case("frozen_middle", "0:0-1.0:2-3.0:4", "second,third", mode="stale", staleness=2, microbatches=3),
        Case("frozen_first", "0:0-1.0:2", "second", mode="stale", staleness=1, microbatches=3),
        Case("tied", "0:0-1.0:2", "second", mode="stale", staleness=1, microbatches=3),
        Case("unused", "0:0-1.0:2", "third", mode="stale", staleness=1, microbatches=3),
    ],
    ids=str,
)
def test_models_with_frozen_shared_and_unused_parameters_equal_the_reference(case: Case, tmp_path: Path) -> None:
    case = replace(case, optimizer={"predict": True})
    assert_parity(case, emulate(case, tmp_path), refer(case))


@pytest.mark.parametrize(
    ("name", "options"), pairs(["2+1 stale", "four stages"], [{"lr": 1e-5}, {"name": "adamw", "lr": 1e-3}])
)
@pytest.mark.usefixtures("scaled")
def test_skipped_updates_do_not_change_the_momentum(name: str, options: dict[str, object], tmp_path: Path) -> None:
    case = replace(CASES[name], model="steep", steps=14, optimizer={"predict": True, **options}, **SCALED)
    expected = refer_skipping(case)
    assert_near(emulate(case, tmp_path).weights, expected.weights | expected.buffers, 1e-4)


def test_without_lag_nothing_is_extrapolated(tmp_path: Path) -> None:
    case = Case("normed", "0:0-1.0:2", "third", mode="sync")
    assert_same_bits(emulate(case, tmp_path), emulate(replace(case, optimizer={"predict": True}), tmp_path))


def test_after_a_change_of_plan_the_lag_grows_from_nothing(tmp_path: Path) -> None:
    """The first batches under a new plan use its initial weights, extrapolated as far as each is late."""
    lagging = Case("plain", "0:0.0:1.0:2", "second,third", mode="stale", staleness=2)
    lagging = replace(lagging, optimizer={"predict": True}, steps=8)
    job = keeping(make_job(replace(lagging, placement="0:0", cut=None, mode="sync", staleness=None), tmp_path), every=5)
    emulate_job(job)
    checkpoint = saved_at(job, 5)
    emulation = Emulation(make_job(lagging, tmp_path, resume=str(checkpoint.folder)), lambda event: None)
    moments = checkpoint.read("optimizer/momentum_buffer")
    for worker in emulation.workers:
        for replica in worker.replicas.values():
            for late in range(replica.stage.versions):
                slot = replica.ring.slots[replica.ring.slot_of(5 + late)]
                assert slot.version == 5
                expected = extrapolated(lagging, checkpoint, late, lagging.lr(5))
                held = replica.ring.named(slot.flat)
                assert_near(held, {name: expected[name] for name in held}, 1e-12)
    assert any(moments[name].any() for name in moments)


def extrapolated(case: Case, checkpoint: Checkpoint, updates: int, lr: float) -> dict[str, reference.Tensor]:
    setup = reference.Setup((1,), (1,), 12, 4, 1, lr=case.lr)
    moments = checkpoint.read("optimizer/momentum_buffer")
    return {
        name: reference.extrapolate(setup, lr, weight, reference.Moments(5, moments[name], weight), updates)
        for name, weight in checkpoint.read("master").items()
    }
