"""The shapes that come with the package are those that tracing finds."""

from __future__ import annotations

import os

import pytest

from stagewright.errors import UserError
from stagewright.model.chain import Chain
from stagewright.model.networks.zoo import ZOO
from stagewright.planning import traced
from stagewright.planning.traced import form_of, meta_model, shapes_text, shipped_shapes, trace_model
from stagewright.profile.shapes import meta_example, trace_shapes

SOME = ("alexnet", "vgg-small", "resnet50", "mobilenet_v2", "vit_tiny_16", "gpt-micro", "bert-mini")
MODELS = tuple(ZOO) if os.environ.get("STAGEWRIGHT_NIGHTLY") else SOME


@pytest.mark.parametrize("name", MODELS)
def test_shipped_shapes_are_the_traced_ones(name: str) -> None:
    """Where this fails, run `python -m tests.make_shapes`."""
    found = trace_shapes(Chain(meta_model(name), meta_example(form_of(name))))
    assert shipped_shapes()[name] == shapes_text(found)


def test_a_zoo_model_is_not_traced_but_with_other_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(chain: Chain) -> None:
        raise RuntimeError("traced")

    monkeypatch.setattr(traced, "trace_shapes", refuse)
    assert len(trace_model("vgg11").shapes) == 30
    with pytest.raises(UserError, match="RuntimeError: traced"):
        trace_model("vgg11", classes=7)


def test_shapes_of_another_torch_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped_shapes.cache_clear()
    monkeypatch.setattr(traced, "version", lambda package: "1.0.0")
    assert shipped_shapes() == {}
    shipped_shapes.cache_clear()
