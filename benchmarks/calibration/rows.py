"""Measured rows: training rates that people published, as a TOML file of `[[row]]` tables, and their split by source.

`read_rows` reads any file of such rows, `known_rows` those of the catalog. `split_by_source` divides rows into a half
to fit and a half to evaluate, so that no source is in both: rows of one source share a machine, a version and an
author.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from typing import Any, get_type_hints

from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.hardware.rows import Row

SPLITS = 5
_KINDS: Mapping[str, Any] = get_type_hints(Row)
_NEEDED = [field.name for field in fields(Row) if field.default is MISSING]


def split_by_source(rows: Sequence[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """The rows to fit and the rows to evaluate: half of the sources each, drawn by a seed."""
    sources = sorted({row.source for row in rows})
    random.Random(seed).shuffle(sources)
    fitted = set(sources[: len(sources) // 2])
    return [row for row in rows if row.source in fitted], [row for row in rows if row.source not in fitted]


@cache
def known_rows() -> tuple[Row, ...]:
    """The rows of the catalog."""
    text = resources.files("benchmarks.calibration").joinpath("measured.toml").read_text()
    return _rows(tomllib.loads(text), "measured.toml")


def read_rows(path: str) -> tuple[Row, ...]:
    """The rows of a file."""
    try:
        content = tomllib.loads(read_text(path))
    except OSError as error:
        raise UserError(f"rows {path}: {error.strerror}; give a TOML file of [[row]] tables") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"rows {path}: not TOML: {error}") from error
    return _rows(content, path)


def _rows(content: Mapping[str, Any], where: str) -> tuple[Row, ...]:
    entries = content.get("row")
    if not isinstance(entries, list) or not entries:
        raise UserError(f"rows {where}: no [[row]] table; each needs {', '.join(_NEEDED)}")
    return tuple(_row(entry, f"rows {where}: row {number}") for number, entry in enumerate(entries, 1))


def _row(entry: Any, where: str) -> Row:
    if not isinstance(entry, Mapping):
        raise UserError(f"{where} is not a table; write [[row]]")
    if missing := [name for name in _NEEDED if name not in entry]:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    values = {name: entry[name] for name in _KINDS if name in entry}
    for name, value in values.items():
        kind = _KINDS[name] | int if _KINDS[name] not in (str, bool) else _KINDS[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{where}: {name} is {str(value)[:40]!r}, which is not what a row has there")
    for name in ("gpus", "nodes", "batch_per_gpu", "images_per_second"):
        if name in values and not 0 < values[name] < 1e12:
            raise UserError(f"{where}: {name} is {values[name]}; it must be above 0")
    if values["gpus"] > 65536 or values["gpus"] % values.get("nodes", 1):
        raise UserError(
            f"{where}: {values['gpus']} gpus on {values.get('nodes', 1)} nodes; give at most 65536, as many on each"
        )
    return Row(**values)
