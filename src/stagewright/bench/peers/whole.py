"""Whole commands on one GPU: `stagewright train` as a user types it, beside a plain script, in turns.

Each turn is a fresh process, with loader, metrics and monitor on our side; the script is `plain_loop`. In the first
turn of each side the compiler's caches are empty.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stagewright.bench.result import Outcome, Ratio, Row, measured_row, ratio_of
from stagewright.bench.statistics import at_least, at_most
from stagewright.errors import RunFailed

_FIRST = 10  # steps, after which a command has started
_FIRST_LINE = re.compile(rf"\bstep +{_FIRST}/")
_AS_FAST, _WITHIN = 0.99, 0.01  # a ratio of speeds, and the half-width of its interval
_SLOWER_START = 1.2
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True, slots=True)
class Heat:
    """One model at one batch, compiled, on one GPU."""

    model: str
    batch: int
    precision: str

    def __str__(self) -> str:
        return f"{self.model} on one GPU, whole commands, batch {self.batch:,}, {self.precision}, compiled"

    def ours(self, steps: int, folder: Path) -> list[str]:
        """The command that a user types."""
        options = f"--model {self.model} --batch {self.batch} --precision {self.precision} --compile --placement 0:0"
        run = f"--data synthetic --samples {self.batch * steps} --steps {steps} --runs"
        return [sys.executable, "-m", "stagewright", "train", *options.split(), *run.split(), str(folder)]

    def theirs(self, steps: int) -> list[str]:
        """The plain script."""
        given = (self.model, str(self.batch), self.precision, str(steps))
        return [sys.executable, "-m", "stagewright.bench.peers.plain_loop", *given]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one command reached."""

    rate: float  # images per second, once it is steady
    started: float  # seconds from its start to the end of its first steps


def run_heat(outcome: Outcome, heat: Heat, repeats: int, steps: int, progress: Callable[[str], None]) -> Outcome:
    """Add a heat: the speeds of both sides, and the seconds to their first steps, without and with caches."""
    turns: dict[str, list[_Turn]] = {"stagewright train": [], "plain script": []}
    with tempfile.TemporaryDirectory(prefix="stagewright-bench-") as made:
        folder = Path(made)
        for number in range(repeats):
            for side in sorted(turns, reverse=number % 2 == 0):
                progress(f"{heat}: turn {number + 1} of {repeats}, {side}")
                caches = {name: str(folder / side.split()[0] / name) for name in _CACHES}
                if side == "stagewright train":
                    turns[side].append(_train(heat, steps, folder / "runs", caches))
                else:
                    turns[side].append(_script(heat, steps, caches))
    rows: list[Row] = []
    ratios: list[Ratio] = []
    found = (
        (_rates(heat, turns), at_least(_AS_FAST, within=_WITHIN)),
        (_started(heat, turns, "empty caches", slice(1)), at_most(_SLOWER_START)),
        (_started(heat, turns, "full caches", slice(1, None)), at_most(_SLOWER_START)),
    )
    for (ours, theirs), goal in (pair for pair in found if pair[0]):
        rows += [ours, theirs]
        ratios.append(ratio_of(ours, theirs, goal))
    return replace(outcome, rows=(*outcome.rows, *rows), ratios=(*outcome.ratios, *ratios))


def _rates(heat: Heat, turns: Mapping[str, Sequence[_Turn]]) -> list[Row]:
    about = {"model": heat.model, "precision": heat.precision, "batch": heat.batch, "mode": "dp", "device": "cuda"}
    return [
        measured_row(str(heat), side, [turn.rate for turn in taken], placement="0:0", microbatches=1, **about)
        for side, taken in turns.items()
    ]


def _started(heat: Heat, turns: Mapping[str, Sequence[_Turn]], caches: str, which: slice) -> list[Row]:
    """The seconds to the first steps in some of the turns; nothing where there are none."""
    return [
        measured_row(
            f"{heat}: first {_FIRST} steps, {caches}",
            side,
            [turn.started for turn in taken[which]],
            model=heat.model,
            precision=heat.precision,
            unit="seconds",
        )
        for side, taken in turns.items()
        if taken[which]
    ]


def _train(heat: Heat, steps: int, folder: Path, caches: Mapping[str, str]) -> _Turn:
    started, _ = _run(heat.ours(steps, folder), caches)
    newest = max(folder.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    return _Turn(float(json.loads(newest.read_text())["images_per_second"]), started)


def _script(heat: Heat, steps: int, caches: Mapping[str, str]) -> _Turn:
    started, last = _run(heat.theirs(steps), caches)
    return _Turn(float(last), started)


def _run(command: Sequence[str], caches: Mapping[str, str]) -> tuple[float, str]:
    """Run a command; the seconds until its line of the first steps, and its last line."""
    began, started, lines = time.monotonic(), None, [""]
    environment = {**os.environ, **caches, "PYTHONUNBUFFERED": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if started is None and _FIRST_LINE.search(line):
                started = time.monotonic() - began
        process.wait()
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    if process.returncode or started is None:
        why = said[-1] if said else lines[-1]
        raise RunFailed(f"{' '.join(command[1:4])} ended with {process.returncode}: {why[:200]}")
    return started, lines[-1]
