"""Reads a run folder into a `Run`: lines may be torn and files missing; what can't be read is left out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from stagewright import events
from stagewright.events import Evaluated, GpuUsage, RankUsage, Replaced, Restarted, Resumed, Saved, Step, Usage
from stagewright.metrics import Timeline

_MOST_COUNT, _MOST_SIZE = 2**63, 1e300  # beyond these, arithmetic overflows
_PLAN_FIELDS: dict[str, Any] = {
    "mode": str,
    "placement": str,
    "batch": int,
    "microbatches": int,
    "cuts": list[str],
    "versions": list[int],
    "depths": list[int],
}
_BAD_CONTENT = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class RankMap:
    """Which ranks each stage has, and how a report names them."""

    labels: tuple[str, ...]  # one per rank
    stages: tuple[tuple[int, ...], ...]  # the ranks of each stage
    devices: tuple[str, ...]  # of each stage, as the placement writes them


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a report needs from a run folder; what the folder lacks is empty or None."""

    folder: Path
    rank_map: RankMap
    plan: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any] | None
    batches: int | None  # to train in total
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluated, ...]
    restarts: tuple[Restarted, ...]
    resumes: tuple[Resumed, ...]  # one for each time that it was resumed
    replaced: int
    saved: tuple[int, ...]  # batches after which a checkpoint was saved
    usage: tuple[tuple[Usage, ...], ...]  # samples of each machine that has a monitor's file
    timeline: Timeline | None
    memory: tuple[dict[str, float], ...] | None  # bytes by part, of each rank, as the planner predicts

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
    def images_per_second(self) -> float | None:
        """From the summary; of a run without one, from its steps except the first two."""
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
        """The name of a process that the monitor saw: its rank, or all ranks of an emulated run."""
        if self.is_emulated:
            return "all ranks, one process"
        return self.rank_map.labels[rank] if rank < len(self.rank_map.labels) else f"rank {rank}"

    def section(self, name: str) -> dict[str, Any]:
        """A table of its configuration."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def is_emulated(config: dict[str, Any]) -> bool:
    """Whether a configuration runs all ranks in one process."""
    run = config.get("run")
    return isinstance(run, dict) and run.get("emulate") is True


def read_run(folder: Path, rank_map: RankMap) -> Run:
    """Read all files of a run folder."""
    records = list(filter(None, map(as_record, read_lines(folder / "metrics.jsonl"))))
    return Run(
        folder=folder,
        rank_map=rank_map,
        plan=read_plan_fields(folder),
        config=read_tables(folder / "config.toml"),
        environment=read_object(folder / "env.json") or {},
        summary=read_object(folder / "summary.json"),
        batches=read_batches(folder),
        steps=tuple(record for record in records if isinstance(record, Step)),
        evaluations=tuple(record for record in records if isinstance(record, Evaluated)),
        restarts=tuple(record for record in records if isinstance(record, Restarted)),
        resumes=tuple(record for record in records if isinstance(record, Resumed)),
        replaced=sum(isinstance(record, Replaced) for record in records),
        saved=tuple(record.batch for record in records if isinstance(record, Saved)),
        usage=tuple(filter(None, (tuple(read_usage(path)) for path in sorted(folder.glob("monitor*.jsonl"))))),
        timeline=_read_timeline(folder / "trace.json"),
        memory=_read_memory(folder / "memory.json"),
    )


def as_record(fields: dict[str, Any]) -> Any:
    """A line of metrics.jsonl as an event; None where its kind is unknown or a value has a wrong type."""
    try:
        record = events.as_record(fields)
    except _BAD_CONTENT:
        return None
    return record if _is_sound(record) else None


def read_usage(path: Path) -> Iterator[Usage]:
    """The samples of a monitor's file; torn lines are left out."""
    return filter(None, map(as_usage, read_lines(path)))


def as_usage(fields: dict[str, Any]) -> Usage | None:
    """A line of monitor.jsonl as a sample; None where a value is missing or has a wrong type."""
    try:
        gpus = tuple(_as_gpu(gpu) for gpu in fields["gpus"])
        ranks = tuple(RankUsage(**rank) for rank in fields["ranks"])
        usage = Usage(fields["seconds"], fields["cores"], fields["memory"], gpus, ranks, fields.get("start", 0))
    except _BAD_CONTENT:
        return None
    return usage if all(map(_is_sound, (usage, *gpus, *ranks))) else None


def _as_gpu(fields: dict[str, Any]) -> GpuUsage:
    reasons = fields.get("throttled", ())
    return GpuUsage(**{**fields, "throttled": tuple(reasons) if isinstance(reasons, list) else reasons})


def _is_sound(record: Any) -> bool:
    """Whether every field holds its type; a loss may be infinite or NaN, as in a run that diverged."""
    return all(
        _fits(value := getattr(record, name), hint) or (name == "loss" and isinstance(value, float))
        for name, hint in _hints(record.__class__).items()
    )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has a type: integers are counts (not negative), floats finite, and lists may stand for tuples."""
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
    """The objects of a file of JSON lines, without torn lines; nothing where the file is missing."""
    try:
        return parse_lines(path.read_bytes().splitlines())
    except OSError:
        return iter(())


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines; torn lines are left out."""
    for line in lines:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict):
            yield fields


def read_plan_fields(folder: Path) -> dict[str, Any]:
    """The fields of plan.json; those of a wrong type are left out."""
    found = read_object(folder / "plan.json") or {}
    return {name: value for name, value in found.items() if _fits(value, _PLAN_FIELDS.get(name, object))}


def read_batches(folder: Path) -> int | None:
    """How many batches a run is to train, by its job.json; None where unknown."""
    batches = (read_object(folder / "job.json") or {}).get("batches")
    return batches if _fits(batches, int) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where the file is missing or damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_tables(path: Path) -> dict[str, Any]:
    """A TOML file; empty where it is missing or damaged."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _read_timeline(path: Path) -> Timeline | None:
    trace = read_object(path)
    try:
        timeline = None if trace is None else Timeline.of_trace(trace)
    except _BAD_CONTENT:
        return None
    return timeline if timeline is not None and all(map(_is_sound, timeline.spans)) else None


def _read_memory(path: Path) -> tuple[dict[str, float], ...] | None:
    found = read_object(path)
    try:
        parts = found["ranks"] if found else None
        ranks = tuple({str(name): float(size) for name, size in rank.items()} for rank in parts or ())
    except _BAD_CONTENT:
        return None
    return ranks if ranks and all(_fits(size, float) for rank in ranks for size in rank.values()) else None


def as_number(value: object) -> float | None:
    """A finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and _fits(value, float) else None
