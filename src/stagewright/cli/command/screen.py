"""The first screen of help: what people use most, with examples; `--help-all` shows the rest."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence

_NAME = 12  # columns of a command's name


def first_screen(usage: str, areas: Mapping[str, Mapping[str, str]], examples: Sequence[str]) -> str:
    """What `stagewright --help` prints: every command with its help, by area, and examples."""
    lines = [f"usage: {usage}", "", "Plan, run and measure training over unequal pipeline stages.", ""]
    for area, commands in areas.items():
        lines.append(f"{area}:")
        lines += _rows(commands)
    lines += ["", listed_examples(examples), "", "stagewright COMMAND --help shows how a command is used."]
    return "\n".join(lines) + "\n"


def group_screen(usage: str, description: str, actions: Mapping[str, str]) -> str:
    """What `--help` of a command with actions prints: each of these with its help."""
    end = f"stagewright {usage.split()[1]} ACTION --help shows how an action is used."
    return "\n".join((f"usage: {usage}", "", filled(description), "", "actions:", *_rows(actions), "", end)) + "\n"


def _rows(helps: Mapping[str, str]) -> Iterator[str]:
    """Names and their helps, side by side."""
    for name, help in helps.items():
        first, *rest = textwrap.wrap(help, _width() - _NAME - 4)
        yield f"    {name:<{_NAME}}{first}"
        yield from (" " * (_NAME + 4) + line for line in rest)


def help_formatter(prog: str) -> argparse.HelpFormatter:
    """Of help in lines of a width that is easy to read, however wide the terminal is."""
    return argparse.RawDescriptionHelpFormatter(prog, width=_width())


def listed_examples(examples: Sequence[str]) -> str:
    """Command lines below their heading."""
    return "\n".join(("examples:", *(f"  stagewright {example}" for example in examples)))


def filled(text: str) -> str:
    """A description in lines of the terminal's width."""
    return textwrap.fill(text, _width())


def _width() -> int:
    """As argparse's, of the terminal less two, but no wider than is easy to read."""
    return max(40, min(shutil.get_terminal_size().columns - 2, 98))
