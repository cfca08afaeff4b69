"""Groups of parameters train as the reference's, under every kind of plan; so do runs that change their plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.config.sections import OptimizerConfig, ScheduleConfig
from stagewright.runtime.checkpoint.format import MANIFEST
from stagewright.runtime.checkpoint.save import write_file
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.stage.optimizer import COUNTS, ScheduledRates
from tests import reference
from tests.keeping import emulate_job, keeping, resumed, same_bits, saved_at
from tests.marks import IS_NIGHTLY, daily
from tests.parity import Case, assert_near, assert_parity, build, emulate, make_job, refer

_TOLERANCE = 1e-12
_LR = 0.05
_STEPS = 5


def told(model: str, rule: Any) -> dict[str, reference.Group]:
    """The reference's groups: `rule` says how each parameter moves, by its name and the parameter."""
    return {name: rule(name, parameter) for name, parameter in build(model).named_parameters()}


def by_child(name: str, parameter: torch.Tensor) -> reference.Group:
    """SGD: `head` has a rate, a momentum and a decay of its own, biases and norms none."""
    settings: dict[str, Any] = {"momentum": 0.5} if name.startswith("head") else {}
    settings["weight_decay"] = 0.0 if parameter.dim() < 2 else 0.02 if name.startswith("head") else 0.1
    return reference.Group(3.0 if name.startswith("head") else 1.0, settings)


SGD = {
    "weight_decay": 0.1,
    "no_decay": True,
    "groups": [f"head.*:lr={3 * _LR},momentum=0.5,weight_decay=0.02"],
}


def by_layer(name: str, parameter: torch.Tensor) -> reference.Group:
    """AdamW: the stem has three layers after it, the first block two, the second one, what follows none."""
    after = 3 if name.startswith("stem") else 2 - int(name[7]) if name.startswith("blocks.") else 0
    settings: dict[str, Any] = {"betas": (0.8, 0.95)} if name.endswith("0.weight") else {}
    return reference.Group(0.75**after, settings | {"weight_decay": 0.0 if name == "head.weight" else 0.1})


ADAMW = {
    "name": "adamw",
    "lr": 0.01,
    "eps": 1e-4,
    "weight_decay": 0.1,
    "layer_decay": 0.75,
    "groups": ["head.weight:weight_decay=0", "*0.weight:beta1=0.8,beta2=0.95"],
}
KINDS: dict[str, tuple[str, Mapping[str, Any], Any]] = {
    "sgd": ("normed", SGD, by_child),
    "adamw": ("layered", ADAMW, by_layer),
}
PLANS = {
    "sync 1-1": Case(placement="0:0.0:1", cut="head", steps=_STEPS),
    "stale 2-1": Case(placement="0:0-1.0:2", cut="head", mode="stale", staleness=1, microbatches=3, steps=_STEPS),
    "pipedream": Case(placement="0:0-1.0:2", cut="head", mode="pipedream", microbatches=3, steps=_STEPS),
    "dp 3": Case(placement="0:0-2", mode="dp", steps=_STEPS),
}


def case_of(kind: str, plan: str, **more: Any) -> Case:
    model, optimizer, rule = KINDS[kind]
    return replace(PLANS[plan], model=model, optimizer=optimizer | more, groups=told(model, rule))


def assert_equals_reference(case: Case, folder: Path) -> None:
    run, result = emulate(case, folder), refer(case)
    assert_parity(case, run, result)
    assert_near(run.weights, result.weights | result.buffers, _TOLERANCE)
    with pytest.raises(AssertionError, match="beyond"):  # otherwise the groups would have had no effect
        assert_near(refer(replace(case, groups={})).weights, result.weights, 1e-6)


_DAILY = {("sgd", "sync 1-1"), ("sgd", "pipedream"), ("adamw", "stale 2-1"), ("adamw", "dp 3")}


@pytest.mark.parametrize(
    ("kind", "plan"), [(kind, plan) for kind in KINDS for plan in PLANS if IS_NIGHTLY or (kind, plan) in _DAILY]
)
def test_groups_train_as_the_reference_does(kind: str, plan: str, tmp_path: Path) -> None:
    assert_equals_reference(case_of(kind, plan), tmp_path)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("sgd", {"predict": True, "nesterov": True, "momentum": 0.8}),
        ("adamw", {"predict": True, "clip": 0.1}),
    ],
    ids=str,
)
def test_stale_weights_are_extrapolated_by_the_rate_and_momentum_of_their_group(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    assert_equals_reference(case_of(kind, "stale 2-1", **more), tmp_path)


def test_a_group_without_momentum_stands_beside_one_with_it(tmp_path: Path) -> None:
    groups = told("plain", lambda name, _: reference.Group(1.0, {"momentum": 0.0 if "head" in name else 0.9}))
    case = replace(PLANS["stale 2-1"], optimizer={"groups": ["head.*:momentum=0"], "nesterov": True}, groups=groups)
    assert_equals_reference(replace(case, optimizer={**case.optimizer, "predict": True}), tmp_path)


@pytest.mark.parametrize("mode", daily(["stale", "sync"], 2))
def test_a_tied_parameter_is_in_one_group_in_all_its_homes(mode: str, tmp_path: Path) -> None:
    case = Case("language", "0:0-1.0:2", "head", mode=mode, microbatches=3, steps=_STEPS)
    case = replace(case, staleness=1 if mode == "stale" else None)
    groups = told("language", lambda name, _: reference.Group(2.0 if name == "embed.weight" else 1.0))
    case = replace(case, optimizer={"groups": [f"embed.*:lr={2 * _LR}"], "clip": 0.3}, groups=groups)
    assert_equals_reference(replace(case, ties=(("embed.weight", (0, 1)),)), tmp_path)


@pytest.mark.usefixtures("scaled")
def test_a_skipped_update_leaves_every_group_alone(tmp_path: Path) -> None:
    groups = told("steep", lambda name, _: reference.Group(0.5 if name.startswith("head") else 1.0))
    case = Case("steep", "0:0-1.0:2", "third", mode="stale", staleness=1, precision="fp16", loss_scale=2.0**124)
    case = replace(case, growth_interval=2, loud=11, steps=14, groups=groups)
    case = replace(case, optimizer={"lr": 1e-5, "groups": ["head.*:lr=5e-6"]})
    expected = refer(case)
    assert any(map(all, expected.skipped)) and not all(map(any, expected.skipped)), expected.skipped
    assert_near(emulate(case, tmp_path).weights, expected.weights | expected.buffers, 1e-4)


@pytest.mark.parametrize("kind", daily(KINDS, 2))
def test_a_run_with_groups_resumes_bit_for_bit_and_under_another_plan(kind: str, tmp_path: Path) -> None:
    case = replace(case_of(kind, "sync 1-1"), model="plain" if kind == "sgd" else "layered")
    if kind == "adamw":  # statistics depend on who runs which microbatch; a run of one rank has them all
        case = replace(case, microbatches=1)
    whole = emulate(case, tmp_path)
    job = keeping(make_job(case, tmp_path), every=3, keep=0)
    emulate_job(job)
    again = emulate_job(resumed(make_job(case, tmp_path), saved_at(job, 3)))
    assert same_bits(again.weights, whole.weights)
    other = replace(case, placement="0:0.0:1", cut="third" if kind == "sgd" else "blocks")
    moved = emulate_job(make_job(other, tmp_path, resume=str(saved_at(job, 3).folder)))
    assert_near(moved.weights, whole.weights, _TOLERANCE)


def test_groups_may_come_and_go_on_resume_and_keep_the_count_of_steps(tmp_path: Path) -> None:
    """AdamW has one count for the whole master without groups, and one for each parameter with them."""
    plain = replace(PLANS["sync 1-1"], optimizer={"name": "adamw", "lr": 0.01})
    equal = replace(plain, optimizer={**plain.optimizer, "groups": ["head.*:weight_decay=1e-300"]})  # changes no bit
    whole = emulate(plain, tmp_path)
    for before, after in ((plain, equal), (equal, plain)):
        job = keeping(make_job(before, tmp_path), every=3, keep=0)
        emulate_job(job)
        for case in (after, replace(after, cut="third")):
            again = emulate_job(make_job(case, tmp_path, resume=str(saved_at(job, 3).folder)))
            assert_near(again.weights, whole.weights, _TOLERANCE)


def test_counts_of_an_older_version_are_read(tmp_path: Path) -> None:
    """It saved a parameter's count in the place of each of its numbers."""
    case = case_of("adamw", "sync 1-1")
    job = keeping(make_job(case, tmp_path), every=4, keep=0)
    whole = emulate_job(job)
    checkpoint = saved_at(job, 4)
    shapes = checkpoint.shapes()
    counts = [file for file in checkpoint.manifest.files if file.kind == COUNTS]
    assert len(counts) == 2 and {int(count) for count in checkpoint.read(COUNTS).values()} == {4}
    old = {
        file.name: write_file(
            checkpoint.folder,
            file.stage,
            COUNTS,
            {
                name: count.expand(shapes[name]).clone()
                for name, count in checkpoint.read(COUNTS, stage=file.stage).items()
            },
        )
        for file in counts
    }
    files = tuple(old.get(file.name, file) for file in checkpoint.manifest.files)
    (checkpoint.folder / MANIFEST).write_text(replace(checkpoint.manifest, files=files).as_json())
    again = emulate_job(resumed(make_job(case, tmp_path), saved_at(job, 4)))
    assert same_bits(again.weights, whole.weights)


def test_one_group_keeps_the_flat_master(tmp_path: Path) -> None:
    case = replace(PLANS["sync 1-1"], optimizer={"groups": [f"*:lr={_LR}"]})
    assert same_bits(emulate(case, tmp_path).weights, emulate(replace(case, optimizer={}), tmp_path).weights)
    one, two = (
        Emulation(make_job(replace(case, optimizer={"groups": [group], "predict": True}), tmp_path), lambda event: None)
        for group in ("*:lr=0.5", "head.*:lr=0.5")
    )
    for emulation, is_flat in ((one, True), (two, False)):
        (replica,) = emulation.workers[0].replicas.values()
        assert torch.equal(replica.ring.master, replica.optimizer.master)
        sizes = [len(p) for p in seen_by(replica.optimizer)]
        assert (sizes == [1]) is is_flat


def seen_by(optimizer: Any) -> list[list[torch.Tensor]]:
    """The tensors of each of torch's groups, as the rates see them."""
    seen: list[list[torch.Tensor]] = []

    class Watching:
        def apply(self, update: int, groups: Any) -> None:
            seen.extend(group["params"] for group in groups)

    optimizer.rates = Watching()
    optimizer.extrapolate(torch.empty_like(optimizer.master), 0, 1)
    return seen


def test_the_schedule_multiplies_the_rate_of_every_group_alike() -> None:
    schedules = {
        "constant": ScheduleConfig(warmup=3),
        "step": ScheduleConfig(kind="step", steps="3,7", warmup=2),
        "poly": ScheduleConfig(kind="poly", final=0.01),
        "cosine": ScheduleConfig(kind="cosine", final=0.01, warmup=2),
        "one-cycle": ScheduleConfig(kind="one-cycle"),
    }
    for schedule in schedules.values():
        groups: list[dict[str, Any]] = [{"lr": lr} for lr in (0.1, 0.1, 0.4, 0.0)]
        rates = ScheduledRates(OptimizerConfig(lr=0.1).lr, schedule, 10)
        for update in range(10):
            rates.apply(update, groups)
            base = groups[0]["lr"]
            assert groups[1]["lr"] == base and groups[3]["lr"] == 0.0
            assert groups[2]["lr"] == pytest.approx(4 * base, rel=1e-14)


def test_a_base_rate_of_zero_trains_one_group_alone(tmp_path: Path) -> None:
    case = replace(PLANS["sync 1-1"], optimizer={"lr": 0.0, "groups": ["head.*:lr=0.1"]})
    job = make_job(case, tmp_path)
    before = Emulation(job, lambda event: None).weights()
    after = emulate(case, tmp_path).weights
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"head.weight", "head.bias"}
