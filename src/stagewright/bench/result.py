"""What a bench found, as bench.json holds it: every value of every repeat, and the machine it was measured on.

The fields of these classes are the keys of the file; those that old files lack have a default.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from stagewright.bench.statistics import Interval, median_interval, outliers
from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.hardware.environment import read_environment

FILE = "bench.json"
Kind = Literal["measured", "predicted", "left out", "failed"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """One measurement: of a configuration, a run in fresh processes."""

    rate: float  # in the row's or the outcome's unit: images per second after the warm-up
    warmup: int = 0  # batches that do not count
    is_steady: bool = True  # a plateau was found
    times: tuple[float, ...] = ()  # seconds per batch of every segment, including the warm-up
    loss: float | None = None
    run: str = ""  # its folder in logs.zip
    memory: tuple[int, ...] = ()  # bytes of the fullest rank of each stage, where a monitor ran
    gpu_memory: tuple[int, ...] = ()  # the same, as counted by the GPU's driver
    others: float | None = None  # cores that other processes kept busy
    throttled: tuple[str, ...] = ()
    foreign: int = 0  # the most processes of other programs on one GPU
    metrics: Mapping[str, float] = field(default_factory=dict)  # of its last evaluation


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: measured, predicted, or why it is neither."""

    group: str
    name: str
    data: str = ""
    kind: Kind = "measured"
    is_baseline: bool = False
    model: str = ""
    mode: str = ""
    precision: str = ""
    batch: int = 0
    placement: str = ""
    device: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # every option, as `train --config` reads them
    cuts: tuple[str, ...] = ()
    microbatches: int = 0
    versions: tuple[int, ...] = ()
    cluster: str | None = None  # where it is predicted
    reason: str = ""  # why it was left out or failed
    repeats: tuple[Repeat, ...] = ()
    rate: Interval | None = None
    speedup: Interval | None = None  # over the group's baseline with the same data
    outliers: tuple[int, ...] = ()  # positions of repeats that stand out; they still count
    memory: tuple[float, ...] = ()  # bytes by stage
    step_lines: tuple[str, ...] = ()  # of its first repeat
    epoch_seconds: float | None = None  # of ImageNet
    note: str = ""
    unit: str = ""  # of its rates, where it is not the outcome's: tokens/s

    @property
    def label(self) -> str:
        return f"{self.name}, {self.data}" if self.data else self.name

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.group, self.name, self.data)

    def measured(self, repeats: tuple[Repeat, ...]) -> Row:
        """The row with these repeats: their median with its interval, and which of them stand out."""
        rates = [repeat.rate for repeat in repeats]
        return replace(self, repeats=repeats, rate=median_interval(rates), outliers=outliers(rates))


def measured_row(group: str, name: str, repeats: Iterable[Repeat | float], **about: Any) -> Row:
    """A row of at least one repeat."""
    found = (repeat if isinstance(repeat, Repeat) else Repeat(repeat) for repeat in repeats)
    return Row(group, name, **about).measured(tuple(found))


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
    topology: str = ""
    is_anonymised: bool = False
    is_whole: bool = True  # False where it was interrupted
    unit: str = "images/s"  # of the rows; what ends in /s is better the larger it is, everything else the smaller

    def groups(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found


Found = TypeVar("Found", bound=Outcome)


def new_outcome(
    suite: str,
    title: str,
    repeats: int,
    steps: int = 0,
    kind: type[Found] = Outcome,  # type: ignore[assignment]
    **found: Any,
) -> Found:
    """An outcome of this machine and this minute."""
    here = read_environment()
    found = {
        "rows": (),
        "machine": dict(here.rows()),
        "cores": here.host.cores,
        "topology": "\n".join(here.topology.table()) if here.topology else "",
        **found,
    }
    return kind(suite, title, f"stagewright bench {suite}", time.strftime("%Y-%m-%d %H:%M"), repeats, steps, **found)


def from_json(tables: Any, where: str, kind: type[Found] = Outcome) -> Found:  # type: ignore[assignment]
    """Read an outcome; `where` names the file in errors."""
    try:
        return TypeAdapter(kind).validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where} is not a bench outcome: {key}: {first['msg'].lower()}") from error


def read_outcome(folder: Path, kind: type[Found] = Outcome) -> Found:  # type: ignore[assignment]
    path = folder / FILE
    try:
        return from_json(json.loads(read_text(path)), str(path), kind)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the folder of a bench") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
