"""Frozen parameters through the whole road: they keep their bits, and what is trained equals the reference."""

from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.model.load import build_model
from tests.marks import IS_NIGHTLY, daily
from tests.parity import SCALED, Case, EmulatedRun, assert_equals_reference, assert_near, emulate, refer_skipping
from tests.reference import Group

SGD = {"momentum": 0.9, "weight_decay": 0.1}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
TRUNK = {"normed_residual": "stem,block", "attention": "embed,block"}
CUTS = {  # a first stage without a trained parameter; then two of them
    "normed_residual": ("head", "block,head"),
    "attention": ("head", "block,head"),
}
PLANS: tuple[tuple[str, int | None, dict[str, Any]], ...] = (
    ("0:0.0:1", 0, {"mode": "sync"}),
    ("0:0.0:1.0:2", 1, {"mode": "sync"}),
    ("0:0-1.0:2", 0, {"mode": "stale", "staleness": 1}),
    ("0:0-1", None, {"mode": "dp"}),
    ("0:0-1.0:2", 0, {"mode": "pipedream"}),
)


def cases() -> list[Case]:
    """Every model under every plan; every day by one optimizer in turn, at night by both."""
    found = []
    for (model, (placement, cut, mode)), number in zip(product(TRUNK, PLANS), count(), strict=False):
        where = CUTS[model][cut] if cut is not None else None
        case = Case(model, placement, where, freeze=TRUNK[model], steps=3, eval_every=3, **mode)
        optimizers = (SGD, ADAMW) if IS_NIGHTLY else ((SGD, ADAMW)[number % 2],)
        found += [replace(case, optimizer=optimizer) for optimizer in optimizers]
    return found


def assert_frozen(case: Case, run: EmulatedRun) -> None:
    """What is frozen has its first bits, its statistics too; everything else has moved."""
    first = build_model(f"tests.models:{case.model}", case.seed, weights=torch.float64).state_dict()
    trunk = tuple((case.freeze or "").split(","))
    moved = {name for name, tensor in run.weights.items() if not torch.equal(tensor, first[name])}
    assert moved == {name for name in first if not name.startswith(trunk)} != set()


@pytest.mark.parametrize("case", daily(cases(), 2), ids=str)
def test_a_trained_head_on_a_frozen_trunk_equals_the_reference(case: Case, tmp_path: Path) -> None:
    assert_frozen(case, assert_equals_reference(case, tmp_path))


LAGGING: dict[str, Any] = {"mode": "stale", "staleness": 1}
TRAINED = Case("normed", "0:0.0:1", "third", freeze="first,second", steps=3)
OTHERS = {
    "clips by the norm of the whole model": replace(TRAINED, optimizer={"clip": 0.01}),
    "clips each stage by its norm": replace(TRAINED, optimizer={"clip": 0.01}, **LAGGING),
    "extrapolates": replace(TRAINED, optimizer={"predict": True}, **LAGGING),
    "has groups": replace(
        TRAINED,
        optimizer={"no_decay": True, "weight_decay": 0.1},
        groups=dict.fromkeys(("third.1.weight", "third.1.bias", "head.bias"), Group(settings={"weight_decay": 0.0})),
    ),
    "averages": replace(TRAINED, optimizer={"ema": 0.9}, eval_every=3),
    "dynamic": replace(TRAINED, placement="0:0-1.0:2", dynamic=True),
    "the last stage": Case("normed", "0:0-1.0:2", "third", freeze="third,head", steps=3, **LAGGING),
    "a stage in the middle": Case("normed", "0:0.0:1.0:2", "second,third", freeze="second", steps=3, **LAGGING),
    "several replicas": replace(TRAINED, placement="0:0-1.0:2-3", **LAGGING),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_stage_may_be_without_trained_parameters(name: str, tmp_path: Path) -> None:
    assert_frozen(OTHERS[name], assert_equals_reference(OTHERS[name], tmp_path))


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("mode", [{"mode": "sync"}, LAGGING], ids=["sync", "stale"])
def test_a_scaled_loss_works_where_a_stage_is_frozen(mode: dict[str, Any], tmp_path: Path) -> None:
    optimizer = {"lr": 1e-5}
    case = Case("steep", "0:0.0:1", "third", freeze="first,second", steps=8, optimizer=optimizer, **SCALED, **mode)
    run, result = emulate(case, tmp_path), refer_skipping(case)
    assert_near(run.weights, result.weights | result.buffers, 1e-4)
