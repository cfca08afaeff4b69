"""A user's optimizer: split over stages it trains as on the whole model, and its state follows parameter names."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stagewright.config.sections import OptimizerConfig, ScheduleConfig
from stagewright.errors import UserError
from stagewright.events import Record, Step
from stagewright.runtime.checkpoint.format import CheckpointError
from stagewright.runtime.stage.optimizer import ScheduledRates, Weights, make_optimizer, require_factory
from stagewright.runtime.stage.own_optimizer import Factory, compare_factory
from stagewright.runtime.stage.versions import VersionRing
from tests import models
from tests.keeping import emulate_job, keeping, resumed, same_bits, saved_at
from tests.marks import IS_NIGHTLY
from tests.parity import Case, assert_near, build, emulate, make_data, make_job, refer

_TOLERANCE = 1e-12
_LR = 0.02
_BASE = 0.05  # the rate of a case
_STEPS = 5


class Counting(torch.optim.Optimizer):
    """Moves against the sign of a mean gradient; keeps tensors, a number, nothing, and a count of its group."""

    def __init__(self, params: Any, lr: float = _LR) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.8, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(
                        mean=torch.zeros_like(parameter), rows=torch.zeros(len(parameter)), count=0, spare=None
                    )
                state["count"] += 1
                state["rows"] += parameter.grad.reshape(len(parameter), -1).float().sum(1)
                state["mean"].mul_(group["beta"]).add_(parameter.grad)
                parameter.sub_(state["mean"].tanh(), alpha=group["lr"] / (state["count"] + group["steps"]))


def by_name(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """AdamW with groups by name; it leaves the biases of `first` out."""
    named = [(name, tensor) for name, tensor in named_parameters if name != "first.bias"]
    heads = [tensor for name, tensor in named if name.startswith("head")]
    others = [tensor for name, tensor in named if not name.startswith("head")]
    groups = [{"params": heads, "lr": 0.03, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, weight_decay=0.0)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.005, momentum=0.5, centered=True)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=_LR, lr_decay=0.1)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=_LR)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=_BASE, momentum=0.9, nesterov=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=_BASE, weight_decay=0.0)


def by_prefix(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """SGD in which `embed` moves otherwise than `head`, whose weight it has."""
    named = [(name, tensor) for name, tensor in named_parameters]
    lrs = {"embed": 0.3, "head": 0.01}
    return torch.optim.SGD([{"params": [t], "lr": lrs.get(name.partition(".")[0], 0.1)} for name, t in named])


FACTORIES: list[Factory] = [rmsprop, adagrad, nadam, by_name, Counting]


def given(case: Case, factory: Factory, **options: Any) -> Case:
    """The case with a user's optimizer."""
    return replace(case, optimizer={"name": f"{__name__}:{factory.__name__}", **options})  # type: ignore[attr-defined]


def plain(case: Case, factory: Factory, steps: int) -> Mapping[str, Tensor]:
    """Gradient accumulation on the whole model, with the schedule of the case on every group."""
    torch.manual_seed(case.seed)
    model = build(case.model).double().train()
    takes_names = factory in (by_name, by_prefix)
    optimizer = factory(list(model.named_parameters() if takes_names else model.parameters()))
    initial = [group["lr"] for group in optimizer.param_groups]
    images, labels = make_data(case)
    images = images.double() if images.is_floating_point() else images
    for batch in range(steps):
        first = batch % (case.samples // case.batch) * case.batch
        optimizer.zero_grad()
        for piece in torch.arange(first, first + case.batch).chunk(case.microbatches):
            (cross_entropy(model(images[piece]), labels[piece]) / case.microbatches).backward()
        for group, lr in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = lr * case.lr(batch) / _BASE
        optimizer.step()
    return model.state_dict()


PLANS = {
    "sync 1-1": Case(placement="0:0.0:1", cut="third", steps=_STEPS),
    "sync 2-1": Case(placement="0:0-1.0:2", cut="second", steps=_STEPS),
    "dp 3": Case(placement="0:0-2", mode="dp", steps=_STEPS),
}


@pytest.mark.parametrize(
    ("factory", "plan"),
    [*((factory, "sync 1-1") for factory in FACTORIES), (by_name, "sync 2-1"), (Counting, "dp 3")],
)
def test_trains_as_the_plain_optimizer_of_the_whole_model(factory: Factory, plan: str, tmp_path: Path) -> None:
    case = given(PLANS[plan], factory)
    assert_near(emulate(case, tmp_path).weights, plain(case, factory, case.steps), _TOLERANCE)


def test_a_tied_parameter_has_its_first_name_in_every_home(tmp_path: Path) -> None:
    case = given(Case("language", "0:0-1.0:2", "head", steps=_STEPS), by_prefix)
    run = emulate(case, tmp_path)
    assert run.job.plan.ties
    assert_near(run.weights, plain(case, by_prefix, case.steps), _TOLERANCE)


@pytest.mark.parametrize("factory", FACTORIES if IS_NIGHTLY else [nadam, Counting])
def test_state_follows_its_parameters_to_another_plan(factory: Factory, tmp_path: Path) -> None:
    case = given(PLANS["sync 2-1"], factory)
    whole = emulate(case, tmp_path)
    job = keeping(make_job(case, tmp_path), every=3, keep=0)
    emulate_job(job)
    again = emulate_job(resumed(make_job(case, tmp_path), saved_at(job, 3)))
    assert same_bits(again.weights, whole.weights)
    for other in (Case(placement="0:0.0:1.0:2", cut="second,head", steps=_STEPS), PLANS["dp 3"]):
        moved = emulate_job(make_job(given(other, factory), tmp_path, resume=str(saved_at(job, 3).folder)))
        assert_near(moved.weights, whole.weights, _TOLERANCE)


def test_a_checkpoint_has_the_state_by_class_key_and_name(tmp_path: Path) -> None:
    job = keeping(make_job(given(PLANS["sync 2-1"], Counting), tmp_path), every=5)
    emulate_job(job)
    checkpoint = saved_at(job, 5)
    kinds = {file.kind for file in checkpoint.manifest.files}
    assert kinds == {
        "master", "own/Counting/mean", "own/Counting/rows", "own-number/Counting/count", "own-number/Counting/spare",
        "own-group/Counting/steps",
    }  # fmt: skip
    rows, counts = checkpoint.read("own/Counting/rows"), checkpoint.read("own-number/Counting/count")
    assert rows.keys() == dict(build("plain").named_parameters()).keys()
    assert rows["head.weight"].shape == (7,) and rows["head.weight"].dtype == torch.float32
    assert {int(count) for count in counts.values()} == {5}
    assert {int(count) for count in checkpoint.read("own-group/Counting/steps").values()} == {5}


def test_state_has_the_type_of_the_weights_in_another_precision(tmp_path: Path) -> None:
    case = given(replace(PLANS["sync 1-1"], precision="fp32"), nadam)
    job = keeping(make_job(case, tmp_path), every=3, keep=0)
    emulate_job(job)
    again = emulate_job(make_job(replace(case, precision="fp64"), tmp_path, resume=str(saved_at(job, 3).folder)))
    (first, *_) = again.emulation.workers
    state = first.replicas[0].optimizer.named_state()
    assert {tensor.dtype for tensor in state["own/NAdam/exp_avg"].values()} == {torch.float64}
    assert_near(again.weights, plain(case, nadam, case.steps), 1e-4)


def test_another_class_or_none_starts_without_state(tmp_path: Path) -> None:
    job = keeping(make_job(given(PLANS["sync 1-1"], Counting), tmp_path), every=3, keep=0)
    emulate_job(job)
    for case in (given(PLANS["sync 1-1"], adagrad), PLANS["sync 1-1"]):
        emulate_job(resumed(make_job(case, tmp_path), saved_at(job, 3)))


def test_logs_have_the_rate_of_the_users_optimizer_and_all_groups_end_at_the_final_rate(tmp_path: Path) -> None:
    records: list[Record] = []
    case = given(PLANS["sync 1-1"], nadam)
    emulate_job(make_job(case, tmp_path), records)
    rates = [record.lr for record in records if isinstance(record, Step)]
    assert rates == pytest.approx([_LR * case.lr(batch) / _BASE for batch in range(case.steps)])
    groups: list[dict[str, Any]] = [{"lr": 0.4}, {"lr": 0.2}]
    ScheduledRates(None, ScheduleConfig(kind="cosine", final=0.1), 8).apply(8, groups)
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.1])


class WithoutParameters(nn.Module):
    """Its second stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 8 * 8, 7)
        self.second = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x.flatten(1)))
        return made


def test_a_stage_without_parameters_needs_no_optimizer(tmp_path: Path) -> None:
    case = given(Case(placement="0:0.0:1", cut="second", steps=3), nadam)
    with mock.patch.object(models, "plain", WithoutParameters):
        assert_near(emulate(case, tmp_path).weights, plain(case, nadam, 3), _TOLERANCE)


class Refusing(Counting):
    """Can't load what it saved."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("a state of another release")


def test_state_that_an_optimizer_refuses_is_one_line(tmp_path: Path) -> None:
    case = given(PLANS["sync 1-1"], Refusing)
    job = keeping(make_job(case, tmp_path), every=3, keep=0)
    emulate_job(job)
    with pytest.raises(CheckpointError, match=r"state that the optimizer can't take: .*another release"):
        emulate_job(resumed(make_job(case, tmp_path), saved_at(job, 3)))


# --- One replica's weights --------------------------------------------------------------------------------------------


def own(factory: Factory, model: nn.Module, **config: Any) -> tuple[Any, VersionRing]:
    ring = VersionRing([model], {name for name, _ in model.named_parameters()}, 1)
    weights = Weights(ring.master, tuple(ring.parameters))
    return make_optimizer(
        OptimizerConfig(**config), weights, ScheduledRates(1.0, ScheduleConfig(), 5), (), factory
    ), ring


def test_an_update_that_overflowed_or_did_not_reach_a_parameter_leaves_it_alone() -> None:
    optimizer, ring = own(partial(torch.optim.Adagrad, lr=0.1), nn.Linear(3, 2))
    before = ring.master.clone()
    optimizer.step(0, torch.full_like(before, torch.inf), torch.ones(()))
    assert torch.equal(ring.master, before) and not optimizer.named_state()["own/Adagrad/sum"]["weight"].any()
    optimizer.step(0, torch.ones_like(before), torch.zeros(()), [0])
    moved = {name: not torch.equal(view, ring.named(before)[name]) for name, view in ring.named(ring.master).items()}
    assert moved == {"weight": False, "bias": True}


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))


def test_shapes_strides_and_complex_numbers_are_the_authors() -> None:
    seen: list[Tensor] = []

    def factory(params: list[Tensor]) -> torch.optim.Optimizer:
        seen.extend(params)
        return torch.optim.RMSprop(params)

    optimizer, ring = own(factory, Turned())
    assert [p.is_complex() for p in seen] == [True, False] and seen[1].is_contiguous(memory_format=torch.channels_last)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in seen)
    optimizer.step(0, torch.randn_like(ring.master))
    saved = optimizer.named_state()
    assert saved["own/RMSprop/square_avg"]["weight"].shape == (3, 2, 2)
    other, _ = own(torch.optim.RMSprop, Turned())
    other.load_named_state(saved, lambda kind: saved[kind])
    again = other.named_state()
    assert again.keys() == saved.keys()
    for kind, tensors in saved.items():
        assert same_bits(again[kind], tensors)


@pytest.mark.parametrize("factory", [sgd, adamw])
def test_known_rules_are_extrapolated_as_ours_are(factory: Factory, tmp_path: Path) -> None:
    stale = Case(placement="0:0-1.0:2", cut="third", mode="stale", staleness=1, microbatches=3, steps=_STEPS)
    options = {"name": "sgd", "nesterov": True} if factory is sgd else {"name": "adamw"}
    run = emulate(given(stale, factory, predict=True), tmp_path)
    assert_near(run.weights, refer(replace(stale, optimizer={"predict": True, **options})).weights, _TOLERANCE)


@torch.no_grad()
def test_a_parameter_that_the_factory_leaves_out_is_copied() -> None:
    optimizer, ring = own(by_name, nn.Sequential(OrderedDict(first=nn.Linear(3, 2))), predict=True)
    optimizer.step(0, torch.ones_like(ring.master))
    target = torch.zeros_like(ring.master)
    optimizer.extrapolate(target, 1, 2)
    found, master = ring.named(target), ring.named(ring.master)
    assert torch.equal(found["first.bias"], master["first.bias"]) and master["first.bias"].any()
    assert not torch.equal(found["first.weight"], master["first.weight"])


# --- The proof --------------------------------------------------------------------------------------------------------


def parameters() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(build("plain").named_parameters())


def in_two() -> list[list[str]]:
    names = list(parameters())
    return [names[:3], names[3:]]


class AcrossParameters(torch.optim.SGD):
    """Divides by the norm of all gradients, as optimizers with a trust region do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.grad /= norm
        super().step()


class Barely(torch.optim.SGD):
    """Its rate depends on how many parameters it has, by a billionth."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = sum(len(group["params"]) for group in self.param_groups)
        for group in self.param_groups:
            group["lr"] = 1e-3 * (1 + 1e-9 * held)
        super().step()


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad += torch.randn_like(p.grad)
        super().step()


class Listing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["past"] = [1.0]


class Remembering(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group.setdefault("past", []).append(1.0)


@pytest.mark.parametrize("factory", FACTORIES)
def test_an_optimizer_that_treats_each_parameter_by_itself_is_proven(factory: Factory) -> None:
    before = parameters()
    generators = torch.get_rng_state(), random.getstate()
    compare_factory(factory, before, in_two())
    compare_factory(factory, before, [list(before), []])
    assert same_bits(parameters(), before) and all(p.grad is None for p in before.values()), "it works on copies"
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]


def test_a_tied_parameter_may_be_in_several_pieces() -> None:
    names = list(parameters())
    compare_factory(torch.optim.Adagrad, parameters(), [names[:4], [names[0], *names[4:]]])


FOREIGN = torch.zeros(5, requires_grad=True)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            AcrossParameters,
            r"moves 'first\.weight' by -?[\d.e-]+ with the whole model and by .* looks across parameters",
        ),
        (Barely, r"looks across parameters; use one stage or an optimizer that doesn't$"),
        (Noisy, "looks across parameters"),
        (Listing, "the optimizer Listing keeps a list as 'past'"),
        (Remembering, "the optimizer Remembering changes 'past' of its groups, a list"),
        (torch.optim.LBFGS, "LBFGS needs a closure in step"),
        (
            lambda params: torch.optim.SGD([*params, FOREIGN]),
            r"got 8 parameters from 'first\.weight' on, .* 1 other .*\[5\]",
        ),
        (lambda params: params, "returned a list; return a torch.optim.Optimizer"),
        (lambda params: torch.optim.SGD(params, lr=-1), "factory raised ValueError for 8 .*-1"),
        (
            lambda named_parameters: torch.optim.SGD([p for name, p in named_parameters if "head" in name]),
            r"raised ValueError for 3 parameters from 'first\.weight' on: .*empty",
        ),
    ],
)
def test_what_can_not_be_split_is_refused_in_one_line(factory: Factory, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compare_factory(factory, parameters(), in_two())
    assert "\n" not in str(caught.value)


def test_one_stage_takes_what_looks_across_parameters_but_no_random_numbers() -> None:
    for factory in (AcrossParameters, Barely):
        compare_factory(factory, parameters(), [list(parameters())])
    with pytest.raises(UserError, match="draws random numbers, and replicas would draw others"):
        compare_factory(Noisy, parameters(), [list(parameters())])


def test_prediction_needs_a_rule() -> None:
    for known in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        require_factory(OptimizerConfig(predict=True), known, parameters(), in_two())
    require_factory(OptimizerConfig(), torch.optim.NAdam, parameters(), in_two())
    for factory, message in (
        (torch.optim.NAdam, "--predict extrapolates .*AdamW and torch.optim.RMSprop, not the optimizer NAdam"),
        (partial(torch.optim.SGD, maximize=True), "--predict can't extrapolate SGD with maximize=True"),
        (partial(torch.optim.AdamW, amsgrad=True), "--predict can't extrapolate AdamW with amsgrad=True"),
    ):
        with pytest.raises(UserError, match=message):
            require_factory(OptimizerConfig(predict=True), factory, parameters(), in_two())
        with pytest.raises(UserError, match=message):
            own(factory, nn.Linear(3, 2), predict=True)
