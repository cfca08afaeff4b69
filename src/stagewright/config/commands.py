"""The options of the commands that are functions of the API too: one table for both.

A command lists the flags that it takes, with at most another default, other words or other bounds (`take`). `completed`
is what a function would run with. Imports neither torch nor pydantic, so that `stagewright --help` starts quickly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stagewright.config.modes import Mode
from stagewright.config.rules import check_rules
from stagewright.config.sections import Config, Option, options
from stagewright.errors import UserError, did_you_mean

OURS = "stagewright"  # the name of its software in the catalog
_PRECISIONS = "fp64, fp32, ieee, tf32, bf16, fp16"
_AUTO = f"{_PRECISIONS}; auto: bf16 on GPUs of this machine that have it, else fp32"
_MOST = 10**6  # of whatever a number counts that has no bound of its own

REMOVED = {  # options of commands in older versions, and what takes their place
    "simulate --microbatch": "give --batch: the samples of a microbatch times the microbatches",
    **dict.fromkeys(("bench --rows", "bench --given"), "run python -m benchmarks published in a checkout"),
    "bench --quick": "run python -m benchmarks models --quick in a checkout",
    **dict.fromkeys(
        (f"bench --{name}" for name in ("study", "seeds", "jobs", "target", "real", "reuse", "val")),
        "run python -m benchmarks learning in a checkout",
    ),
}


def text(flag: str, metavar: str, help: str, default: str | None = None) -> Option:
    return Option(flag, help, metavar, default=default)


def number(
    flag: str, help: str, default: float | None = None, metavar: str = "N", kind: type = int, **bounds: float
) -> Option:
    lowest = {} if {"least", "above"} & bounds.keys() else {"least": 1}
    return Option(flag, help, metavar, kind, default=default, bounds=lowest | {"most": _MOST} | bounds)


def switch(flag: str, help: str) -> Option:
    return Option(flag, help, type=bool, default=False)


OPTIONS = {
    option.flag: option
    for option in (
        *options(),
        text("--config", "FILE", "read options from a TOML file"),
        text("--set", "KEY=VALUE", "set one option by its key: run.seed=3"),
        text("--output", "FILE", "file to write"),
        text("--cluster", "NAME|FILE", "a cluster of the catalog, or a cluster file"),
        switch("--json", "print one JSON object instead of text"),
        number("--devices", "use only the first N devices of the cluster"),
        text("--software", "NAME", f"whose efficiency to assume: {OURS}, pytorch, oneflow or pipedream", OURS),
        text("--explain", "UNIT", "show what a unit costs and where the plan puts it"),
        text("--trace", "FILE", "write the timeline for Perfetto or chrome://tracing"),
        text("--report", "FILE", "write an .html page with the timeline and the memory"),
        text("--price", "NAME=USD", "price of a device or of another component; may be repeated"),
        number("--kwh", "price of electricity, per kilowatt-hour", 0.15, "USD", float, above=0, most=100),
        number("--try", "train the best N for a while each, and decide by that", most=16),
        number("--minutes", "with --try: minutes of each", 1.0, "N", float, above=0, most=1440),
        number("--together", "processes at once, as ranks would run", 1),
        text("--pipedream", "FILE", "import PipeDream's graph.txt, measured at --samples"),
        number("--stages", "stages of the even cut to prove (default: 4)", least=1, most=1024),
    )
}


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


def take(flags: str, *, table: Mapping[str, Option] = OPTIONS, **changes: Any) -> tuple[Taken, ...]:
    """Options of the table, by their flags between spaces, for a command that changes some of their fields."""
    return tuple(_taken(table[flag], changes) for flag in flags.split())


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


# --- What each function takes -----------------------------------------------------------------------------------------


def _setting(**of_cluster: Any) -> tuple[Taken, ...]:
    """The options that say what is planned: the cluster, the precision, the software and the data."""
    return (
        *take("--cluster", **of_cluster),
        *take("--devices"),
        *take("--precision", default="auto", help=_AUTO, choices=("auto", *_PRECISIONS.split(", ")), metavar="NAME"),
        *take("--software"),
        *take("--data", choices=("synthetic", "imagenet"), metavar="", help="data to load"),
        *take("--optimizer", help="optimizer, for its memory"),
        *take("--ema", help="count averaged weights too"),
        *take("--image --classes --freeze"),
        *take("--profile", help="measured units, instead of the catalog's figures"),
    )


CONFIGURED = (*take("--config"), *take("--set", is_repeated=True))
_EXPLAIN = take(
    "--explain", type=bool, default=False, metavar="", help="show what --placement auto chooses from, and train nothing"
)
FUNCTIONS: Mapping[str, tuple[Taken, ...]] = {
    "train": (*CONFIGURED, *_EXPLAIN, *take_sections()),
    "plan": (
        *_setting(),
        *take("--batch", default=None, help="samples per update (default: what suits the devices)"),
        *take(
            "--mode",
            key="",
            dest="modes",
            is_repeated=True,
            choices=Mode.where(lambda preset: preset.has_stages),
            default=None,
            help="try only this mode; may be repeated",
        ),
        *take("--microbatches", help="microbatches per batch (default: try several)"),
        *take("--staleness", help="most updates that a stage may lag"),
        *take("--lr", default=None, help="warn if this learning rate is unstable at the lag"),
        *take("--momentum", help="with --lr: SGD momentum"),
        *take("--nesterov", help="with --lr: Nesterov momentum"),
        *take("--predict", help="with --lr: extrapolated weights, as train --predict"),
        *take("--output", short="-o", help="write the plan for train --plan"),
        *take("--report", help="write an .html page with candidates, timeline, memory and links"),
        *take("--try", dest="try_"),
        *take("--minutes"),
        *take("--explain"),
        *take("--json"),
    ),
    "simulate": (
        *_setting(),
        *take("--mode", help="how far weights may lag (default: stale; dp for one stage)"),
        *take("--placement", default=None, help="devices of each stage: 0:0-6.0:7 (default: one stage on all)"),
        *take("--shares --cut"),
        *take("--batch", default=None, help="samples per update"),
        *take("--microbatches", help="microbatches per batch"),
        *take("--staleness"),
        *take("--plan", help="a plan file, instead of the options above"),
        *take("--trace --report --json"),
    ),
    "profile": (
        *take("--output", short="-o", help="write the profile as JSON"),
        *take("--samples", type=str, default="8,16", bounds={}, metavar="N,N", help="microbatch sizes"),
        *take("--precision", default="auto", metavar="NAMES", help=f"{_AUTO}; or several: fp32,bf16"),
        *take("--device", default="cpu", choices=("cpu", "cuda"), help="kind of device"),
        *take("--threads", default=1, help="threads per CPU rank"),
        *take("--together --image --classes --freeze --pipedream --json"),
    ),
    "inspect": (
        *take("--stages"),
        *take("--cut", default=None, help="prove this cut: the first unit or module of each later stage"),
        *take("--data", default=None, metavar="SOURCE", help="take samples from this data"),
        *take("--inputs --image --classes --init --freeze --seed --json"),
    ),
    "value": (
        *_setting(is_repeated=True, help="a cluster of the catalog, or a cluster file; may be repeated"),
        *take("--batch", default=256, help="samples per update (default: 256)"),
        *take("--price", is_repeated=True),
        *take("--kwh --json"),
    ),
}


def completed(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a function would run with: the model, and its options by name, which are checked as the command does.

    None stands for an option that was not given.
    """
    taken = {option.keyword: option for option in FUNCTIONS[name]}
    values: dict[str, Any] = {"model": given["model"]}
    for keyword, value in given.items():
        if keyword not in taken and keyword != "model":
            raise UserError(f"stagewright.{name} has no option '{keyword}'; {did_you_mean(keyword, taken)}")
        if value is not None and keyword != "model":
            values[taken[keyword].dest] = taken[keyword].converted(value)
    return values | with_defaults(FUNCTIONS[name], values, name)


def with_defaults(taken: Iterable[Taken], given: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The values of the options of a command, with its bounds and rules checked.

    Options of a configuration stay as they were given: it has their defaults, and checks them with its files.
    """
    own = [option for option in taken if option.dest != option.key]
    values = {option.dest: given.get(option.dest, [] if option.is_repeated else option.default) for option in own}
    for option in own:
        option.check(values[option.dest])
    flags = {option.flag for option in own if option.dest in given}
    check_rules({option.flag: values[option.dest] for option in own}, flags, command)
    return values


def config_of(name: str, values: Mapping[str, Any]) -> Config:
    """The configuration that the options of a function stand for, as far as they are keys of one."""
    config = Config()
    config = replace(config, model=replace(config.model, name=values["model"]))
    for option in FUNCTIONS[name]:
        if option.key and (value := values[option.dest]) is not None:
            config = option.put(config, Mode(value) if option.key == "plan.mode" else value)
    return config
