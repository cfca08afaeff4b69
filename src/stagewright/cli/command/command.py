"""A command: its options, its arguments and the name of the function that runs it; and the parser of one.

A `Command` names the function that runs it, such as `plan:run`, which is imported once the command line is parsed
(`imported`): one of two lazy imports of the package, so that `stagewright --help` starts without torch, numpy, pydantic
or rich, and `plan` without torch where cluster and model are known.
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from stagewright.cli.command.options import add_option, one_of, take
from stagewright.cli.command.screen import filled, help_formatter, listed_examples
from stagewright.config.commands import REMOVED, Taken, with_defaults
from stagewright.config.sections import RENAMED
from stagewright.errors import did_you_mean, nearest, printable

USER_ERROR = 2  # the exit code of every error that a user can fix
RUN, MODEL = "run", "model"  # kinds of arguments that a shell completes by name
_MOST_SHOWN = 800  # characters of an error
_RENAMED_FLAGS = {f"--{old.partition('.')[2]}": f"--{new.partition('.')[2]}" for old, new in RENAMED.items()}


def imported(name: str) -> Callable[..., Any]:
    """A function by its module and name, such as `cli.plan:run`: only then are the module and torch imported."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"stagewright.{module}"), function)
    return found


def one_line(message: str) -> str:
    """A message as one readable line, without control characters that a terminal would obey."""
    line = " ".join(message.split())
    if len(line) > _MOST_SHOWN:
        line = f"{line[: _MOST_SHOWN // 2]} ... {line[-_MOST_SHOWN // 2 :]}"
    return printable(line)


class Parser(ArgumentParser):
    """Reports errors in one line; takes options only in full, never abbreviated.

    `--help` prints `screen`, which is short where there is much to say; `--help-all` prints everything.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"allow_abbrev": False, "add_help": False}))
        self.set_defaults(parser=self)  # the parser of the command, which `main` asks about unknown options
        self.flags = ["--help", "--help-all"]
        self.parsers: dict[str, Parser] = {}  # of the commands or actions below this one, by name
        self.screen: Callable[[], str] = super().format_help
        hidden: dict[str, Any] = {"nargs": 0, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        self.add_argument("-h", "--help", action=_ShowScreen, dest="help", **hidden)
        self.add_argument("--help-all", action="help", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def require_name(self, name: str, what: str) -> None:
        """End with an error where no command, or action, below this one has this name."""
        if name not in self.parsers:
            self.error(f"unknown {what} '{name}', {did_you_mean(name, self.parsers)}")

    def refuse_option(self, flag: str) -> NoReturn:
        """End with an error about an option that this command does not have; suggest the nearest that it has."""
        name = flag.partition("=")[0]
        if (new := _RENAMED_FLAGS.get(name)) in self.flags:
            self.error(f"option {name} is now {new}")
        if instead := REMOVED.get(f"{self.prog.partition(' ')[2]} {name}"):
            self.error(f"there is no option {name} any more; {instead}")
        near = nearest(name, self.flags)
        self.error(f"unknown option {name}" + (f", did you mean {near}?" if near else ""))

    def format_help(self) -> str:
        return self.screen() if self.parsers else super().format_help()

    def error(self, message: str) -> NoReturn:
        help = "" if message.endswith("?") else f"; see {self.prog} --help"
        self.exit(USER_ERROR, f"{self.prog}: {one_line(message)}{help}\n")


class _ShowScreen(argparse.Action):
    """Print the first screen of a parser, and exit."""

    def __call__(self, parser: ArgumentParser, *arguments: Any) -> None:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.screen())
        parser.exit()


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument of a command."""

    name: str
    metavar: str
    help: str
    count: str | None = None  # argparse's nargs
    kind: str = ""  # RUN or MODEL, or empty: a file, or anything else
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or an action of a group of commands."""

    name: str  # of an action: with its group, such as "data index"
    run: str  # the function that runs it, as "module:function"
    help: str
    description: str = ""  # if empty: the help
    usage: str = ""  # what precedes the options in its usage
    arguments: tuple[Argument, ...] = ()
    options: tuple[Taken, ...] = ()
    epilog: str = ""
    has_json: bool = True
    first: str = ""  # flags of the options on its first screen; if empty: all
    examples: tuple[str, ...] = ()  # what follows `stagewright` in them

    @property
    def takes(self) -> tuple[Taken, ...]:
        """All options."""
        has_json = any(option.flag == "--json" for option in self.options)
        return self.options if has_json or not self.has_json else (*self.options, *take("--json"))

    def screen(self) -> str:
        """What `--help` prints: all of its options where they are few, else those that people use most."""
        first = self.first.split()
        shown = [option for flag in first for option in self.takes if option.flag == flag] or self.takes
        more = f"stagewright {self.name} --help-all shows all {len(self.takes)} options."
        parser = ArgumentParser(add_help=False, **self._described(*[more] * (len(shown) < len(self.takes))))
        self._fill(parser, shown, has_groups=not first)
        return parser.format_help()

    def add_to(self, commands: Any, above: Parser) -> None:
        """Add this command to what `add_subparsers` of the parser above returned."""
        name = self.name.split()[-1]
        above.parsers[name] = parser = commands.add_parser(name, help=self.help, **self._described())
        parser.set_defaults(command=self)
        parser.screen = self.screen
        self._fill(parser, self.takes)
        parser.flags += [flag for option in self.takes for flag in option.flags]

    def _described(self, *more: str) -> dict[str, Any]:
        """What argparse shows beside arguments and options; `more` follows them."""
        own, dashes, rest = self.usage.partition("[-- ")  # options come before what belongs to somebody else
        words = ("stagewright", self.name, own.strip(), "[options]" * bool(self.takes), dashes + rest)
        below = (listed_examples(self.examples) if self.examples else "", self.epilog, *more)
        return {
            "usage": " ".join(filter(None, words)),
            "description": filled(self.description or f"{self.help[0].upper()}{self.help[1:]}."),
            "epilog": "\n\n".join(filter(None, below)),
            "formatter_class": help_formatter,
        }

    def _fill(self, parser: ArgumentParser, shown: Sequence[Taken], *, has_groups: bool = True) -> None:
        for argument in self.arguments:
            about: dict[str, Any] = {"metavar": argument.metavar, "help": argument.help, "nargs": argument.count}
            about |= {"type": one_of(argument.choices)} if argument.choices else {}
            parser.add_argument(argument.name, **about)
        groups: dict[str, Any] = {"": parser}
        for option in shown:
            heading = option.group if has_groups else ""
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            add_option(option, groups[heading])

    def complete(self, parsed: argparse.Namespace) -> None:
        """Fill in the defaults of options that were not given, and check bounds and rules.

        Options of a configuration stay as they were given: it has their defaults, and checks them with its files.
        """
        vars(parsed).update(with_defaults(self.takes, vars(parsed), self.name))
