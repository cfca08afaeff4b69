"""The catalog's models are made by name, run on their samples, and give logits."""

import warnings

import pytest
import torch

from stagewright.bench.models.catalog import CLASSES, ENTRIES, Entry
from stagewright.bench.models.plain import Task
from stagewright.bench.models.run import find_cut
from stagewright.model.cut import Way
from stagewright.model.load import build_model

QUICK = [entry for entry in ENTRIES if entry.is_quick]


def test_names_are_unique_identifiers() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names)


def test_holds_enough_families_of_every_library() -> None:
    def families(*libraries: str) -> set[str]:
        return {entry.family for entry in ENTRIES if entry.library in libraries}

    assert len(families("torchvision", "timm")) >= 25
    assert len(families("transformers")) >= 8
    assert {"transformer_encoder", "lstm", "gru", "stacked_lstm", "stacked_gru", "unet", "vq"} <= families("")
    assert 12 <= len(QUICK) <= 18


@pytest.mark.parametrize("entry", QUICK, ids=lambda entry: entry.name)
def test_a_model_runs_on_its_samples_and_gives_logits(entry: Entry) -> None:
    if not entry.is_installed:
        pytest.skip(f"{entry.library} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        model = build_model(f"stagewright.bench.models.catalog:{entry.name}", seed=0, classes=CLASSES)
        inputs = entry.example(3, torch.Generator().manual_seed(1))
        assert inputs.is_floating_point() is (entry.tokens == 0)
        logits = model(inputs)
        logits[:, 0].sum().backward()
    assert logits.shape == (3, CLASSES)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(Exception, match="no callable 'torchvision_resnet19'"):
        build_model("stagewright.bench.models.catalog:torchvision_resnet19", seed=0)


@pytest.mark.parametrize("entry", QUICK, ids=lambda entry: entry.name)
def test_a_model_is_cut_into_four_stages_and_proven(entry: Entry) -> None:
    if not entry.is_installed:
        pytest.skip(f"{entry.library} is not installed")
    inputs, labels = entry.example(4, torch.Generator().manual_seed(1)), torch.zeros(4, dtype=torch.int64)
    name = f"stagewright.bench.models.catalog:{entry.name}"
    chain, cut = find_cut(Task(name, entry.factory, inputs, labels), 4)
    assert len(cut.units) == 3 and chain.way is not Way.WHOLE
