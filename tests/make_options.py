"""Writes api/options.pyi: the options of commands as typed keywords, which editors complete and type checkers know.

Run it after a change of an option: `python -m tests.make_options`. A test compares.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from stagewright.api.options import OWN, hint, options_of

FILE = Path(__file__).parents[1] / "src/stagewright/api/options.pyi"
_HEAD = '''"""The options of each function as typed keywords. Written by tests/make_options.py: not to be edited."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from stagewright.config.sections import Option

OWN: dict[str, str]

def options_of(command: str) -> dict[str, Option]: ...
def hint(option: Option) -> str: ...
'''


def text() -> str:
    """The whole file."""
    return _HEAD + "".join(map(_table, OWN))


def _table(command: str) -> str:
    lines = ["", f"class {command.title()}Options(TypedDict, total=False):"]
    lines.append(f'    """Those of `stagewright {command}`, as keywords of `stagewright.{command}`."""')
    for option in options_of(command).values():
        is_shown = option.default not in (None, ()) and "(default:" not in option.help
        default = f" (default: {option.default!r})" if is_shown else ""
        about = textwrap.wrap(f'"""{option.help}{default}"""', 110)
        lines += ["", f"    {option.keyword}: {hint(option)}", *(f"    {line}" for line in about)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
