"""The register of modes: the documentation names each."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagewright
from stagewright.config.modes import PRESETS, Mode

DOCS = Path(stagewright.__file__).parents[2] / "docs"


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_has_its_preset_and_its_words(mode: Mode) -> None:
    assert mode in PRESETS
    _, _, rule = (DOCS / "design.md").read_text().partition("Modes are presets:")
    assert f"`{mode}`" in rule.split("`--predict`")[0], f"K of {mode}: docs/design.md, rule 4"


def test_the_documentation_has_all_choices() -> None:
    assert f"`--mode {' | '.join(Mode)}`" in (DOCS / "training.md").read_text(), "docs/training.md"
