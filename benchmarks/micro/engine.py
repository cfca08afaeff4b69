"""`engine`: a script's own loop beside `stagewright train`: the same model, data and plan, in turns.

The script is this module: `python -m benchmarks.micro.engine OPTIONS` trains by an Engine, into a run folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import stagewright
from benchmarks.outcome import Outcome, new_outcome, ratio_of
from stagewright.bench.result import measured_row
from stagewright.config.toml import FIXED, make_config
from stagewright.model.load import build_model
from stagewright.run.train import run
from stagewright.voice import Voice

_REPEATS = 7
_STEPS = 60
_GOAL = 0.97


@dataclass(frozen=True, slots=True)
class Case:
    """One plan of one model."""

    model: str
    image: int
    batch: int
    microbatches: int
    placement: str
    mode: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.mode} {self.placement}, M {self.microbatches}"


_GPU = (("device", "cuda"), ("precision", "bf16"))
_CASES = {
    "cpu": (
        Case("vgg-small", 32, 64, 1, "0:0", "dp"),
        Case("vgg-small", 32, 64, 4, "0:0.0:1", "stale"),
    ),
    "cuda": (
        Case("resnet50", 224, 128, 1, "0:0", "dp", _GPU),
        Case("vgg16", 224, 128, 4, "0:0-2.0:3", "stale", (*_GPU, ("share_gpu", True))),
    ),
}


def measure(voice: Voice) -> Outcome:
    """Run both in turns, so that background load meets both."""
    cases = _CASES["cuda" if torch.cuda.is_available() else "cpu"]
    rates: dict[tuple[Case, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_REPEATS):
            for case in cases:
                for side in ("engine", "train") if number % 2 else ("train", "engine"):
                    voice.progress(f"repeat {number + 1} of {_REPEATS}: {case.model}, {case.name}, {side}")
                    rate = _by_command(case, folder) if side == "train" else _by_script(case, folder)
                    rates.setdefault((case, side), []).append(rate)
    rows, ratios = [], []
    for case in cases:
        ours = measured_row(case.model, case.name, rates[case, "engine"], data="engine")
        theirs = measured_row(case.model, case.name, rates[case, "train"], data="train")
        rows += [ours, theirs]
        found = replace(ratio_of(ours, theirs), ours=f"engine, {case.name}", theirs="train")
        ratios.append(found)
    return new_outcome(
        "engine",
        f"A script's own loop over stagewright train (goal {_GOAL})",
        _REPEATS,
        _STEPS,
        rows=tuple(rows),
        ratios=tuple(ratios),
    )


def _by_command(case: Case, folder: str) -> float:
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": case.model},
        "data": {"image": case.image, "samples": _STEPS * case.batch},
        "plan": {
            "placement": case.placement,
            "mode": case.mode,
            "batch": case.batch,
            "microbatches": case.microbatches,
        },
        "optimizer": {"lr": 0.01, "momentum": 0.9},
        "run": {"steps": _STEPS, "runs": folder, "unproven": True, "monitor_every": 0.0, **dict(case.options)},
    }
    return float(run(make_config(FIXED, tables, given=())).summary["images_per_second"])


def _by_script(case: Case, folder: str) -> float:
    options = {
        "placement": case.placement,
        "mode": case.mode,
        "microbatches": case.microbatches,
        "runs": folder,
        "samples": _STEPS * case.batch,
        "image": case.image,
        "unproven": True,
        "monitor_every": 0.0,
        **dict(case.options),
    }
    given = json.dumps({"model": case.model, "batch": case.batch, "options": options})
    subprocess.run([sys.executable, "-m", "benchmarks.micro.engine", given], check=True, capture_output=True)
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
