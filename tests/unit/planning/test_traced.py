"""The shapes that come with the package are those that tracing finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagewright.errors import UserError
from stagewright.model.networks.zoo import ZOO
from stagewright.planning import known, traced
from stagewright.planning.known import known_model, shipped
from stagewright.planning.traced import trace_anew, trace_model

SOME = ("alexnet", "vgg-small", "resnet50", "mobilenet_v2", "vit_tiny_16", "gpt-micro", "bert-mini")
MODELS = tuple(ZOO) if os.environ.get("STAGEWRIGHT_NIGHTLY") else SOME


@pytest.mark.parametrize("name", MODELS)
def test_shipped_shapes_are_the_traced_ones(name: str) -> None:
    """Where this fails, run `python -m tests.make_shapes`."""
    assert shipped()[name] == trace_anew(name).as_text()


def test_a_zoo_model_is_not_traced_but_with_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(chain: object) -> None:
        raise RuntimeError("traced")

    monkeypatch.setattr(traced, "trace_shapes", refuse)
    assert len(trace_model("vgg11").shapes) == 30
    with pytest.raises(UserError, match="RuntimeError: traced"):
        trace_model("vgg11", classes=7)


def test_shapes_of_another_torch_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped.cache_clear()
    monkeypatch.setattr(known, "version", lambda package: "1.0.0")
    assert shipped() == {}
    shipped.cache_clear()


@pytest.mark.parametrize("name", ["gpt-micro", "bert-mini", "resnet8"])
def test_a_known_model_ties_what_its_chain_does(name: str) -> None:
    known_one, traced_one = known_model(name), trace_anew(name)
    assert known_one is not None
    units = [shape.name for shape in known_one.shapes]
    for cuts in ([], units[1:2], units[-1:], [units[1], units[-1]], units[1:]):
        assert known_one.tied(cuts) == traced_one.tied(cuts)
    assert bool(known_one.tied(units[1:])) == name.startswith("gpt")


def test_a_zoo_model_with_other_classes_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_model("resnet8", 7) is None
    found = trace_anew("resnet8", 7)
    known.keep(found, "resnet8", 7, None)
    kept = known_model("resnet8", 7)
    assert kept is not None and kept.shapes == found.shapes and kept.rate == "images/s"
