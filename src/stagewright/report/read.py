"""Reads a run folder into a `Run`: lines may be torn and files missing; what can't be read is left out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from stagewright.errors import printable
from stagewright.events import (
    Evaluated,
    Replaced,
    Restarted,
    Resumed,
    Saved,
    Step,
    Usage,
    build,
    fits,
    read_records,
    read_usage,
)
from stagewright.files import MOST_RUN_BYTES, read_regular, read_text
from stagewright.metrics import IMAGES, Span, SteadyRate, ThroughputUnit, Timeline, headline_metrics, steady_rate

_PLAN_FIELDS: dict[str, Any] = {
    "mode": str,
    "placement": str,
    "batch": int,
    "microbatches": int,
    "cuts": tuple[str, ...],
    "versions": tuple[int, ...],
    "depths": tuple[int, ...],
}
_PROOF_FIELDS = {"way": str, "samples": int, "precision": str, "difference": float, "seconds": float}
_LONGEST_UNIT = 20
Recorded = TypeVar("Recorded")


@dataclass(frozen=True, slots=True)
class RankMap:
    """Which ranks each stage has, and how a report names them."""

    labels: tuple[str, ...]  # one per rank
    stages: tuple[tuple[int, ...], ...]  # the ranks of each stage
    devices: tuple[str, ...]  # of each stage, as the placement writes them


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a run from its beginning on; what its folder lacks is empty or None."""

    folder: Path
    rank_map: RankMap
    plan: dict[str, Any]
    config: dict[str, Any]
    batches: int | None  # to train in total
    unit: ThroughputUnit  # of its throughput

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def model(self) -> str:
        return str(self.section("model").get("name", "a model"))

    @property
    def mode(self) -> str:
        return str(self.plan.get("mode", "?"))

    @property
    def batch(self) -> int:
        return int(self.plan.get("batch") or 0)

    @property
    def shape(self) -> str:
        """Replicas of each stage: 7-1."""
        return "-".join(str(len(ranks)) for ranks in self.rank_map.stages)

    @property
    def is_emulated(self) -> bool:
        """Whether all ranks ran in one process."""
        return self.section("run").get("emulate") is True

    @property
    def evaluated_on(self) -> str:
        return evaluated_on(self.config)

    def section(self, name: str) -> dict[str, Any]:
        """A table of its configuration."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Run(Facts):
    """Everything that a report needs from a run folder."""

    environment: dict[str, Any]
    summary: dict[str, Any] | None
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluated, ...]
    restarts: tuple[Restarted, ...]
    resumes: tuple[Resumed, ...]  # one for each time that it was resumed
    replaced: int
    saved: tuple[Saved, ...]
    usage: tuple[tuple[Usage, ...], ...]  # samples of each machine that has a monitor's file
    timeline: Timeline | None
    memory: tuple[dict[str, float], ...] | None  # bytes by part, of each rank, as the planner predicts
    proof: dict[str, Any] | None  # what was proven of the cut

    @property
    def start(self) -> int:
        """The batch that it was last resumed from."""
        return self.resumes[-1].batch if self.resumes else 0

    @property
    def own_steps(self) -> tuple[Step, ...]:
        """The steps since it was last resumed: those of its current plan."""
        return tuple(step for step in self.steps if step.batch >= self.start)

    @property
    def own_usage(self) -> tuple[Usage, ...]:
        """The samples of all machines since it was last resumed."""
        return tuple(sample for samples in self.usage for sample in samples if sample.start == self.start)

    @property
    def interrupted(self) -> frozenset[int]:
        """The batches right after an evaluation, a restart or a resume: their times include the pause."""
        records: Iterable[Evaluated | Restarted | Resumed] = (*self.evaluations, *self.restarts, *self.resumes)
        return frozenset(record.batch for record in records)

    @property
    def seconds(self) -> float:
        """Seconds that the steps since it was last resumed took, with their pauses."""
        before = len(self.steps) - len(self.own_steps)
        begun = self.steps[before - 1].seconds if before else 0.0
        return self.steps[-1].seconds - begun if self.own_steps else 0.0

    @property
    def speed(self) -> SteadyRate | None:
        """Of the steps since it was last resumed."""
        return steady_rate(self.own_steps, self.batch, self.interrupted)

    @property
    def images_per_second(self) -> float | None:
        """Samples per second, from the summary; of a run without one, from its steps."""
        if self.summary is not None:
            return as_number(self.summary.get("images_per_second"))
        return speed.rate if (speed := self.speed) else None

    @property
    def steady_steps(self) -> int | None:
        """How many steps that speed counts; None where the run's summary is of an earlier version."""
        if self.summary is not None:
            steps = self.summary.get("steady_steps")
            return steps if fits(steps, int) else None
        return speed.steps if (speed := self.speed) else 0

    @property
    def predicted(self) -> float | None:
        """The samples per second that were predicted."""
        return as_number((self.summary or {}).get("predicted_images_per_second"))

    @property
    def metric(self) -> str | None:
        """The first metric of its last evaluation that a line has room for."""
        return next(iter(headline_metrics(self.evaluations[-1].metrics)), None) if self.evaluations else None

    @property
    def validation(self) -> str | None:
        """The validation data by its name, as in `folder:val`; None where it evaluates on the training data."""
        source, val = self.section("data").get("source"), self.section("data").get("val")
        if not isinstance(val, str) or val == source:
            return None
        kind, colon, path = val.rpartition(":")
        return printable(f"{kind}{colon}{Path(path).name or path}")

    def label(self, rank: int) -> str:
        """The name of a process that the monitor saw: its rank, or all ranks of an emulated run."""
        if self.is_emulated:
            return "all ranks, one process"
        return self.rank_map.labels[rank] if rank < len(self.rank_map.labels) else f"rank {rank}"


def evaluated_on(config: dict[str, Any]) -> str:
    """What a configuration evaluates on: without --val, the data that it trains on; and whether with --ema."""
    data, optimizer = config.get("data"), config.get("optimizer")
    if not isinstance(data, dict):
        return "unknown data"
    averaged = ", averaged weights" if isinstance(optimizer, dict) and optimizer.get("ema") else ""
    return f"{'training' if data.get('val') in (None, data.get('source')) else 'validation'} data{averaged}"


def read_facts(folder: Path, rank_map: RankMap) -> Facts:
    """Read what is known of a run from its beginning on."""
    batches = (read_object(folder / "job.json") or {}).get("batches")
    plan, config = read_plan_fields(folder), read_tables(folder / "config.toml")
    return Facts(folder, rank_map, plan, config, batches if fits(batches, int) else None, read_unit(folder))


def read_run(folder: Path, rank_map: RankMap) -> Run:
    """Read all files of a run folder."""
    records = [record for _, record in read_records(read_lines(folder / "metrics.jsonl"))]
    monitored = (tuple(read_usage(read_lines(path))) for path in sorted(folder.glob("monitor*.jsonl")))

    def of(kind: type[Recorded]) -> tuple[Recorded, ...]:
        return tuple(record for record in records if isinstance(record, kind))

    known = read_facts(folder, rank_map)
    return Run(
        **{field.name: getattr(known, field.name) for field in fields(known)},
        environment=read_object(folder / "env.json") or {},
        summary=read_object(folder / "summary.json"),
        steps=of(Step),
        evaluations=of(Evaluated),
        restarts=of(Restarted),
        resumes=of(Resumed),
        replaced=len(of(Replaced)),
        saved=of(Saved),
        usage=tuple(filter(None, monitored)),
        timeline=_read_timeline(folder / "trace.json"),
        memory=_read_memory(folder / "memory.json"),
        proof=_read_proof(folder / "proof.json"),
    )


def _read_proof(path: Path) -> dict[str, Any] | None:
    """What was proven of the cut; None where the file is missing or has a field of a wrong type."""
    found = read_object(path) or {}
    return found if all(fits(found.get(name), kind) for name, kind in _PROOF_FIELDS.items()) else None


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file; none where it is missing."""
    try:
        return read_regular(path, MOST_RUN_BYTES).splitlines()
    except OSError:
        return []


def read_plan_fields(folder: Path) -> dict[str, Any]:
    """The fields of plan.json; those of a wrong type are left out."""
    found = read_object(folder / "plan.json") or {}
    return {name: value for name, value in found.items() if fits(value, _PLAN_FIELDS.get(name, Any))}


def read_unit(folder: Path) -> ThroughputUnit:
    """What a run's throughput counts, by its job.json or summary.json; images where neither tells."""
    for file in ("job.json", "summary.json"):
        found = read_object(folder / file) or {}
        name, per_sample = found.get("unit"), found.get("per_sample")
        if fits(name, str) and name and fits(per_sample, int) and per_sample:
            return ThroughputUnit(printable(name)[:_LONGEST_UNIT], per_sample)
    return IMAGES


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where the file is missing or damaged."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_tables(path: Path) -> dict[str, Any]:
    """A TOML file; empty where it is missing or damaged."""
    try:
        return tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}


def _read_timeline(path: Path) -> Timeline | None:
    trace = read_object(path)
    try:
        return None if trace is None else Timeline(tuple(build(Span, span) for span in Timeline.of_trace(trace).spans))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None


def _read_memory(path: Path) -> tuple[dict[str, float], ...] | None:
    ranks = (read_object(path) or {}).get("ranks")
    return tuple(ranks) if ranks and fits(ranks, tuple[Mapping[str, float], ...]) else None


def as_number(value: object) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and fits(value, float) else None
