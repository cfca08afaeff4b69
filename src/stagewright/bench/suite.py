"""Suites: what `stagewright bench` trains, read from a TOML file and expanded into single configurations.

A `Suite` holds groups of trials that are compared with each other, as the file writes them. `configurations_of` expands
it: one `Configuration` per trial and kind of data, with the options of suite, group, trial and user merged.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from stagewright.cluster.placement import format_placement, parse_placement
from stagewright.cluster.topology import ANYWHERE, Cluster, Device
from stagewright.config.sections import MOST_RUNS, MOST_STEPS, Config, Section, require_within
from stagewright.config.toml import FIXED, keys_of, make_config, merged, read_toml, refuse_unused, without_unused
from stagewright.errors import UserError, did_you_mean

Tables = dict[str, dict[str, Any]]
REPEATS = 7
SUITES = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class Trial(Section):
    """One entry of a group: options as in a file of `train --config`, on top of those of its group and its suite."""

    name: str
    options: Tables = field(default_factory=dict)
    devices: int | Literal["all"] | None = None  # in place of a placement: one stage on the first of them
    batch_a_device: int | None = None  # in place of a batch
    plain: bool = False  # of a study: trained by a plain PyTorch loop


@dataclass(frozen=True)
class Group(Section):
    """Trials that are compared with one of them, the baseline."""

    name: str
    trial: tuple[Trial, ...]
    baseline: str | None = None  # default: the first
    cluster: str | None = None  # where it was published, and the default for simulating it
    data: tuple[Literal["synthetic", "real"], ...] = ("synthetic",)
    options: Tables = field(default_factory=dict)


@dataclass(frozen=True)
class Suite(Section):
    """A whole file."""

    title: str
    group: tuple[Group, ...]
    repeats: int = REPEATS
    steps: int = 30
    limit: float | None = None  # seconds after which no further repeat begins, unless the user gives --repeats
    options: Tables = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """What the user asks of a suite."""

    repeats: int
    steps: int
    real: str | None = None  # the data source of configurations with real data
    only: str | None = None
    overrides: Sequence[Tables] = ()
    simulate: bool = False  # predict what does not fit this machine
    cluster: str | None = None  # predict everything for this cluster and measure nothing here
    limit: float | None = None  # seconds after which no further repeat begins

    def allows(self, done: int, spent: float) -> bool:
        """Whether one more repeat of the same length may begin; the first always may."""
        return done < self.repeats and (not done or self.limit is None or spent * (done + 1) / done <= self.limit)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A trial with one kind of data; every option is known except those that depend on the devices of a cluster."""

    group: Group
    trial: Trial
    is_real: bool
    tables: Tables

    @property
    def data(self) -> str:
        return "real" if self.is_real else "synthetic"

    @property
    def is_baseline(self) -> bool:
        return self.trial.name == (self.group.baseline or self.group.trial[0].name)

    def __str__(self) -> str:
        return f"{self.group.name}, {self.trial.name}, {self.data}"

    def resolve(self, cluster: Cluster) -> Config:
        """The options on a cluster; a trial that asks for more devices than there are gets indices beyond the last."""
        if self.trial.plain:
            raise UserError(f"trial '{self.trial.name}' is plain, which is for studies of accuracy; leave plain out")
        plan: dict[str, Any] = {}
        if self.trial.devices is not None:
            there = cluster.devices
            count = len(there) if self.trial.devices == "all" else self.trial.devices
            plan["placement"] = format_placement((there[:count],)) if count <= len(there) else f"0:0-{count - 1}"
        config = without_unused(make_config(self.tables, {"plan": plan}, given=()))
        if self.trial.batch_a_device is None:
            return config
        batch = self.trial.batch_a_device * len(devices_of(config.plan.placement))
        return replace(config, plan=replace(config.plan, batch=batch))


def devices_of(placement: str) -> tuple[Device, ...]:
    """Every device that a placement names, once."""
    return tuple(dict.fromkeys(device for stage in parse_placement(placement, ANYWHERE) for device in stage))


def shipped_names(folder: Path = SUITES) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def read_suite(name: str, folder: Path = SUITES, kind: str = "suite") -> Suite:
    """A shipped suite by name, or any suite by its path."""
    if name in shipped_names(folder):
        return _checked(tomllib.loads((folder / f"{name}.toml").read_text()), name)
    if not (name.endswith(".toml") or Path(name).is_file()):
        raise UserError(f"unknown {kind} '{name}', and no .toml file; {did_you_mean(name, shipped_names(folder))}")
    return _checked(read_toml(name), name)


def configurations_of(suite: Suite, options: SuiteOptions) -> list[Configuration]:
    """The configurations of a suite that `--only` selects.

    Those with real data are included where the user gives a source, or with --simulate, which loads nothing.
    """
    found = []
    for group in suite.group:
        for data in group.data:
            is_real = data == "real"
            if is_real and options.real is None and not options.simulate:
                continue
            for trial in group.trial:
                own: Tables = {"run": {"steps": options.steps}}
                if is_real and options.real is not None:
                    own["data"] = {"source": options.real}
                tables = merged(FIXED, suite.options, group.options, trial.options, own, *options.overrides)
                found.append(Configuration(group, trial, is_real, tables))
    refuse_unused([entry.tables for entry in found], keys_of(*options.overrides))
    selected = [entry for entry in found if options.only is None or options.only.lower() in str(entry).lower()]
    if not selected:
        known = "; ".join(map(str, found))
        raise UserError(f"--only '{options.only}' matches none of {len(found)} configurations: {known}")
    return selected


def _checked(tables: Mapping[str, Any], name: str) -> Suite:
    try:
        suite = TypeAdapter(Suite).validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        given = f", not {first['input']!r}" if isinstance(first["input"], str | int | float) else ""
        is_unknown = first["type"] == "unexpected_keyword_argument"
        wrong = "unknown key" if is_unknown else f"{first['msg'].lower()}{given}"
        raise UserError(f"suite {name}: {key}: {wrong}") from error
    if not suite.group:
        raise UserError(f"suite {name} has 0 groups; describe one as [[group]]")
    require_within(f"suite {name}: repeats", suite.repeats, least=1, most=MOST_RUNS)
    require_within(f"suite {name}: steps", suite.steps, least=1, most=MOST_STEPS)
    names = [group.name for group in suite.group]
    if len(set(names)) < len(names):
        raise UserError(f"suite {name} has {len(names)} groups but {len(set(names))} names; give each its own")
    try:
        for group in suite.group:
            _check_group(suite, group)
        # an option that changes nothing in any trial, whichever data the user gives
        trials = [merged(suite.options, group.options, trial.options) for group in suite.group for trial in group.trial]
        sources: list[Tables] = [{"data": {"source": source}} for source in ("synthetic", "folder:DIR", "tokens:FILE")]
        refuse_unused([merged(source, trial) for trial in trials for source in sources], keys_of(*trials))
    except UserError as error:
        raise UserError(f"suite {name}: {error}") from error
    return suite


def _check_group(suite: Suite, group: Group) -> None:
    """Report errors now that would otherwise only show when a trial's turn comes."""
    names = [trial.name for trial in group.trial]
    if len(set(names)) < len(names) or not names:
        counts = f"{len(names)} trials but {len(set(names))} names" if names else "0 trials"
        raise UserError(f"group '{group.name}' has {counts}; give at least 1 trial, each with its own name")
    if group.baseline is not None and group.baseline not in names:
        raise UserError(f"group '{group.name}' has baseline '{group.baseline}' but only trials {', '.join(names)}")
    for trial in group.trial:
        config = make_config(suite.options, group.options, trial.options, given=())
        for key, value in (("devices", trial.devices), ("batch_a_device", trial.batch_a_device)):
            if isinstance(value, int) and value < 1:
                raise UserError(f"trial '{trial.name}': {key} is {value}; give at least 1")
        if trial.devices is not None and config.plan.placement != make_config().plan.placement:
            both = f"devices {trial.devices} and placement {config.plan.placement}"
            raise UserError(f"trial '{trial.name}' has both {both}; leave one out")
