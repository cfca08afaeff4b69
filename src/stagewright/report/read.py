"""A run as its folder tells it: plain JSON, lines that may be torn, files that may be missing."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from stagewright import events
from stagewright.events import Evaluated, GpuUsage, RankUsage, Replaced, Restarted, Resumed, Saved, Step, Usage
from stagewright.metrics import Timeline

_MOST_COUNT, _MOST_SIZE = 2**63, 1e300  # beyond them arithmetic on figures overflows
_OF_PLANS: dict[str, Any] = {
    "mode": str,
    "placement": str,
    "batch": int,
    "microbatches": int,
    "cuts": list[str],
    "versions": list[int],
    "depths": list[int],
}
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)  # of content not as it should be


@dataclass(frozen=True, slots=True)
class RankMap:
    """Which ranks carry which stage, and what a person calls them."""

    labels: tuple[str, ...]  # one per rank
    stages: tuple[tuple[int, ...], ...]
    devices: tuple[str, ...]  # of each stage, as the placement writes them


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a report may say of a run; what its folder lacks is empty or None."""

    folder: Path
    rank_map: RankMap
    plan: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any] | None
    batches: int | None  # that it was to train
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluated, ...]
    restarts: tuple[Restarted, ...]
    resumes: tuple[Resumed, ...]  # from which checkpoints it went on
    replaced: int
    saved: tuple[int, ...]  # batches after which there is a checkpoint
    uses: tuple[tuple[Usage, ...], ...]  # of each machine whose monitor is there
    timeline: Timeline | None
    memory: tuple[dict[str, float], ...] | None  # bytes by part and rank, by the planner's model

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
    def start(self) -> int:
        """The batch that it last went on from."""
        return self.resumes[-1].batch if self.resumes else 0

    @property
    def own_steps(self) -> tuple[Step, ...]:
        """Those of the plan that it has now: since it last went on from a checkpoint."""
        return tuple(step for step in self.steps if step.batch >= self.start)

    @property
    def own_usage(self) -> tuple[Usage, ...]:
        """What all machines used for the plan that it has now."""
        return tuple(use for uses in self.uses for use in uses if use.start == self.start)

    @property
    def images_per_second(self) -> float | None:
        """The summary's, or of a run without one that of its steps, but the first two."""
        if self.summary is not None:
            return as_number(self.summary.get("images_per_second"))
        steady = self.own_steps[2:]
        spent = sum(self.batch / step.images_per_second for step in steady if step.images_per_second > 0)
        return len(steady) * self.batch / spent if spent else None

    @property
    def predicted(self) -> float | None:
        return as_number((self.summary or {}).get("predicted_images_per_second"))

    @property
    def is_emulated(self) -> bool:
        return is_emulated(self.config)

    def label(self, rank: int) -> str:
        """What a process that the monitor saw is called: the rank that it is, or all of them."""
        if self.is_emulated:
            return "all ranks, one process"
        return self.rank_map.labels[rank] if rank < len(self.rank_map.labels) else f"rank {rank}"

    def section(self, name: str) -> dict[str, Any]:
        """A table of its configuration."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def is_emulated(config: dict[str, Any]) -> bool:
    """Whether a configuration has all ranks in one process."""
    run = config.get("run")
    return isinstance(run, dict) and run.get("emulate") is True


def read_run(folder: Path, rank_map: RankMap) -> Run:
    """All that the files of a run folder say."""
    records = list(read_records(folder / "metrics.jsonl"))
    summary = read_object(folder / "summary.json")
    return Run(
        folder=folder,
        rank_map=rank_map,
        plan=read_plan_fields(folder),
        config=read_tables(folder / "config.toml"),
        environment=read_object(folder / "env.json") or {},
        summary=summary,
        batches=read_batches(folder),
        steps=tuple(record for record in records if isinstance(record, Step)),
        evaluations=tuple(record for record in records if isinstance(record, Evaluated)),
        restarts=tuple(record for record in records if isinstance(record, Restarted)),
        resumes=tuple(record for record in records if isinstance(record, Resumed)),
        replaced=sum(isinstance(record, Replaced) for record in records),
        saved=tuple(record.batch for record in records if isinstance(record, Saved)),
        uses=tuple(filter(None, (tuple(read_usage(path)) for path in sorted(folder.glob("monitor*.jsonl"))))),
        timeline=_read_timeline(folder / "trace.json"),
        memory=_read_memory(folder / "memory.json"),
    )


def read_records(path: Path) -> Iterator[Any]:
    """The records of a journal; a line that is torn or strange is left out."""
    return filter(None, map(as_record, read_lines(path)))


def as_record(fields: dict[str, Any]) -> Any:
    """A line of metrics.jsonl as a value; None where it is none, or its values are of other types."""
    try:
        record = events.as_record(fields)
    except _FAULTS:
        return None
    return record if _is_sound(record) else None


def read_usage(path: Path) -> Iterator[Usage]:
    """The moments of a monitor."""
    return filter(None, map(as_usage, read_lines(path)))


def as_usage(fields: dict[str, Any]) -> Usage | None:
    """A line of monitor.jsonl as a value; None where it is none."""
    try:
        gpus = tuple(_as_gpu(gpu) for gpu in fields["gpus"])
        ranks = tuple(RankUsage(**rank) for rank in fields["ranks"])
        use = Usage(fields["seconds"], fields["cores"], fields["memory"], gpus, ranks, fields.get("start", 0))
    except _FAULTS:
        return None
    return use if all(map(_is_sound, (use, *gpus, *ranks))) else None


def _as_gpu(fields: dict[str, Any]) -> GpuUsage:
    reasons = fields.get("throttled", ())
    return GpuUsage(**{**fields, "throttled": tuple(reasons) if isinstance(reasons, list) else reasons})


def _is_sound(record: Any) -> bool:
    """Whether every field holds what its type says; a loss may be endless or no number, as of a run that diverged."""
    return all(
        _fits(value := getattr(record, name), hint) or (name == "loss" and isinstance(value, float))
        for name, hint in _hints(record.__class__).items()
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type: counts are whole and not negative, other numbers finite, lists as tuples."""
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST_SIZE
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_COUNT
    if get_origin(hint) is UnionType:
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return isinstance(value, list | tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    return isinstance(value, hint)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of JSON lines; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            yield fields


def read_plan_fields(folder: Path) -> dict[str, Any]:
    """What a run's plan.json says; fields of other types than a plan's are left out."""
    found = read_object(folder / "plan.json") or {}
    return {name: value for name, value in found.items() if _fits(value, _OF_PLANS.get(name, object))}


def read_batches(folder: Path) -> int | None:
    """How many batches a run is to train, where its job.json says."""
    batches = (read_object(folder / "job.json") or {}).get("batches")
    return batches if _fits(batches, int) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none, or none that is whole."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_tables(path: Path) -> dict[str, Any]:
    """A TOML file; empty where there is none, or none that is whole."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _read_timeline(path: Path) -> Timeline | None:
    trace = read_object(path)
    try:
        timeline = None if trace is None else Timeline.of_trace(trace)
    except _FAULTS:
        return None
    return timeline if timeline is not None and all(map(_is_sound, timeline.spans)) else None


def _read_memory(path: Path) -> tuple[dict[str, float], ...] | None:
    found = read_object(path)
    try:
        parts = found["ranks"] if found else None
        ranks = tuple({str(name): float(size) for name, size in rank.items()} for rank in parts or ())
    except _FAULTS:
        return None
    return ranks if ranks and all(_fits(size, float) for rank in ranks for size in rank.values()) else None


def as_number(value: object) -> float | None:
    """A finite number; None where it is none."""
    return float(value) if isinstance(value, int | float) and _fits(value, float) else None
