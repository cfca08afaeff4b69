"""`startup`: the seconds of a short `stagewright train` by part, beside importing torch alone.

    command ── loading and preparing ──► what will run ──► first step ── steps ──► done ──► prompt

It trains on the GPU where there is one.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.outcome import Outcome, in_turns, new_outcome
from benchmarks.timed_command import Printed, ended, run_command, stagewright
from stagewright.bench.result import measured_row
from stagewright.errors import RunFailed
from stagewright.voice import Voice

REPEATS = 5
STEPS = 12
OPTIONS = f"--model resnet18 --image 32 --batch 64 --placement 0:0 --steps {STEPS}"
_LINES = (re.compile(r", mode \w+: stage 0"), re.compile(rf"\bstep +1/{STEPS}\b"), re.compile(r"^done: "))
PARTS = (
    "loading and preparing, to the line that says what will run",
    "the rank, to its first step",
    f"the other {STEPS - 1} steps",
    'from "done" to the prompt',
)
_IN_ALL, _TORCH = "in all", "import torch alone"


def measure(voice: Voice) -> Outcome:
    """Train and import torch in turns, each time in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as folder:
        command = stagewright("train", *OPTIONS.split(), "--runs", str(Path(folder, "runs")))
        sides = {
            "train": lambda: split(command, run_command(command)),
            _TORCH: lambda: {_TORCH: run_command([sys.executable, "-c", "import torch"]).seconds},
        }
        found = in_turns(sides, REPEATS, voice)
    return make_outcome({name: [turn[name] for turn in turns] for turns in found.values() for name in turns[0]})


def split(command: Sequence[str], printed: Printed) -> dict[str, float]:
    """The seconds of each part, and in all."""
    moments = [printed.when(pattern) for pattern in _LINES]
    known = [moment for moment in moments if moment is not None]
    if len(known) < len(moments):
        raise RunFailed(ended(command, 0, printed.last))
    edges = [0.0, *known, printed.seconds]
    parts = [end - begin for begin, end in pairwise(edges)]
    return dict(zip(PARTS, parts, strict=True)) | {_IN_ALL: printed.seconds}


def make_outcome(found: Mapping[str, Sequence[float]]) -> Outcome:
    """A row for every part."""
    group = f"stagewright train {OPTIONS}"
    rows = tuple(measured_row(group, name, seconds) for name, seconds in found.items())
    return new_outcome("startup", "A short training command by part", REPEATS, STEPS, unit="seconds", rows=rows)
