"""`own`: how accurate predictions are on this machine: models are profiled, their plans simulated, then run."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from typing import Any

from benchmarks.outcome import Outcome, compared, in_turns, new_outcome
from benchmarks.timed_command import run_command, stagewright
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
    """Profile each model and run each of its plans, in turns; ratios are of the prediction over the measurement."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_turns({about[0]: partial(_turn, *about, folder) for about in _MODELS}, _REPEATS, voice)
    pairs = []
    for model, turns in found.items():
        for plan in turns[0]:
            predicted, measured = (
                measured_row(f"{model}, {plan}", side, [turn[plan][at] for turn in turns])
                for at, side in enumerate(("predicted", "measured"))
            )
            pairs.append((predicted, measured, None))
    outcome = compared(*pairs)
    error = statistics.median(abs(ratio.ratio.value - 1) for ratio in outcome["ratios"])
    title, figures = "Predicted over measured on this machine", {"median error, %": 100 * error}
    return new_outcome("own", title, _REPEATS, _STEPS, figures=figures, **outcome)


def _turn(model: str, image: int, batch: int, folder: str) -> dict[str, tuple[float, float]]:
    """Images per second of each plan, predicted and measured; profiled in a process of its own, as ranks run."""
    file, sizes = f"{folder}/{model}.json", sorted({batch // number for _, _, number in _PLANS})
    options = f"--together 2 --image {image} --classes {_CLASSES} --samples {','.join(map(str, sizes))}"
    run_command(stagewright("profile", model, "-o", file, *options.split()))
    found = {}
    for mode, placement, microbatches in _PLANS:
        plan = {"mode": mode, "placement": placement, "batch": batch, "microbatches": microbatches, "profile": file}
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": model, "classes": _CLASSES},
            "data": {"image": image, "samples": 256},
            "plan": plan,
            "run": {"steps": _STEPS, "runs": folder},
        }
        summary = run(make_config(FIXED, tables)).summary
        rates = summary["predicted_images_per_second"], summary["images_per_second"]
        found[f"{mode} {placement}, M {microbatches}"] = rates
    return found
