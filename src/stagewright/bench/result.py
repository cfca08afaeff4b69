"""What a bench found, as bench.json holds it: every value of every repeat, and the machine it was measured on.

Suites, comparisons with stock PyTorch and benches of single parts all have an `Outcome`: rows of repeats, ratios of two
rows, and other figures. The fields of these classes are the keys of the file; those that old files lack have a default.
`make_cleaner` and `anonymous` remove what identifies a machine, a person or a network, for `--anonymise`.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from stagewright.bench.statistics import Goal, Interval, median_interval, outliers, paired_ratio
from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.hardware.environment import read_environment

FILE = "bench.json"
Kind = Literal["measured", "predicted", "left out", "failed"]
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b")
_V4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_V6 = re.compile(r"(?<![\w:.])(?=[0-9a-fA-F:]*:[0-9a-fA-F:]*:)[0-9a-fA-F:]{3,39}(?:%\w+)?(?![\w:])")
_PATH = re.compile(r"(?<![\w.)\]>])(?:~?/)(?:[^\s/\"'`:;,<>|()\[\]{}\\]+/)+([^\s/\"'`:;,<>|()\[\]{}\\]*)")


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


def measured_row(group: str, name: str, repeats: Iterable[Repeat | float], **about: Any) -> Row:
    """A row of at least one repeat: their median with its interval, and which of them stand out."""
    found = tuple(repeat if isinstance(repeat, Repeat) else Repeat(repeat) for repeat in repeats)
    rates = [repeat.rate for repeat in found]
    return Row(group, name, repeats=found, rate=median_interval(rates), outliers=outliers(rates), **about)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One row over another, repeat by repeat, and the goal for it."""

    group: str
    ours: str  # their names
    theirs: str
    first: Interval
    second: Interval
    ratio: Interval
    goal: str = ""
    is_met: bool | None = None  # None where there is no goal, or where the interval is too wide to say


def ratio_of(ours: Row, theirs: Row, goal: Goal | None = None) -> Ratio:
    """The ratio of two rows whose repeats were interleaved."""
    assert ours.rate is not None and theirs.rate is not None
    ratio = paired_ratio([repeat.rate for repeat in ours.repeats], [repeat.rate for repeat in theirs.repeats])
    goal_text, is_met = ("", None) if goal is None else (goal.text, goal.is_met(ratio))
    return Ratio(ours.group, ours.label, theirs.label, ours.rate, theirs.rate, ratio, goal_text, is_met)


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published run and what the simulator predicts for it, with the efficiency of the software that ran it."""

    system: str
    model: str
    cluster: str
    mode: str
    data: str
    precision: str
    batch: str
    predicted: float  # images per second
    published: float | None
    memory: tuple[float, ...]  # MiB
    published_memory: tuple[float, ...]
    epochs: tuple[float, ...]  # published seconds
    told: float | None = None  # in old files: error of the prediction fitted to the other runs only
    is_alone: bool = False
    held_out: bool = False


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
    unit: str = "images/s"  # of the rows; what ends in /s is better the larger it is, everything else the smaller
    ratios: tuple[Ratio, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)  # whatever else was measured, by its name and unit

    def groups(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found


def new_outcome(suite: str, title: str, repeats: int, steps: int = 0, **found: Any) -> Outcome:
    """An outcome of this machine and this minute."""
    here = read_environment()
    return Outcome(
        suite=suite,
        title=title,
        command=f"stagewright bench {suite}",
        date=time.strftime("%Y-%m-%d %H:%M"),
        repeats=repeats,
        steps=steps,
        machine=dict(here.rows()),
        cores=here.host.cores,
        topology="\n".join(here.topology.table()) if here.topology else "",
        **{"rows": (), **found},
    )


def from_json(tables: Any, where: str) -> Outcome:
    """Read an outcome; `where` names the file in errors."""
    try:
        return TypeAdapter(Outcome).validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where} is not a bench outcome: {key}: {first['msg'].lower()}") from error


def write_json(tables: Any, path: Path) -> None:
    """Write a file that is never half of one."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(tables, indent=1))
    draft.replace(path)


def read_outcome(folder: Path) -> Outcome:
    path = folder / FILE
    try:
        return from_json(json.loads(read_text(path)), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the folder of a bench") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def make_cleaner() -> Callable[[str], str]:
    """A function that removes names of this machine and its user, paths, addresses and UUIDs from a text."""
    names = _own_names()
    known = re.compile("|".join(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])" for name in names), re.IGNORECASE)

    def clean(text: str) -> str:
        text = _UUID.sub("<uuid>", text)
        text = _PATH.sub(lambda match: f"<path>/{match[1]}" if "." in match[1] else "<path>", text)
        text = _MAC.sub("<address>", text)
        text = _V4.sub(_address, text)
        text = _V6.sub(_address, text)
        return known.sub("<name>", text) if names else text

    return clean


def _own_names() -> list[str]:
    """Names of this machine, its user and the user's folder, the longest first."""
    host = socket.gethostname()
    found = {host, host.partition(".")[0], socket.getfqdn(), os.uname().nodename, Path.home().name, _user()}
    found |= {os.environ.get(name, "") for name in ("HOSTNAME", "USER", "LOGNAME", "SUDO_USER")}
    plain = {"", "localhost", "localhost.localdomain"}
    return sorted(found - plain, key=len, reverse=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry
        return ""


def _address(match: re.Match[str]) -> str:
    """Keep addresses that are the same on every machine: loopback, and the one that means all."""
    try:
        address = ipaddress.ip_address(match[0].partition("%")[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "<address>"


def anonymous(outcome: Outcome, clean: Callable[[str], str]) -> Outcome:
    """The same outcome with every text cleaned."""
    return from_json(cleaned(asdict(outcome), clean) | {"is_anonymised": True}, "the outcome")


def cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    """The same nested value with every text cleaned, keys included."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {cleaned(key, clean): cleaned(entry, clean) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(entry, clean) for entry in value]
    return value
