"""Every kind of data is whole: a function opens it, its options exist, and errors, help and docs name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.config.rules import check_rules
from stagewright.config.sections import options
from stagewright.config.sources import KINDS, SourceOptions, find_kind, names_images
from stagewright.errors import UserError
from stagewright.objects import load_callable

DOCS = Path(__file__).parents[3] / "docs/data.md"
OPTIONS = {option.flag: option for option in options()}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_data_has_both_halves(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    assert callable(load_callable(f"stagewright.data.{kind.opened_by}", "data"))
    assert any(line.startswith(f"| `{kind.shown}") for line in DOCS.read_text().splitlines()), "a row in docs/data.md"
    assert kind.shown in OPTIONS["--data"].help
    for flag in kind.options:
        value = OPTIONS[flag].default
        check_rules({"--data": f"{name}:x", flag: value}, [flag])
    if kind.is_path:
        with pytest.raises(UserError, match=str(tmp_path)):
            load_callable(f"stagewright.data.{kind.opened_by}", "data")(f"{name}:{tmp_path}/none", SourceOptions())


def test_the_documentation_has_the_kinds_that_know_their_classes() -> None:
    known = ", ".join(f"`{name}:`" for name, kind in KINDS.items() if kind.knows_classes)
    assert f"what the data has ({known})" in DOCS.with_name("training.md").read_text(), (
        "`--classes` in docs/training.md"
    )


@pytest.mark.parametrize("text", ["", "x", "x:y", "folder", "folder:", "synthetic:x", "python:module"])
def test_any_other_text_is_an_error_that_lists_all(text: str) -> None:
    with pytest.raises(UserError, match=r"is not one of synthetic, folder:DIR, .*, python:MODULE:DATASET$"):
        find_kind(text)
    assert names_images(text) == text.startswith("folder")
