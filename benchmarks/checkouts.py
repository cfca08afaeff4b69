"""This checkout beside another one: seconds and speeds of commands in turns, and the bits that drawn plans train.

A change that should change nothing is held against the commit before it:

    git worktree add /tmp/before COMMIT && ln -s $PWD/.venv /tmp/before/.venv
    python -m benchmarks checkouts --before /tmp/before        # as fast?
    python -m benchmarks bits --before /tmp/before --seed 3    # the same numbers?
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.outcome import Outcome, compared, in_turns, new_outcome
from benchmarks.timed_command import Printed, run_command, stagewright
from stagewright.bench.result import measured_row
from stagewright.errors import RunFailed, UserError
from stagewright.voice import Voice

AFTER = Path(__file__).parents[1]
REPEATS = 5
_TRAIN = "train --model vgg-small --batch 64 --steps 60 --samples 4096 --json"
_SHORT = "train --model resnet18 --image 32 --batch 16 --steps 2 --samples 64"
SECONDS = {
    "--help": "--help",
    "plan, vgg16 on 8 cards": "plan vgg16 --cluster titan-v-8 --batch 224",
    "train, 2 emulated stages, 2 steps": f"{_SHORT} --placement 0:0.0:1 --mode sync --emulate",
    "train, 1 process, 2 steps": f"{_SHORT} --placement 0:0",
}
SPEEDS = {
    "one process": f"{_TRAIN} --placement 0:0 --mode dp",
    "2 stages, sync": f"{_TRAIN} --placement 0:0.0:1 --mode sync",
    "2 stages, lag 1": f"{_TRAIN} --placement 0:0.0:1 --mode stale",
    "data parallel, 2 ranks": f"{_TRAIN} --placement 0:0-1 --mode dp",
}

MODELS = ("vgg-small", "resnet8", "gpt-micro")
PLACEMENTS = {
    "dp": ("0:0", "0:0-1", "0:0-2"),
    "sync": ("0:0.0:1", "0:0-1.0:2", "0:0.0:1-2"),
    "stale": ("0:0.0:1", "0:0-1.0:2", "0:0.0:1.0:2"),
    "pipedream": ("0:0.0:1", "0:0-1.0:2"),
}
OPTIMIZERS = (
    "--optimizer sgd",
    "--optimizer sgd --nesterov --weight-decay 0.0005",
    "--optimizer adamw --lr 0.001",
    "--optimizer adamw --lr 0.001 --clip 1.0",
)
TOKENS = 4000


@dataclass(frozen=True, slots=True)
class Drawn:
    """The options of a short run, and the hashes of its last checkpoint by either checkout."""

    options: str
    before: dict[str, str]
    after: dict[str, str]
    why: str  # the last line of a command that failed

    @property
    def is_equal(self) -> bool:
        return bool(self.after) and self.before == self.after


def measure(before: Path, repeats: int | None, only: str | None, voice: Voice) -> Outcome:
    """Time every command of both checkouts in turns; a ratio above 1 says that this one is faster."""
    repeats, pairs = repeats or REPEATS, []
    work = [("commands/s", *one, _starts) for one in SECONDS.items()]
    work += [("images/s", *one, _speed) for one in SPEEDS.items()]
    for unit, name, words, rate in work:
        if only is None or only in name:
            sides = {side: partial(rate, place, words) for side, place in (("after", AFTER), ("before", before))}
            found = in_turns(sides, repeats, voice, name)
            ours, theirs = (measured_row(name, side, rates, unit=unit) for side, rates in found.items())
            pairs.append((ours, theirs, None))
    title = "This checkout beside another one"
    return new_outcome("checkouts", title, repeats, unit="images/s", **compared(*pairs))


def _starts(checkout: Path, words: str) -> float:
    """How often a whole command could run in a second."""
    return 1 / run_in(checkout, words).seconds


def _speed(checkout: Path, words: str) -> float:
    return float(json.loads(run_in(checkout, words).last)["images_per_second"])


def compare_bits(before: Path, seed: int, device: str, voice: Voice) -> Iterator[Drawn]:
    """Train ten plans with either checkout, every rank in one process, and compare their checkpoints."""
    with tempfile.TemporaryDirectory(prefix="stagewright-bits-") as folder:
        noise = random.Random(0)
        tokens = Path(folder, "tokens.bin")
        tokens.write_bytes(b"".join(noise.randrange(256).to_bytes(2, "little") for _ in range(TOKENS)))
        for number, options in enumerate(draw(seed, device, tokens)):
            voice.progress(f"plan {number + 1}: {options}")
            (old, wrong), (new, why) = (
                _trained(checkout, options, Path(folder, f"{number}-{side}"))
                for side, checkout in (("before", before), ("after", AFTER))
            )
            yield Drawn(options, old, new, why or wrong)


def draw(seed: int, device: str, tokens: Path) -> Iterator[str]:
    """Options of ten runs: every mode, three models (one with tied ends), every precision of the device."""
    chance = random.Random(seed)
    precisions = ("fp32", "bf16", "fp16") if device == "cuda" else ("fp32", "bf16", "fp64")
    for number in range(10):
        mode, model = list(PLACEMENTS)[number % len(PLACEMENTS)], MODELS[number % len(MODELS)]
        precision = chance.choice(precisions)
        if model == "gpt-micro" and mode != "sync" and precision == "fp16":
            precision = "bf16"  # tied weights take fp16 only without lag
        data = f"--data tokens:{tokens} --context 16 --limit 120" if model == "gpt-micro" else "--samples 120"
        yield (
            f"--model {model} --mode {mode} --placement {chance.choice(PLACEMENTS[mode])} {data} --batch 24 --steps 5 "
            f"--microbatches {chance.choice((4, 6))} --precision {precision} {chance.choice(OPTIMIZERS)} "
            f"--seed {chance.randrange(100)}{' --predict' if mode == 'stale' and chance.random() < 0.5 else ''} "
            f"--device {device}{' --deterministic --share-gpu' if device == 'cuda' else ''}"
        )


def _trained(checkout: Path, options: str, runs: Path) -> tuple[dict[str, str], str]:
    try:
        run_in(checkout, f"train {options} --emulate --runs {runs} --checkpoint-every 5 --monitor-every 0")
    except RunFailed as error:
        return {}, str(error)
    return dict(_hashes(runs)), ""


def _hashes(runs: Path) -> Iterator[tuple[str, str]]:
    """The bits of every tensor below a folder, as text."""
    for path in sorted(runs.rglob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for name in sorted(tensors.keys()):
                data = tensors.get_tensor(name).contiguous().reshape(-1).view(torch.uint8)
                yield f"{path.name}: {name}", data.numpy().tobytes().hex()


def run_in(checkout: Path, words: str) -> Printed:
    """Run a command in a checkout."""
    if not (checkout / "src" / "stagewright").is_dir():
        raise UserError(f"{checkout} has no src/stagewright; give the folder of a checkout")
    path = {"PYTHONPATH": f"{checkout / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        return run_command(stagewright(*words.split()), path, Path(folder))
