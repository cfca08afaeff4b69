"""Configuration options as flags, and flags as a configuration."""

from __future__ import annotations

import argparse
from typing import Any

from stagewright.config import options, parse_assignment, read_toml
from stagewright.config.sections import Config
from stagewright.resume import resumed_config

Commands = Any  # what argparse.add_subparsers returns; its type has no public name


def add_options(parser: argparse.ArgumentParser, *sections: str) -> None:
    """The options of some sections of the configuration, or of all."""
    add_json(parser)
    parser.add_argument("--config", metavar="FILE", help="options as TOML")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="one option: run.seed=3")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options(*sections):
        section = option.key.partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        group = groups[section]
        shared: dict[str, Any] = {"dest": option.key, "default": argparse.SUPPRESS}
        if option.type is bool:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=option.help, **shared)
            continue
        shown = "" if option.default in (None, "") else f" (default: {option.default})"
        metavar = None if option.choices else option.type.__name__.upper().replace("STR", "TEXT").replace("INT", "N")
        group.add_argument(
            option.flag,
            type=option.type,
            choices=option.choices or None,
            metavar=metavar,
            help=(option.help + shown).replace("%", "%%"),
            **shared,
        )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def read_config(parsed: argparse.Namespace) -> Config:
    """The run to resume, if any, then the file, then --set, then the flags: later ones win."""
    layers = [read_toml(parsed.config)] if parsed.config else []
    layers += [parse_assignment(text) for text in parsed.set]
    for key, value in vars(parsed).items():
        section, dot, name = key.partition(".")
        if dot:
            layers.append({section: {name: value}})
    return resumed_config(*layers)
