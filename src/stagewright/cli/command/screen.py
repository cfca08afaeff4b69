"""The first screen of help: what people use most, with examples; `--help-all` shows the rest."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from stagewright.cli.command.options import add_option

_NAME = 12  # columns of a command's name


class _Command(Protocol):
    """What a screen shows of a command."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Sequence[Any]: ...
    @property
    def takes(self) -> Sequence[Any]: ...
    @property
    def epilog(self) -> str: ...
    @property
    def first(self) -> str: ...
    @property
    def examples(self) -> Sequence[str]: ...
    @property
    def described(self) -> Mapping[str, Any]: ...


def command_screen(command: _Command) -> str:
    """What `--help` of a command prints: all of its options where they are few, else those that people use most."""
    first = command.first.split()
    shown = [option for flag in first for option in command.takes if option.flag == flag] or command.takes
    parser = argparse.ArgumentParser(
        add_help=False,
        epilog=epilog(command, len(shown)),
        formatter_class=help_formatter,
        **{**command.described} | {"description": filled(command.described["description"])},
    )
    for argument in command.arguments:
        parser.add_argument(argument.name, metavar=argument.metavar, help=argument.help, nargs=argument.count)
    groups: dict[str, Any] = {"": parser}
    for option in shown:
        heading = "" if first else option.group
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        add_option(option, groups[heading])
    return parser.format_help()


def first_screen(usage: str, areas: Mapping[str, Mapping[str, str]], examples: Sequence[str]) -> str:
    """What `stagewright --help` prints: every command with its help, by area, and examples."""
    lines = [f"usage: {usage}", "", "Plan, run and measure training over unequal pipeline stages.", ""]
    for area, commands in areas.items():
        lines.append(f"{area}:")
        lines += _rows(commands)
    lines += ["", _examples(examples), "", "stagewright COMMAND --help shows how a command is used."]
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


def epilog(command: _Command, shown: int | None = None) -> str:
    """What follows the options: examples, and where not all options are shown, how to see them."""
    parts = [_examples(command.examples)] if command.examples else []
    parts += [command.epilog] if command.epilog else []
    if shown is not None and shown < len(command.takes):
        parts.append(f"stagewright {command.name} --help-all shows all {len(command.takes)} options.")
    return "\n\n".join(parts)


def _examples(examples: Sequence[str]) -> str:
    return "\n".join(("examples:", *(f"  stagewright {example}" for example in examples)))


def filled(text: str) -> str:
    """A description in lines of the terminal's width."""
    return textwrap.fill(text, _width())


def _width() -> int:
    """As argparse's, of the terminal less two, but no wider than is easy to read."""
    return max(40, min(shutil.get_terminal_size().columns - 2, 98))
