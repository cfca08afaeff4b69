"""`stagewright.plan`, `simulate`, `profile` and `inspect`: what the commands do, as functions, also of objects."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import stagewright
from stagewright import objects
from stagewright.plan import cost
from tests.commands import prints

VECTORS = TensorDataset(torch.randn(8, 12), torch.zeros(8, dtype=torch.int64))
CLUSTER: dict[str, Any] = {"cluster": "rtx-2080ti-4", "batch": 64}


def perceptron() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(12, 12), nn.ReLU())), nn.Linear(12, 2))


def test_plan_searches_for_an_object_that_takes_other_samples_than_images() -> None:
    before = objects.given().keys()
    choice = stagewright.plan(perceptron(), data=VECTORS, **CLUSTER, microbatches=8, mode="sync")
    assert {candidate.plan.mode for candidate in choice.candidates} <= {"sync", "dp"}
    assert choice.best.plan.batch == 64 and objects.given().keys() == before
    assert repr(choice).startswith("Choice(") and "images/s" in repr(choice) and len(repr(choice)) < 200


def test_plan_has_the_plan_that_train_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Of this model and batch a search with lag shows no plan without but data parallel."""
    choice = stagewright.plan("vgg16", cluster="titan-v-8", devices=4, batch=128)
    assert choice.without_lag is not None and choice.without_lag.plan.mode == "sync"


def test_simulate_predicts_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = stagewright.simulate("resnet8", **CLUSTER, placement="0:0-2.0:3", precision="fp16")
    words = ["--cluster", "rtx-2080ti-4", "--batch", "64", "--placement", "0:0-2.0:3", "--precision", "fp16"]
    printed = json.loads(prints(capsys, "simulate", "resnet8", *words, "--json"))
    assert found.images_per_second == printed["images_per_second"] and found.plan.describe() == printed["plan"]
    assert "stale 3-1" in repr(found) and len(repr(found)) < 200
    again = stagewright.simulate("resnet8", cluster="rtx-2080ti-4", plan=found.plan, precision="fp16")
    assert again.images_per_second == found.images_per_second


def test_two_objects_of_one_name_are_traced_each() -> None:
    small, large = (nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 2)) for width in (8, 4000))
    rates = [stagewright.simulate(net, data=VECTORS, **CLUSTER).images_per_second for net in (small, large)]
    assert rates[0] > 1.01 * rates[1]


def test_profile_measures_an_object_on_samples_of_its_data(tmp_path: Path) -> None:
    measured = stagewright.profile(perceptron(), data=VECTORS, samples="2,4")
    assert measured.input == (12,) and measured.covered("fp32") == (2, 4) and len(measured.tables[0].units) == 7
    assert "fp32 4" in repr(measured) and len(repr(measured)) < 200
    found = stagewright.simulate(perceptron(), data=VECTORS, profile=measured, cluster="rtx-2080ti-4", batch=8)
    assert found.images_per_second > 0
    with pytest.raises(stagewright.UserError, match="one input of float32 or int64"):
        stagewright.profile(perceptron(), data=[(torch.ones(12), torch.ones(12), 0)])


def test_inspect_proves_a_cut_of_an_object() -> None:
    found = stagewright.inspect(perceptron(), data=VECTORS, stages=2)
    assert found.proof is not None and len(found.cuts) == 1 and list(found.inputs.values()) == [(12,)]
    assert "7 units" in repr(found) and "proven before" in repr(found) and len(repr(found)) < 200


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stagewright.plan("vgg16", bacth=3), "stagewright.plan has no option 'bacth'; did you mean 'batch'"),
        (lambda: stagewright.plan("vgg16", batch="3", cluster="titan-v-8"), "batch is '3', of type str; give int"),
        (lambda: stagewright.plan("vgg16", mode="stael"), "mode is 'stael'; did you mean 'stale'"),
        (lambda: stagewright.plan("vgg16", batch=0), "--batch is 0"),
        (lambda: stagewright.simulate("vgg16", devices=4, batch=8, profile="f"), "--devices 4 changes nothing"),
        (lambda: stagewright.simulate("vgg16", batch=8), "no cluster"),
        (lambda: stagewright.profile(VECTORS), "model is of type TensorDataset"),
        (lambda: stagewright.inspect("resnet8", stages=1.5), "stages is 1.5, of type float; give int"),
    ],
)
def test_what_is_wrong_is_one_line(call: Any, said: str) -> None:
    with pytest.raises(stagewright.UserError) as error:
        call()
    assert said in str(error.value) and "\n" not in str(error.value)


def test_functions_and_folders_of_one_name_both_work() -> None:
    """Importing a folder makes it an attribute of its package, which is to keep the function."""
    assert isinstance(cost, ModuleType) and isinstance(sys.modules["stagewright.plan"], ModuleType)
    assert isinstance(stagewright.plan, FunctionType) and isinstance(stagewright.profile, FunctionType)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        stagewright.trian  # type: ignore[attr-defined]  # noqa: B018
