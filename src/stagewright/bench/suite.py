"""A suite of configurations as a TOML file: what `stagewright bench` trains, in groups that are compared. One configuration of a suite as it is to be run here, or to be simulated elsewhere."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from stagewright.bench.forecast import devices_of
from stagewright.cluster.placement import format_placement
from stagewright.cluster.topology import Cluster
from stagewright.config.sections import Config, Section
from stagewright.config.toml import make_config, read_toml

Tables = dict[str, dict[str, Any]]
REPEATS = 7


@dataclass(frozen=True)
class Trial(Section):
    """One configuration: options as in a file of `train --config`, over those of its group and its suite."""

    name: str
    options: Tables = field(default_factory=dict)
    devices: int | Literal["all"] | None = None  # instead of a placement: one stage on the first so many
    batch_a_device: int | None = None  # instead of a batch


@dataclass(frozen=True)
class Group(Section):
    """Configurations that are compared with one of them."""

    name: str
    trial: tuple[Trial, ...]
    baseline: str | None = None  # the first, unless told
    cluster: str | None = None  # where it was published, and where it is simulated unless told
    data: tuple[Literal["synthetic", "real"], ...] = ("synthetic",)
    options: Tables = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteFile(Section):
    """A whole suite."""

    title: str
    group: tuple[Group, ...]
    repeats: int = REPEATS
    steps: int = 30
    limit: float | None = None  # seconds after which no further round begins, unless repeats are asked for
    options: Tables = field(default_factory=dict)


def shipped_names() -> tuple[str, ...]:
    folder = resources.files("stagewright.bench").joinpath("suites")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def read_suite(name: str) -> SuiteFile:
    """A shipped suite by name, or a user's own by its path."""
    if name in shipped_names():
        folder = resources.files("stagewright.bench").joinpath("suites")
        return _checked(tomllib.loads(folder.joinpath(f"{name}.toml").read_text()), name)
    if not (name.endswith(".toml") or Path(name).is_file()):
        near = difflib.get_close_matches(name, shipped_names(), 1, 0.5)
        hint = (
            f"did you mean {near[0]}?" if near else f"shipped: {', '.join(shipped_names())}, or the path of a TOML file"
        )
        raise ValueError(f"unknown suite '{name}'; {hint}")
    return _checked(read_toml(name), name)


def _checked(tables: Mapping[str, Any], name: str) -> SuiteFile:
    try:
        suite = TypeAdapter(SuiteFile).validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        unknown = first["type"] == "unexpected_keyword_argument"
        wrong = "unknown key" if unknown else f"{first['msg'].lower()}{_given(first['input'])}"
        raise ValueError(f"suite {name}: {key}: {wrong}") from error
    if not suite.group:
        raise ValueError(f"suite {name} has 0 groups; describe one as [[group]]")
    for number, least in (("repeats", suite.repeats), ("steps", suite.steps)):
        if least < 1:
            raise ValueError(f"suite {name}: {number} is {least}; give at least 1")
    names = [group.name for group in suite.group]
    if len(set(names)) < len(names):
        raise ValueError(f"suite {name} has {len(names)} groups of {len(set(names))} names; give each its own")
    for group in suite.group:
        try:
            _check_group(suite, group)
        except ValueError as error:
            raise ValueError(f"suite {name}: {error}") from error
    return suite


def _given(value: Any) -> str:
    return f", not {value!r}" if isinstance(value, str | int | float) else ""


def _check_group(suite: SuiteFile, group: Group) -> None:
    """Refuse what would only show when its turn comes."""
    names = [trial.name for trial in group.trial]
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"group '{group.name}' has {len(names)} trials of {len(set(names))} names; give each its own")
    if group.baseline is not None and group.baseline not in names:
        raise ValueError(
            f"group '{group.name}' has no trial '{group.baseline}' to compare with; it has {', '.join(names)}"
        )
    for trial in group.trial:
        config = make_config(suite.options, group.options, trial.options)
        for key, value in (("devices", trial.devices), ("batch_a_device", trial.batch_a_device)):
            if isinstance(value, int) and value < 1:
                raise ValueError(f"trial '{trial.name}': {key} is {value}; give at least 1")
        if trial.devices is not None and config.plan.placement != make_config().plan.placement:
            raise ValueError(f"trial '{trial.name}' has devices {trial.devices} and placement {config.plan.placement}")


@dataclass(frozen=True, slots=True)
class Case:
    """A trial with its data, every option settled but what depends on the devices there are."""

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

    def config(self, cluster: Cluster) -> Config:
        """The configuration on a cluster; where it asks for more devices than there are, their numbers go on."""
        plan: dict[str, Any] = {}
        if self.trial.devices is not None:
            there = cluster.devices
            count = len(there) if self.trial.devices == "all" else self.trial.devices
            plan["placement"] = format_placement((there[:count],)) if count <= len(there) else f"0:0-{count - 1}"
        config = make_config(self.tables, {"plan": plan})
        if self.trial.batch_a_device is None:
            return config
        batch = self.trial.batch_a_device * len(devices_of(config.plan.placement))
        return replace(config, plan=replace(config.plan, batch=batch))


@dataclass(frozen=True, slots=True)
class Terms:
    """What a user asks of a suite."""

    repeats: int
    steps: int
    real: str | None = None  # the data of real cases
    only: str | None = None
    overrides: Sequence[Tables] = ()
    simulate: bool = False  # what does not fit this machine
    cluster: str | None = None  # where everything is simulated, instead of measuring anything here
    command: str = ""  # that asked for it
    limit: float | None = None  # seconds after which no further round begins


def cases_of(suite: SuiteFile, terms: Terms) -> list[Case]:
    """Every case of a suite that the terms leave; real data where it is given, or where nothing is loaded anyway."""
    found = []
    for group in suite.group:
        for data in group.data:
            is_real = data == "real"
            if is_real and terms.real is None and not terms.simulate:
                continue
            for trial in group.trial:
                own: Tables = {"run": {"steps": terms.steps}}
                if is_real and terms.real is not None:
                    own["data"] = {"source": terms.real}
                tables = _merged(suite.options, group.options, trial.options, own, *terms.overrides)
                found.append(Case(group, trial, is_real, tables))
    kept = [case for case in found if terms.only is None or terms.only.lower() in str(case).lower()]
    if not kept:
        raise ValueError(
            f"--only '{terms.only}' leaves none of {len(found)} configurations: {'; '.join(map(str, found))}"
        )
    return kept


def _merged(*layers: Tables) -> Tables:
    merged: Tables = {}
    for layer in layers:
        for section, values in layer.items():
            merged.setdefault(section, {}).update(values)
    return merged
