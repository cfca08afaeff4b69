"""`own`: how accurate predictions are on this machine: models are profiled, their plans simulated, then run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.outcome import Outcome, new_outcome, ratio_of
from stagewright.bench.result import measured_row
from stagewright.config.toml import FIXED, make_config
from stagewright.run.train import run
from stagewright.voice import Voice

_PLANS = (("dp", "0:0-1", 2), ("sync", "0:0.0:1", 4), ("stale", "0:0.0:1", 4))
_MODELS = (("vgg-small", 32, 64), ("alexnet", 64, 32), ("resnet18", 64, 32))  # name, image side, batch
_CLASSES = 10
_REPEATS = 3
_STEPS = 20


def measure(voice: Voice) -> Outcome:
    """Profile each model and run each of its plans, in turns, so that background load meets both."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_REPEATS):
            for model, image, batch in _MODELS:
                voice.progress(f"repeat {number + 1} of {_REPEATS}: profiling {model}")
                file = str(Path(folder) / f"{model}.json")
                _profile(model, image, batch, file)
                for mode, placement, microbatches in _PLANS:
                    voice.progress(f"repeat {number + 1} of {_REPEATS}: {model}, {mode} {placement}")
                    pair = _run(model, image, batch, mode, placement, microbatches, file, folder)
                    found.setdefault((model, f"{mode} {placement}, M {microbatches}"), []).append(pair)
    return make_outcome(found)


def _profile(model: str, image: int, batch: int, file: str) -> None:
    """Profile in a separate process, just as ranks run in separate processes."""
    sizes = sorted({batch // microbatches for _, _, microbatches in _PLANS})
    command = [sys.executable, "-m", "stagewright", "profile", model, "--together", "2", "-o", file]
    command += ["--image", str(image), "--classes", str(_CLASSES), "--samples", ",".join(map(str, sizes))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _run(
    model: str, image: int, batch: int, mode: str, placement: str, microbatches: int, file: str, folder: str
) -> tuple[float, float]:
    """Images per second of one run, predicted and measured."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": model, "classes": _CLASSES},
        "data": {"image": image, "samples": 256},
        "plan": {"mode": mode, "placement": placement, "batch": batch, "microbatches": microbatches, "profile": file},
        "run": {"steps": _STEPS, "runs": folder},
    }
    summary = run(make_config(FIXED, tables)).summary
    return summary["predicted_images_per_second"], summary["images_per_second"]


def make_outcome(found: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> Outcome:
    """The prediction over the measurement, for every plan of every model."""
    rows, ratios = [], []
    for (model, plan), pairs in found.items():
        predicted = measured_row(model, plan, [pair[0] for pair in pairs], data="predicted")
        measured = measured_row(model, plan, [pair[1] for pair in pairs], data="measured")
        rows += [predicted, measured]
        ratios.append(replace(ratio_of(predicted, measured), ours=plan, theirs="measured"))
    error = statistics.median(abs(ratio.ratio.value - 1) for ratio in ratios)
    return new_outcome(
        "own",
        "Predicted over measured on this machine",
        _REPEATS,
        _STEPS,
        rows=tuple(rows),
        ratios=tuple(ratios),
        figures={"median error, %": 100 * error},
    )
