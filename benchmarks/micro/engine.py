"""`engine`: a script's own loop beside `stagewright train`: the same model, data and plan, in turns.

The script is this module: `python -m benchmarks.micro.engine OPTIONS` trains by an Engine, into a run folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stagewright
from benchmarks.outcome import Outcome, compared, in_turns, new_outcome
from benchmarks.timed_command import run_command
from stagewright.bench.result import measured_row
from stagewright.config.toml import FIXED, make_config
from stagewright.model.load import build_model
from stagewright.run.train import run
from stagewright.voice import Voice

_REPEATS = 7
_STEPS = 60
_GOAL = 0.97
_RUN = {"unproven": True, "monitor_every": 0.0}


@dataclass(frozen=True, slots=True)
class Case:
    """One plan of one model."""

    model: str
    image: int
    batch: int
    plan: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "{0}, {mode} {placement}, M {microbatches}".format(self.model, **self.plan)

    @property
    def data(self) -> dict[str, int]:
        return {"image": self.image, "samples": _STEPS * self.batch}


_ALONE = {"placement": "0:0", "mode": "dp", "microbatches": 1}
_STALE = {"placement": "0:0.0:1", "mode": "stale", "microbatches": 4}
_GPU = {"device": "cuda", "precision": "bf16"}
_CASES = {
    "cpu": (Case("vgg-small", 32, 64, _ALONE), Case("vgg-small", 32, 64, _STALE)),
    "cuda": (
        Case("resnet50", 224, 128, _ALONE, _GPU),
        Case("vgg16", 224, 128, _STALE | {"placement": "0:0-2.0:3"}, _GPU | {"share_gpu": True}),
    ),
}


def measure(voice: Voice) -> Outcome:
    """Run both in turns."""
    cases = _CASES["cuda" if torch.cuda.is_available() else "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            (case.name, side): partial(rate, case, folder)
            for case in cases
            for side, rate in (("engine", _by_script), ("train", _by_command))
        }
        rates = in_turns(sides, _REPEATS, voice)
    rows = {(group, side): measured_row(group, side, found) for (group, side), found in rates.items()}
    pairs = [(rows[case.name, "engine"], rows[case.name, "train"], None) for case in cases]
    title = f"A script's own loop over stagewright train (goal {_GOAL})"
    return new_outcome("engine", title, _REPEATS, _STEPS, **compared(*pairs))


def _by_command(case: Case, folder: str) -> float:
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": case.model},
        "data": case.data,
        "plan": {**case.plan, "batch": case.batch},
        "optimizer": {"lr": 0.01, "momentum": 0.9},
        "run": {**_RUN, "steps": _STEPS, "runs": folder, **case.run},
    }
    return float(run(make_config(FIXED, tables, given=())).summary["images_per_second"])


def _by_script(case: Case, folder: str) -> float:
    options = {**case.plan, **case.data, **_RUN, "runs": folder, **case.run}
    given = json.dumps({"model": case.model, "batch": case.batch, "options": options})
    run_command([sys.executable, "-m", "benchmarks.micro.engine", given])
    newest = max(Path(folder).glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    return float(json.loads(newest.read_text())["images_per_second"])


def main() -> None:
    """The script; with as many threads as a rank of the command has."""
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    engine = stagewright.Engine(
        build_model(given["model"], 0),
        loss="cross-entropy",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
        **given["options"],
    )
    for _ in engine.epoch("synthetic", batch=given["batch"]):
        pass


if __name__ == "__main__":
    main()
