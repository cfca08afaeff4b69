"""Golden files: the structure and the numbers of pages, as text that a person has read.

`python -m tests.golden` writes them anew; read the difference before it is committed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from stagewright.metrics import Timeline
from stagewright.report.numbers import table_of
from stagewright.report.page import Page, Pipeline, Point

FOLDER = Path(__file__).parent / "golden"
WRITES = "STAGEWRIGHT_WRITES_GOLDEN"


def check(name: str, page: Page) -> None:
    """Compare a page with its golden file."""
    file, text = FOLDER / f"{name}.txt", "\n".join(outline(page)) + "\n"
    if os.environ.get(WRITES):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"the page is not tests/golden/{name}.txt: python -m tests.golden writes it anew"


def outline(page: Page) -> Iterator[str]:
    """Everything that a page shows: each field of each block, and the table of a timeline."""
    yield f"# {page.title}"
    for block in page.blocks:
        yield from ("", f"## {type(block).__name__} {getattr(block, 'title', '')}")
        for name, value in _given(block):
            if name in ("rows", "lines") or (isinstance(value, tuple) and is_dataclass(value[0])):
                yield from map(_line, value)
            elif name != "title":
                yield f"{name}: {_shown(value)}"
        if isinstance(block, Pipeline):
            yield from map(_line, table_of(block).rows)


def _given(found: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a value that are not the default."""
    for field in fields(found):
        if (value := getattr(found, field.name)) != field.default:
            yield field.name, value


def _line(value: Any) -> str:
    if not is_dataclass(value):
        return _shown(value)
    return "  ".join(f"{name}: {_shown(found)}" for name, found in _given(value))


def _shown(value: Any) -> str:
    match value:
        case Timeline():
            return f"{len(value.spans)} bars to {value.end:.4g} s"
        case (Point(), *_):
            heights = [point.y for point in value]
            ends = " ".join(f"({point.x:.4g}, {point.y:.4g})" for point in (*value[:2], value[-1]))
            return f"{len(value)} points {ends}, {min(heights):.4g} to {max(heights):.4g}"
        case tuple():
            return " | ".join(map(_shown, value))
        case float():
            return f"{value:.4g}"
    return str(value)


if __name__ == "__main__":
    os.environ[WRITES] = "1"
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "golden", "tests/unit/report", "tests/unit/run"]))
