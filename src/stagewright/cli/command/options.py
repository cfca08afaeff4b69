"""The options of all commands: one table, which names, bounds and explains each of them once.

The options of a run come from `config.sections`; below are those that only other commands have. A command lists the
flags that it takes, with at most another default, other words or other bounds (`take`). Imports neither torch nor
pydantic, so that `stagewright --help` starts quickly.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from stagewright.config.sections import MOST_RUNS, Option, options
from stagewright.errors import UserError, did_you_mean

_MOST = 10**6  # of whatever a number counts that has no bound of its own


def _text(flag: str, metavar: str, help: str, default: str | None = None) -> Option:
    return Option(flag, help, metavar, default=default)


def _number(
    flag: str, help: str, default: float | None = None, metavar: str = "N", kind: type = int, **bounds: float
) -> Option:
    lowest = {} if {"least", "above"} & bounds.keys() else {"least": 1}
    return Option(flag, help, metavar, kind, default=default, bounds=lowest | {"most": _MOST} | bounds)


def _switch(flag: str, help: str) -> Option:
    return Option(flag, help, type=bool, default=False)


_OWN = (
    # Of several commands
    _text("--config", "FILE", "read options from a TOML file"),
    _text("--set", "KEY=VALUE", "set one option by its key: run.seed=3"),
    _text("--output", "FILE", "file to write"),
    _text("--cluster", "NAME|FILE", "a cluster of the catalog, or a cluster file"),
    _switch("--json", "print one JSON object instead of text"),
    _number("--repeats", "repeats per side (default: the suite's)", most=MOST_RUNS),
    # Of commands that plan
    _number("--devices", "use only the first N devices of the cluster"),
    _text(
        "--software", "NAME", "whose efficiency to assume: stagewright, pytorch, oneflow or pipedream", "stagewright"
    ),
    _text("--explain", "UNIT", "show what a unit costs and where the plan puts it"),
    _number("--microbatch", "samples per microbatch, instead of --batch"),
    _text("--trace", "FILE", "write the timeline for Perfetto or chrome://tracing"),
    _text("--report", "FILE", "write an .html page with the timeline and the memory"),
    _text("--price", "NAME=USD", "price of a device or of another component; may be repeated"),
    _number("--kwh", "price of electricity, per kilowatt-hour", 0.15, "USD", float, above=0, most=100),
    _number("--try", "train the best N for a while each, and decide by that", most=16),
    _number("--minutes", "with --try: minutes of each", 1.0, "N", float, above=0, most=1440),
    _number("--batches", "batches to show", 2),
    _text("--forward", "TIMES", "time of a forward by stage: 1,1 (default: 1 each)"),
    _text("--backward", "TIMES", "time of a backward by stage: 2,2 (default: 1 each)"),
    _number("--transfer", "time of a message (default: 0)", 0.0, "TIME", float, least=0, most=1e9),
    _switch("--programs", "also print the actions of every rank as text"),
    # Of commands about the machine
    _switch("--fast", "do not measure bandwidths"),
    _number("--together", "processes at once, as ranks would run", 1),
    _text("--pipedream", "FILE", "import PipeDream's graph.txt, measured at --samples"),
    _text("--topo", "FILE", "output of nvidia-smi topo -m (- for standard input)"),
    _text("--smi", "FILE", "output of nvidia-smi -q -x"),
    _switch("--here", "describe this machine instead, through its driver"),
    _text("--name", "NAME", "name of the cluster (default: the file's)"),
    _text("--gpus", "0-3,6", "use only these GPUs"),
    _number("--pcie", "PCIe generation (default: the slot's, or the GPU's)"),
    _number("--cores", "CPU cores that decode images"),
    _number("--count", "number of such machines", 1, most=1024),
    _text("--network", "LINK", "link between machines: net-1g, net-10g, ... net-400g"),
    _number("--stages", "stages of the even cut to prove (default: 4)", least=1, most=1024),
    # Of commands about data
    _number("--most", "most records to decode (0: all)", 10_000, least=0, most=2**31 - 1),
    _text("--sheet", "FILE", "picture to write", "contact-sheet.png"),
    _number("--per-part", "records per part or shard (default: 5000)"),
    _number("--side", "shrink images whose shorter side is longer than this (crops of 224: 256)", metavar="PIXELS"),
    _switch("--raw", "store pixels: several times larger than JPEGs, and nothing to decode"),
    _text("--tokenizer", "FILE", "tokenizer.json that makes the tokens of text:FILE (default: its bytes)"),
    _number(
        "--val-fraction", "share of the text, at its end, for a second file", 0.0, "SHARE", float, least=0, below=1
    ),
    _number("--images", "images per repeat (default: 64)", least=16),
    # Of commands about runs
    Option(
        "--weights",
        "the newest weights, or their average (default: the average, where --ema made one)",
        "",
        choices=("raw", "ema"),
    ),
    _text("--sort", "KEY", "order", "started"),
    _text("--filter", "KEY=VALUE", "only runs that fit: model=vgg16, state=finished, tag=paper; may be repeated"),
    _switch("--yes", "do not ask"),
    _switch("--once", "show the current state and exit"),
    _number(
        "--serve",
        "serve the page of a run, or without one of all runs, to browsers here",
        metavar="PORT",
        least=0,
        most=65535,
    ),
    _text("--only", "TEXT", "only configurations or cases whose name contains this"),
    _switch("--loopback", "two processes of this machine, without network namespaces"),
    _switch("--simulate", "predict what does not fit on this machine"),
    _text("--row", "FILE.toml", "append what was measured as rows, to send"),
    _switch("--anonymise", "leave out host names, user names, paths and addresses"),
)
OPTIONS = {option.flag: option for option in (*options(), *_OWN)}


@dataclass(frozen=True, slots=True)
class Taken(Option):
    """An option of one command, and how its parser takes it."""

    group: str = ""  # a heading in --help
    short: str = ""
    is_required: bool = False
    has_negation: bool = False  # of a switch: --no-... as well
    bare: Any = None  # the value of an option that is given without one
    dest: str = ""  # the name of its value in the parsed arguments

    @property
    def flags(self) -> list[str]:
        """Every spelling in full."""
        return [self.flag, *([f"--no-{self.flag.removeprefix('--')}"] if self.has_negation else [])]

    def converted(self, value: Any) -> Any:
        """A value that Python code gives, as a command line would have it; an error for one of another kind."""
        if self.is_repeated and isinstance(value, list | tuple):
            return [replace(self, is_repeated=False).converted(one) for one in value]
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        is_right = isinstance(text, (int, float) if self.type is float else self.type)
        if not is_right or isinstance(text, bool) != (self.type is bool):
            raise UserError(
                f"{self.keyword} is {value!r:.80}, of type {type(value).__name__}; give {self.type.__name__}"
            )
        if self.choices and text not in self.choices:
            raise UserError(f"{self.keyword} is '{text}'; {did_you_mean(text, self.choices)}")
        return [text] if self.is_repeated else text

    def add_to(self, group: Any) -> None:
        """Add it to a parser or a group of one; only what the user gives is in the parsed arguments."""
        shown = ("on" if self.default else "") if self.type is bool else self.default
        is_shown = shown not in (None, "", [], ()) and "(default:" not in self.help
        declared: dict[str, Any] = {
            "help": f"{self.help}{f' (default: {shown})' if is_shown else ''}".replace("%", "%%")
        }
        if self.type is bool:
            declared["action"] = argparse.BooleanOptionalAction if self.has_negation else "store_true"
        else:
            shown_choices = f"{{{','.join(self.choices)}}}" if self.choices else None
            declared |= {"type": one_of(self.choices) if self.choices else self.type}
            declared |= {"metavar": self.metavar or shown_choices}
            declared |= {"action": "append"} if self.is_repeated else {}
            declared |= {"required": True} if self.is_required else {}
            declared |= {"nargs": "?", "const": self.bare} if self.bare is not None else {}
        names = filter(None, (self.short, self.flag))
        group.add_argument(*names, dest=self.dest, default=argparse.SUPPRESS, **declared)


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """What argparse takes a value with that must be one of these; an error names the nearest."""

    def converted(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"'{text}' is unknown, {did_you_mean(text, choices)}")
        return text

    return converted


def take(flags: str, **changes: Any) -> tuple[Taken, ...]:
    """Options of the table, by their flags between spaces, for a command that changes some of their fields."""
    return tuple(_taken(OPTIONS[flag], changes) for flag in flags.split())


def take_sections(*sections: str) -> tuple[Taken, ...]:
    """All options of some sections of the configuration, or of all sections, under their headings and by their keys."""
    return tuple(
        _taken(
            entry,
            {
                "group": entry.key.partition(".")[0],
                "has_negation": entry.type is bool and not entry.flag.startswith("--no-"),
                "dest": entry.key,
            },
        )
        for entry in options(*sections)
    )


def _taken(option: Option, changes: dict[str, Any]) -> Taken:
    known = {entry.name: getattr(option, entry.name) for entry in fields(Option)}
    return Taken(**known | {"dest": option.keyword} | changes)
