"""One configuration of a suite as it is to be run here, or to be simulated elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.bench.layout import devices_of
from stagewright.bench.suitefile import Group, SuiteFile, Tables, Trial
from stagewright.cluster import Cluster, format_placement
from stagewright.config import make_config
from stagewright.config.sections import Config


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
