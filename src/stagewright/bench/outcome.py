"""What a bench found, as it stands in bench.json: every value of every repeat, and what they were measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stagewright.bench.interval import Interval

FILE = "bench.json"
Kind = Literal["measured", "predicted", "left out", "failed"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run of a configuration, in fresh processes."""

    rate: float  # images a second behind the warm-up
    warmup: int  # batches that do not count
    is_steady: bool  # a plateau was found
    times: tuple[float, ...]  # seconds of a batch, segment by segment, warm-up included
    loss: float | None
    run: str  # its folder in logs.zip
    memory: tuple[int, ...] = ()  # bytes of the fullest rank of each stage, where the monitor told
    gpu_memory: tuple[int, ...] = ()  # the same as the GPU's driver counts it
    others: float | None = None  # cores that other processes kept busy
    throttled: tuple[str, ...] = ()
    foreign: int = 0  # most processes of others on the GPUs


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: measured, predicted, or why it is neither."""

    group: str
    name: str
    data: str
    kind: Kind
    is_baseline: bool
    model: str
    mode: str
    precision: str
    batch: int
    placement: str
    device: str
    options: Mapping[str, Any]  # every option, as `train --config` reads them
    cuts: tuple[str, ...] = ()
    microbatches: int = 0
    versions: tuple[int, ...] = ()
    cluster: str | None = None  # where it is predicted
    reason: str = ""  # why it was left out or failed
    repeats: tuple[Repeat, ...] = ()
    rate: Interval | None = None
    speedup: Interval | None = None  # over the group's baseline with the same data
    outliers: tuple[int, ...] = ()  # repeats that stand out; they count all the same
    memory: tuple[float, ...] = ()  # bytes by stage
    step_lines: tuple[str, ...] = ()  # of its first repeat
    epoch_seconds: float | None = None  # of ImageNet

    @property
    def label(self) -> str:
        return f"{self.name}, {self.data}"

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.group, self.name, self.data)


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published run beside what the simulator says of it, by its own software's efficiency."""

    system: str
    model: str
    cluster: str
    mode: str
    data: str
    precision: str
    batch: str
    predicted: float  # images a second
    published: float | None
    told: float | None  # error when its figures are fitted to the other runs alone
    is_alone: bool
    memory: tuple[float, ...]  # MiB
    published_memory: tuple[float, ...]
    epochs: tuple[float, ...]  # published seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole bench."""

    suite: str
    title: str
    command: str
    date: str
    repeats: int
    steps: int
    machine: Mapping[str, str]
    rows: tuple[Row, ...]
    cores: int = 0  # of the machine
    published: tuple[PublishedRow, ...] = ()
    topology: str = ""
    is_anonymised: bool = False
    is_whole: bool = True  # False where it was interrupted

    def groups(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found


def as_json(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome)


def from_json(tables: Any, where: str) -> Outcome:
    """An outcome as it was written, or one line on what is wrong with the file."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Outcome).validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where} is no file of a bench: {key}: {first['msg'].lower()}") from error


def write_outcome(outcome: Outcome, folder: Path) -> None:
    draft = folder / f"{FILE}.draft"
    draft.write_text(json.dumps(as_json(outcome), indent=1))
    draft.replace(folder / FILE)


def read_outcome(folder: Path) -> Outcome:
    path = folder / FILE
    try:
        return from_json(json.loads(path.read_text()), str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the folder of a bench") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
