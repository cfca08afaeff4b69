"""The options of all commands: one table, which names, bounds and explains each of them once.

The options of a run come from `config.sections`, those of functions of the API from `config.commands`; below are those
that only other commands have. Imports neither torch nor pydantic, so that `stagewright --help` starts quickly.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from stagewright.config import commands
from stagewright.config.commands import Taken, number, switch, text
from stagewright.config.sections import MOST_RUNS, Option
from stagewright.errors import did_you_mean

_OWN = (
    number("--repeats", "repeats per side (default: the suite's)", most=MOST_RUNS),
    # Of commands that plan
    number("--batches", "batches to show", 2),
    text("--forward", "TIMES", "time of a forward by stage: 1,1 (default: 1 each)"),
    text("--backward", "TIMES", "time of a backward by stage: 2,2 (default: 1 each)"),
    number("--transfer", "time of a message (default: 0)", 0.0, "TIME", float, least=0, most=1e9),
    switch("--programs", "also print the actions of every rank as text"),
    # Of commands about the machine
    switch("--fast", "do not measure bandwidths"),
    text("--topo", "FILE", "output of nvidia-smi topo -m (- for standard input)"),
    text("--smi", "FILE", "output of nvidia-smi -q -x"),
    switch("--here", "describe this machine instead, through its driver"),
    text("--name", "NAME", "name of the cluster (default: the file's)"),
    text("--gpus", "0-3,6", "use only these GPUs"),
    number("--pcie", "PCIe generation (default: the slot's, or the GPU's)"),
    number("--cores", "CPU cores that decode images"),
    number("--count", "number of such machines", 1, most=1024),
    text("--network", "LINK", "link between machines: net-1g, net-10g, ... net-400g"),
    # Of commands about data
    number("--most", "most records to decode (0: all)", 10_000, least=0, most=2**31 - 1),
    text("--sheet", "FILE", "picture to write", "contact-sheet.png"),
    number("--per-part", "records per part or shard (default: 5000)"),
    number("--side", "shrink images whose shorter side is longer than this (crops of 224: 256)", metavar="PIXELS"),
    switch("--raw", "store pixels: several times larger than JPEGs, and nothing to decode"),
    text("--tokenizer", "FILE", "tokenizer.json that makes the tokens of text:FILE (default: its bytes)"),
    number("--val-fraction", "share of the text, at its end, for a second file", 0.0, "SHARE", float, least=0, below=1),
    number("--images", "images per repeat (default: 64)", least=16),
    # Of commands about runs
    Option(
        "--weights",
        "the newest weights, or their average (default: the average, where --ema made one)",
        "",
        choices=("raw", "ema"),
    ),
    text("--sort", "KEY", "order", "started"),
    text("--filter", "KEY=VALUE", "only runs that fit: model=vgg16, state=finished, tag=paper; may be repeated"),
    switch("--yes", "do not ask"),
    switch("--once", "show the current state and exit"),
    number(
        "--serve",
        "serve the page of a run, or without one of all runs, to browsers here",
        metavar="PORT",
        least=0,
        most=65535,
    ),
    text("--only", "TEXT", "only configurations or cases whose name contains this"),
    switch("--loopback", "two processes of this machine, without network namespaces"),
    switch("--simulate", "predict what does not fit on this machine"),
    text("--row", "FILE.toml", "append what was measured as rows, to send"),
    switch("--anonymise", "leave out host names, user names, paths and addresses"),
)
OPTIONS = commands.OPTIONS | {option.flag: option for option in _OWN}
take = partial(commands.take, table=OPTIONS)


def add_option(option: Taken, group: Any) -> None:
    """Add it to a parser or a group of one; only what the user gives is in the parsed arguments."""
    shown = ("on" if option.default else "") if option.type is bool else option.default
    is_shown = shown not in (None, "", [], ()) and "(default:" not in option.help
    declared: dict[str, Any] = {"help": f"{option.help}{f' (default: {shown})' if is_shown else ''}".replace("%", "%%")}
    if option.type is bool:
        declared["action"] = argparse.BooleanOptionalAction if option.has_negation else "store_true"
    else:
        shown_choices = f"{{{','.join(option.choices)}}}" if option.choices else None
        declared |= {"type": one_of(option.choices) if option.choices else option.type}
        declared |= {"metavar": option.metavar or shown_choices}
        declared |= {"action": "append"} if option.is_repeated else {}
        declared |= {"required": True} if option.is_required else {}
        declared |= {"nargs": "?", "const": option.bare} if option.bare is not None else {}
    names = filter(None, (option.short, option.flag))
    group.add_argument(*names, dest=option.dest, default=argparse.SUPPRESS, **declared)


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """What argparse takes a value with that must be one of these; an error names the nearest."""

    def converted(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"'{text}' is unknown, {did_you_mean(text, choices)}")
        return text

    return converted
