"""The published runs whose plan is known: stages and data parallel, each with its cluster of the catalog.

`published_runs` reads what others ran and measured; `predict_run` simulates one of them. Rates of plain data parallel
that need no plan are rows (`rows`).
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import format_placement, parse_placement
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster
from stagewright.config.toml import make_config
from stagewright.plan.estimate import Setting
from stagewright.plan.plan import Plan
from stagewright.planning.build import build_plan
from stagewright.planning.predict import IMAGENET, Prediction, predict
from stagewright.planning.setting import make_setting
from stagewright.planning.traced import chain_of, trace_model

DLPERF = "Oneflow-Inc/DLPerf reports/dlperf_benchmark_test_report_v1.md"


@dataclass(frozen=True, slots=True)
class PublishedRun:
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
    shares: str | None = None
    scheduling: str | None = None
    images_per_second: float | None = None
    epoch_seconds: tuple[float, ...] = ()
    memory_mib: tuple[float, ...] = ()
    cut: str | None = None  # the first unit of each later stage, where it is known instead of shares

    @property
    def rate(self) -> float | None:
        """Measured images per second, over the mean of its epochs."""
        if self.images_per_second is not None:
            return self.images_per_second
        return IMAGENET / statistics.fmean(self.epoch_seconds) if self.epoch_seconds else None

    @property
    def source(self) -> str:
        """Where it was published: runs of one source are fitted, or evaluated, together."""
        return DLPERF if self.cluster == "v100-32" else f"published runs on {self.cluster}"

    def __str__(self) -> str:
        devices = f" x{self.devices}" if self.devices else ""
        size = f"{self.global_batch}" if self.global_batch else f"{self.microbatch} each"
        return (
            f"{self.system}, {self.model}, {self.cluster}{devices}, {self.mode} {size}, {self.data}, {self.precision}"
        )


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(resources.files("benchmarks.calibration").joinpath("published.toml").read_text())


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Every run of the catalog."""
    return tuple(map(_run, _tables()["run"]))


def _run(entry: Mapping[str, Any], **more: Any) -> PublishedRun:
    """A run by its entry, with the software of its system."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return PublishedRun(software=_tables()["system"][entry["system"]], **values, **more)


def run_plan(run: PublishedRun, catalog: Catalog) -> Plan:
    """The plan of a published run: one microbatch per replica of the widest stage, and the largest lag of its mode."""
    cluster = _run_cluster(run, catalog)
    placement = run.placement or format_placement((cluster.devices,))
    staleness = placement.count(".") if run.mode == "stale" else None
    options = {"placement": placement, "shares": run.shares, "cut": run.cut, "mode": run.mode, "staleness": staleness}
    stages = parse_placement(placement, cluster)
    widest = sum(map(len, stages)) if run.mode == "dp" else max(map(len, stages))
    size = {"batch": run.global_batch or (run.microbatch or 1) * widest}
    return build_plan(
        make_config({"plan": options | size}).plan,
        cluster,
        chain_of(run.model),
        lambda placement: run_setting(run, catalog),
        one_each=True,
    )


def _run_cluster(run: PublishedRun, catalog: Catalog) -> Cluster:
    cluster = catalog.cluster(run.cluster)
    return cluster.first(run.devices) if run.devices else cluster


def run_setting(run: PublishedRun, catalog: Catalog) -> Setting:
    """The hardware and software of a published run."""
    shapes, loads = trace_model(run.model).shapes, run.data != "synthetic"
    cluster = _run_cluster(run, catalog)
    return make_setting(shapes, cluster, run.precision, catalog=catalog, software=run.software, loads=loads)


def predict_run(run: PublishedRun, catalog: Catalog) -> Prediction:
    """Simulate a published run."""
    return predict(run_plan(run, catalog), run_setting(run, catalog))


def published_pairs() -> list[tuple[PublishedRun, PublishedRun, float]]:
    """Runs of stages with the same software's data parallel on the same machine and data, and the measured ratio."""
    runs = published_runs()
    pairs = []
    for staged in runs:
        if staged.placement is None or staged.rate is None:
            continue
        alike = [run for run in runs if run.mode == "dp" and run.rate is not None and _work(run) == _work(staged)]
        best = max(alike, key=lambda run: run.rate or 0.0)
        pairs.append((staged, best, staged.rate / (best.rate or 1.0)))
    for entry in _tables()["speedup"]:
        about = {key: entry[key] for key in ("system", "model", "cluster", "precision", "data")}
        own = {key: entry[key] for key in ("mode", "placement", "microbatch")}
        batch = entry["microbatch"] * len(shipped().cluster(entry["cluster"]).devices)
        pairs.append((_run(about | own), _run(about, mode="dp", global_batch=batch), entry["over_dp"]))
    return pairs


def _work(run: PublishedRun) -> tuple[str, ...]:
    return run.system, run.model, run.cluster, run.data


def run_kinds(run: PublishedRun) -> tuple[int, int, tuple[str, ...], bool]:
    """How many devices on how many machines a run has, of which kinds, and whether they copy through the host."""
    cluster = _run_cluster(run, shipped())
    kinds = tuple(sorted({machine.kind for machine in cluster.machines}))
    staged = any(machine.copies_through_host for machine in cluster.machines)
    return len(cluster.devices), len(cluster.machines), kinds, staged
