"""The catalog's models are made by name, run on their samples, and train as plain PyTorch trains them."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from benchmarks.models.catalog import ENTRIES, Entry
from benchmarks.models.configured import CLASSES, texts
from benchmarks.models.plain import Cut
from benchmarks.models.run import BAR, build, compare, cut_for, example_of, find_cut, options_of, task_of
from stagewright.config.toml import FIXED, make_config
from stagewright.model.chain import Chain, Way
from stagewright.model.load import build_model
from stagewright.model.networks.libraries import is_installed
from stagewright.run.defaults import resolve_model
from tests.marks import nightly

QUICK = [entry for entry in ENTRIES if entry.is_quick]


def test_names_are_unique_identifiers() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)


def test_holds_enough_families_of_every_library() -> None:
    def families(*libraries: str) -> set[str]:
        return {entry.family for entry in ENTRIES if entry.library in libraries}

    assert len(families("torchvision", "timm")) >= 25
    assert len(families("transformers")) >= 12 and families("peft")
    assert {"transformer_encoder", "lstm", "gru", "stacked_lstm", "stacked_gru", "unet", "vq"} <= families("")
    assert 12 <= len(QUICK) <= 18


@pytest.mark.parametrize("entry", QUICK, ids=lambda entry: entry.name)
def test_a_model_runs_on_its_samples_and_has_a_loss(entry: Entry) -> None:
    if not entry.is_installed:
        pytest.skip(f"{entry.library} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        model = build_model(f"benchmarks.models.catalog:{entry.name}", seed=0, classes=CLASSES)
        task = task_of(entry, 3)
        outputs = example_of(replace(task, precision="fp32")).call(model)
        loss = entry.objective(outputs, task.data)
        total = loss[0] if isinstance(loss, tuple) else loss
        total.backward()
    if not entry.takes:
        assert outputs.shape == (3, CLASSES)
    assert total.shape == () and total > 0
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(Exception, match="no 'torchvision_resnet19'"):
        build_model("benchmarks.models.catalog:torchvision_resnet19", seed=0)


@pytest.mark.parametrize("entry", QUICK, ids=lambda entry: entry.name)
def test_a_model_is_cut_into_four_stages_and_proven(entry: Entry) -> None:
    if not entry.is_installed:
        pytest.skip(f"{entry.library} is not installed")
    chain, cut = find_cut(task_of(entry, 4), 4)
    assert len(cut.units) == 3 and chain.way is not Way.WHOLE


@nightly
@pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed")
def test_a_tied_model_with_masks_and_a_cache_trains_with_lag_as_plain_pytorch_does(tmp_path: Path) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.name == "transformers_gpt2")
    task = replace(task_of(entry, 8), steps=2, placement="0:0-1.0:2", mode="stale")
    chain = Chain(build(task), example_of(task))
    assert compare(task, cut_for(chain, 2), tmp_path) <= BAR
    assert any(not mask.all() for mask in task.data["attention_mask"].split(2))


def test_models_have_the_same_classes_whatever_labels_the_data_has(tmp_path: Path) -> None:
    task = task_of(next(entry for entry in QUICK if not entry.takes), 4)
    task = replace(task, inputs=task.data | {"labels": task.data["labels"] % 3})
    assert resolve_model(make_config(FIXED, options_of(task, Cut(), tmp_path), given=())).model.classes == CLASSES


def test_a_field_may_be_given_to_two_parameters() -> None:
    entry = Entry("one", "one", "", nn.Identity, inputs="input_ids,labels=input_ids", samples=texts)
    assert entry.takes == {"input_ids": "input_ids", "labels": "input_ids"}
    assert example_of(task_of(entry, 2)).names == ("input_ids", "labels")
