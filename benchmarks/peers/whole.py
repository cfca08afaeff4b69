"""Whole commands on one GPU: `stagewright train` as a user types it, beside a plain script, in turns.

Each turn is a fresh process, with loader, metrics and monitor on our side; the script is `plain_loop`. In the first
turn of each side the compiler's caches are empty. A pair `from_files` has the same command on both sides: once it
trains from files of raw pixels, once on synthetic images.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.outcome import Goal, Outcome, at_least, at_most, compared, in_turns
from benchmarks.timed_command import ended, run_command, stagewright
from stagewright.bench.data import InMemory, make_jpegs
from stagewright.bench.result import measured_row
from stagewright.data.convert import Shrink, convert
from stagewright.data.datasets import Kind
from stagewright.errors import RunFailed
from stagewright.hardware.host import num_cores
from stagewright.voice import Voice

_FIRST = 10  # steps, after which a command has started
_FIRST_LINE = re.compile(rf"\bstep +{_FIRST}/")
_AS_FAST, _WITHIN = 0.99, 0.01  # a ratio of speeds, and the half-width of its interval
_FROM_FILES = 0.97
_IMAGES, _PER_PART, _SIDE = 2048, 512, 256  # of the files: half a gigabyte, which the page cache holds
_SLOWER_START = 1.2
_STEPS, _BATCH = 110, 128  # of a command, and the batch below which it takes more
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class CommandPair:
    """One model at one batch, compiled, on one GPU: a command beside a script, or from files beside synthetic data."""

    model: str
    batch: int
    precision: str
    mode: str = "default"  # of the script's torch.compile
    from_files: bool = False  # of raw pixels, as `data convert --side 256 --raw` makes them
    images: int = _IMAGES  # in these files

    def __str__(self) -> str:
        about = f"batch {self.batch:,}, {self.precision}, compiled"
        if self.from_files:
            return f"{self.model} on one GPU from files of raw pixels, {about}"
        by = "" if self.mode == "default" else f" (script: {self.mode})"
        return f"{self.model} on one GPU, whole commands, {about}{by}"

    @property
    def names(self) -> tuple[str, str]:
        """Of our side and the other one."""
        if self.from_files:
            return "stagewright train, from files", "stagewright train, synthetic"
        return "stagewright train", "plain script"

    @property
    def goal(self) -> Goal:
        """Of our speed over the other side's."""
        return at_least(_FROM_FILES) if self.from_files else at_least(_AS_FAST, within=_WITHIN)

    @property
    def steps(self) -> int:
        """Of each command."""
        return _STEPS * max(1, _BATCH // self.batch)

    def prepare(self, folder: Path) -> None:
        """Make what the commands need."""
        if self.from_files:
            shrink = Shrink(_SIDE, is_raw=True, threads=num_cores())
            convert(InMemory(make_jpegs(), self.images), Kind.OFRECORD, folder / "images", _PER_PART, shrink=shrink)

    def commands(self, steps: int, folder: Path) -> tuple[list[str], list[str]]:
        """Of both sides; their files are below the folder."""
        synthetic = self._command(f"--data synthetic --samples {self.batch * steps}", steps, folder)
        if self.from_files:
            return self._command(f"--data ofrecord:{folder / 'images'}", steps, folder), synthetic
        given = (self.model, str(self.batch), self.precision, str(steps), self.mode)
        return synthetic, [sys.executable, "-m", "benchmarks.peers.plain_loop", *given]

    def _command(self, data: str, steps: int, folder: Path) -> list[str]:
        options = f"--model {self.model} --batch {self.batch} --precision {self.precision} --compile --placement 0:0"
        words = [*options.split(), *data.split(), "--steps", str(steps), "--runs", str(folder / "runs")]
        return stagewright("train", *words)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one command reached."""

    rate: float  # images per second, once it is steady
    started: float  # seconds from its start to the end of its first steps


def run_pair(outcome: Outcome, pair: CommandPair, repeats: int, steps: int, voice: Voice) -> Outcome:
    """Add a pair: the speeds of both sides, and the seconds to their first steps, without and with caches."""
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as made:
        folder = Path(made)
        pair.prepare(folder)
        sides = {}
        for side, command in zip(pair.names, pair.commands(steps, folder), strict=True):
            caches = {name: str(folder / side.split()[0] / name) for name in _CACHES}
            sides[side] = partial(_take_turn, command, folder / "runs", caches)
        turns = in_turns(sides, repeats, voice, str(pair))
    about: dict[str, Any] = {"model": pair.model, "precision": pair.precision}
    plan = about | {"batch": pair.batch, "mode": "dp", "device": "cuda", "placement": "0:0", "microbatches": 1}
    ours, theirs = (measured_row(str(pair), side, [turn.rate for turn in own], **plan) for side, own in turns.items())
    pairs = [(ours, theirs, pair.goal)]
    for state, which in () if pair.from_files else (("empty", slice(1)), ("full", slice(1, None))):
        if repeats > (which.start or 0):
            group = f"{pair}: first {_FIRST} steps, {state} caches"
            starts = {side: [turn.started for turn in own[which]] for side, own in turns.items()}
            ours, theirs = (measured_row(group, side, own, unit="seconds", **about) for side, own in starts.items())
            pairs.append((ours, theirs, at_most(_SLOWER_START)))
    found = compared(*pairs)
    return replace(outcome, rows=(*outcome.rows, *found["rows"]), ratios=(*outcome.ratios, *found["ratios"]))


def _take_turn(command: Sequence[str], runs: Path, caches: Mapping[str, str]) -> _Turn:
    """Run a side once; a script prints its speed last, a command of ours leaves it in its run folder."""
    before = set(runs.glob("*"))
    printed = run_command(command, caches)
    started = printed.when(_FIRST_LINE)
    if started is None:
        raise RunFailed(ended(command, 0, printed.last))
    new = set(runs.glob("*")) - before
    if not new:
        return _Turn(float(printed.last), started)
    return _Turn(float(json.loads((new.pop() / "summary.json").read_text())["images_per_second"]), started)
