"""`bench/models/plain.py` agrees with the independent reference, and every trait can be trained by it."""

import math
import warnings

import pytest
import torch
from torch import nn

from benchmarks.models import plain
from benchmarks.models.plain import Cut
from stagewright.errors import UserError
from stagewright.model.load import build_model
from tests import models, reference
from tests.tasks import TASKS, Task
from tests.traits import TRAITS, Expected, Trait

_TASKS = ("language", "segmentation", "own_loss", "tied")


@pytest.mark.parametrize("model", ["plain", "normed", "dropping", "residual", "unused", "frozen_first"])
@pytest.mark.parametrize(("placement", "mode"), [("0:0.0:1", "sync"), ("0:0-1.0:2", "stale"), ("0:0.0:1-2", "stale")])
def test_equals_the_reference(model: str, placement: str, mode: str) -> None:
    inputs, labels = models.make_data(model, 20)
    factory = getattr(models, model)
    task = plain.Task("", factory, inputs, labels, placement=placement, mode=mode, steps=4, weight_decay=0.01)
    children = [name for name, _ in factory().named_children()]

    def stage_of(name: str) -> int:
        return int(children.index(name.partition(".")[0]) >= children.index("third"))

    setup = reference.Setup(
        task.replicas,
        task.versions,
        task.batch,
        task.microbatches,
        task.steps,
        task.seed,
        task.dtype,
        weight_decay=task.weight_decay,
        lr=lambda batch: task.lr,
    )
    expected = reference.train(factory, inputs, labels, stage_of, [children[0], "third"], setup)
    actual = plain.train(task, Cut(("third",), ("third",)))
    assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
    state = expected.weights | expected.buffers
    assert actual.state.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(actual.state[name], tensor, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("task", [task for task in TASKS if task.name in _TASKS], ids=str)
@pytest.mark.parametrize(("placement", "mode"), [("0:0.0:1", "sync"), ("0:0-1.0:2", "stale")])
def test_equals_the_reference_with_several_inputs_counts_and_ties(task: Task, placement: str, mode: str) -> None:
    parameters = task.names or ("",)
    plainly = plain.Task(
        "",
        task.model,
        task.data(),
        placement=placement,
        mode=mode,
        batch=12,
        steps=4,
        takes=dict(zip(parameters, task.inputs, strict=True)),
        objective=task.loss,
    )
    at = task.cut[1]
    names = [name for name, _ in task.model().named_modules()]

    def stage_of(name: str) -> int:
        return int(names.index(name.rpartition(".")[0]) >= names.index(at))

    lag = (2, 2) if task.tie and mode == "stale" else plainly.versions
    setup = reference.Setup(
        plainly.replicas,
        lag,
        plainly.batch,
        plainly.microbatches,
        plainly.steps,
        plainly.seed,
        ties=((task.tie, (0, 1)),) if task.tie else (),
        inputs=task.inputs,
        names=task.names,
        loss=task.loss,
        lr=lambda batch: plainly.lr,
    )
    starts = [next(name for name, _ in task.model().named_children()), at]
    expected = reference.train(task.model, task.data(), None, stage_of, starts, setup)
    actual = plain.train(plainly, Cut((at,), (at,)))
    assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in (expected.weights | expected.buffers).items():
        torch.testing.assert_close(actual.state[name], tensor, rtol=1e-11, atol=1e-12)


def test_finds_the_stage_of_every_tensor() -> None:
    model = models.normed()
    cuts = ("second", "third")
    images = models.make_data("normed", 2)[0]
    homes = plain.uses(model, lambda model: model(images), Cut(cuts, cuts))
    stages = {name.partition(".")[0]: stage for name, stage in homes.tensors.items()}
    assert stages == {"first": 0, "second": 1, "third": 2, "head": 2}
    assert homes.tensors["second.1.running_mean"] == 1 and homes.modules["third.0"] == 2


def test_cuts_near_equal_counts_at_modules() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    units = ("0", "add", "1", "add_1", "2", "add_2", "3", "add_3")
    assert plain.even_cut(model, units, 4) == Cut(("1", "2", "3"), ("1", "2", "3"))
    assert plain.even_cut(model, ("0", "add", "mul"), 3) == Cut(("add", "mul"), (None, None))


@pytest.mark.parametrize("trait", TRAITS.values(), ids=lambda trait: trait.name.replace(" ", "_"))
def test_a_trait_trains_by_itself(trait: Trait) -> None:
    inputs, labels = trait.data(8)
    task = plain.Task(
        trait.model,
        trait.factory,
        inputs,
        labels,
        placement="0:0",
        steps=2,
        precision=trait.precision,
        weight_decay=trait.weight_decay,
        evaluates=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated functions that authors still use
        outcome = plain.train(task)
        try:
            assert isinstance(build_model(trait.model, seed=0), nn.Module)
        except UserError:
            assert trait.expected is Expected.EQUAL_OR_REFUSED
    assert outcome.losses[0] != outcome.losses[1] and all(map(math.isfinite, outcome.losses))
    assert outcome.score is not None and math.isfinite(outcome.score)
    assert len(outcome.unmoved) < len(outcome.state)


def test_most_traits_must_be_equal() -> None:
    assert len(TRAITS) > 150
    assert sum(trait.expected is Expected.EQUAL for trait in TRAITS.values()) > len(TRAITS) / 2


def test_names_no_trait_that_is_not_there() -> None:
    with pytest.raises(UserError, match="Reverzed"):
        build_model("tests.traits.backward:Reverzed", seed=0)
