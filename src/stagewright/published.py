"""The published runs: what was run, what it took, and what the simulator says of it."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from stagewright.catalog.values import Catalogue
from stagewright.cluster import Placement, parse_placement
from stagewright.plan.make import make_plan
from stagewright.plan.partition import best_cuts
from stagewright.plan.plan import Mode, Plan
from stagewright.predict import IMAGENET, Prediction, analytic_setting, predict, study


@dataclass(frozen=True, slots=True)
class Run:
    """One published run."""

    system: str
    software: str
    model: str
    cluster: str
    precision: str
    data: str
    mode: str
    global_batch: int | None = None
    microbatch: int | None = None
    devices: int | None = None
    placement: str | None = None
    weights: str | None = None
    scheduling: str | None = None
    images_per_second: float | None = None
    epoch_seconds: tuple[float, ...] = ()
    memory_mib: tuple[float, ...] = ()

    @property
    def rate(self) -> float | None:
        """Measured images a second, over the mean of its epochs."""
        if self.images_per_second is not None:
            return self.images_per_second
        return IMAGENET / statistics.fmean(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def group(self) -> tuple[str, str, str]:
        """Rows that share their device, precision and software tell of each other."""
        return (self.cluster.rpartition("-")[0], self.precision, self.software)

    def __str__(self) -> str:
        devices = f" x{self.devices}" if self.devices else ""
        size = f"{self.global_batch}" if self.global_batch else f"{self.microbatch} each"
        return (
            f"{self.system}, {self.model}, {self.cluster}{devices}, {self.mode} {size}, {self.data}, {self.precision}"
        )


@cache
def published_runs() -> tuple[Run, ...]:
    """Every run of the catalogue."""
    tables = tomllib.loads(resources.files("stagewright.catalog").joinpath("published.toml").read_text())
    return tuple(_run(entry, tables["system"]) for entry in tables["run"])


def _run(entry: Mapping[str, Any], systems: Mapping[str, str]) -> Run:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Run(software=systems[entry["system"]], **values)


def run_plan(run: Run, catalogue: Catalogue) -> Plan:
    """The plan of a published run: a batch flows in as many pieces as its widest stage has replicas."""
    cluster = catalogue.cluster(run.cluster)
    cluster = cluster.first(run.devices) if run.devices else cluster
    placement: Placement = (cluster.devices,) if run.placement is None else parse_placement(run.placement, cluster)
    pieces = max(len(devices) for devices in placement)
    batch = run.global_batch or (run.microbatch or 1) * pieces
    mode = Mode(run.mode)
    cuts = () if mode is Mode.DP else _cuts(run, catalogue, placement, batch)
    return make_plan(placement, batch=batch, microbatches=pieces, mode=mode, cuts=cuts)


def _cuts(run: Run, catalogue: Catalogue, placement: Placement, batch: int) -> tuple[str, ...]:
    chain = study(run.model).chain
    if run.weights is not None:
        return chain.by_weights([int(weight) for weight in run.weights.split(":")])
    pieces = max(len(devices) for devices in placement)
    return best_cuts(run_setting(run, catalogue), placement, Mode(run.mode), batch, pieces)


def run_setting(run: Run, catalogue: Catalogue) -> Any:
    cluster = catalogue.cluster(run.cluster)
    return analytic_setting(
        catalogue,
        cluster.first(run.devices) if run.devices else cluster,
        study(run.model).shapes,
        catalogue.system(run.software),
        run.precision,
        loads=run.data != "synthetic",
    )


def predict_run(run: Run, catalogue: Catalogue) -> Prediction:
    """What the simulator says of a published run."""
    return predict(run_plan(run, catalogue), run_setting(run, catalogue))
