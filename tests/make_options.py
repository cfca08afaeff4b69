"""Writes api/options.py: the options of commands as typed keywords, which editors complete and type checkers know.

Run it after a change of an option: `python -m tests.make_options`. A test compares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from stagewright.cli.command.options import Taken
from stagewright.cli.parser import COMMANDS

FILE = Path(__file__).parents[1] / "src/stagewright/api/options.py"
_HEAD = '''"""The options of each function as typed keywords. Written by tests/make_options.py: not to be edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict
'''
_PATHS = ("FILE", "DIR", "RUN", "NAME|FILE")  # metavars
# Options that a function takes by name, as objects too, or that only print or write what it returns.
_OWN = {
    "train": "model data val loss metric optimizer plan profile config set json explain",
    "plan": "data profile output report json lr momentum nesterov predict try minutes explain",
    "simulate": "data profile plan trace report json",
    "profile": "output json",
    "inspect": "data json",
}


def options_of(command: str) -> list[Taken]:
    """The options of a command that its function takes as keywords."""
    (found,) = [one for one in COMMANDS if one.name == command]
    return [option for option in found.takes if option.keyword not in _OWN[command].split()]


def text() -> str:
    """The whole file."""
    return _HEAD + "".join(_table(command, options_of(command)) for command in _OWN)


def _table(command: str, options: Iterable[Taken]) -> str:
    lines = ["", "", f"class {command.title()}Options(TypedDict, total=False):"]
    lines.append(f'    """Those of `stagewright {command}`, as keywords of `stagewright.{command}`."""')
    for option in options:
        is_shown = option.default not in (None, ()) and "(default:" not in option.help
        default = f" (default: {option.default!r})" if is_shown else ""
        about = textwrap.wrap(f'"""{option.help}{default}"""', 110)
        lines += ["", f"    {option.keyword}: {_hint(option)}", *(f"    {line}" for line in about)]
    return "\n".join(lines) + "\n"


def _hint(option: Taken) -> str:
    kind = option.type.__name__
    if option.choices:
        kind = f"Literal[{', '.join(map(repr, option.choices))}]".replace("'", '"')
    elif option.metavar in _PATHS:
        kind = "str | PathLike[str]"
    if option.keyword == "group":
        kind = f"{kind} | Mapping[str, object]"
    if option.is_repeated:
        kind = f"{kind} | Sequence[{kind}]"
    return kind if option.default is not None else f"{kind} | None"


if __name__ == "__main__":
    FILE.write_text(text())
