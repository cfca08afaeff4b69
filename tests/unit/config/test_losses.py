"""The register of losses: an entry has its function, its row in the documentation, and options that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagewright
from stagewright.config.losses import LOSS_OPTIONS, LOSSES
from stagewright.config.sections import options
from stagewright.model import loss

MODELS = Path(stagewright.__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_function_and_its_row(name: str) -> None:
    assert callable(getattr(loss, LOSSES[name].computed_by))
    assert f"`{name}`" in MODELS.read_text()


def test_options_of_losses_are_options_of_a_run() -> None:
    assert LOSS_OPTIONS.keys() <= {option.flag for option in options()}
