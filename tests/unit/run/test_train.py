"""What a run with averaged weights, a best checkpoint and an early stop prints, writes and leaves to go on with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import stagewright
from stagewright.errors import UserError
from stagewright.events import Evaluated
from stagewright.run.train import Result
from stagewright.runtime.checkpoint.folder import open_checkpoint
from tests.commands import fails, prints
from tests.keeping import same_bits
from tests.waiting import LONG

TOP1 = {1: 0.25, 2: 0.5, 3: 0.125, 4: 0.375, 5: 0.25, 6: 0.75}  # by batch
OPTIONS: dict[str, Any] = {
    "image": 8, "samples": 16, "batch": 8, "placement": "0:0-1", "mode": "dp", "emulate": True, "lr": 0.05,
    "steps": 6, "eval_every": 1, "best": "top1", "early_stop": 2, "ema": 0.5, "keep": 1,
}  # fmt: skip


def make_net() -> torch.nn.Module:
    layers = (torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    return torch.nn.Sequential(*layers)


@pytest.fixture(autouse=True, scope="module")
def scripted() -> Iterator[None]:
    """Evaluations find what `TOP1` says."""
    found = staticmethod(lambda batch, scores: Evaluated(batch, 16, 1.0, {"top1": TOP1[batch]}))
    with mock.patch.object(Evaluated, "of", found):
        yield


def train(folder: Path, **settings: Any) -> Result:
    return stagewright.train(f"{__name__}:make_net", runs=str(folder), **(OPTIONS | settings))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("stopped")
    return train(folder, checkpoint_every=3, export=str(folder / "weights.safetensors"))


def test_a_run_that_stops_early_is_finished_and_names_its_best(stopped: Result) -> None:
    assert [step.batch for step in stopped.steps] == [0, 1, 2, 3]
    best = stopped.folder / "checkpoints" / "2"
    assert stopped.summary["stopped_early"] == (
        "stopped early after step 4: no better top-1 than 50.0% (step 2) in 2 evaluations"
    )
    assert stopped.summary["best"] == {"metric": "top1", "value": 0.5, "batch": 2, "checkpoint": str(best)}
    assert stopped.summary["evaluated_on"] == "training data, averaged weights"
    page = (stopped.folder / "report.md").read_text()
    assert "Stopped early after step 4: no better top-1 than 50.0% (step 2) in 2 evaluations." in page
    assert "Best: top-1 50.0% after step 2." in page and "RUN/best" in page
    assert "16 samples of the training data, averaged weights: " in page


def test_exports_are_of_averaged_weights_unless_raw_ones_are_asked_for(
    stopped: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, best = tmp_path / "w.safetensors", open_checkpoint(stopped.folder / "checkpoints" / "2")
    for path, options, step in (
        (stopped.folder, (), 4),
        (stopped.folder / "best", (), 2),
        (stopped.folder, ("--best", "--weights", "raw"), 2),
        (stopped.folder / "best", ("--weights", "ema"), 2),
    ):
        out = prints(capsys, "checkpoint", "export", str(path), str(target), *options)
        assert f"weights after step {step}: {target}" in out
        if step == 4:
            assert same_bits(load_file(target), stopped.weights())
            continue
        held = best.read("master" if "raw" in options else "ema")
        assert all(torch.equal(load_file(target)[name], tensor) for name, tensor in held.items())
    assert not same_bits(best.read("master"), best.read("ema"))
    listed = json.loads(prints(capsys, "checkpoint", "list", str(stopped.folder), "--json"))["checkpoints"]
    assert [(row["batch"], row["is_best"]) for row in listed] == [(2, True), (4, False)]


def test_a_run_that_stopped_early_goes_on_only_with_more_patience(stopped: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"stopped early at batch 4: no better .* 2 evaluations; give an .* above 2"):
        stagewright.train(resume=str(stopped.folder), runs=str(tmp_path))
    before = stopped.folder / "checkpoints" / "2"
    again = stagewright.train(resume=str(stopped.folder / "best"), runs=str(tmp_path))
    assert again.folder != stopped.folder and again.summary["stopped_early"] == stopped.summary["stopped_early"]
    assert same_bits(again.weights(), stopped.weights()) and before.exists()
    longer = stagewright.train(resume=str(again.folder), early_stop=4)
    assert longer.folder == again.folder and longer.summary["stopped_early"] is None
    assert longer.summary["best"]["batch"] == 6 and [step.batch for step in longer.steps] == [2, 3, 4, 5]


def test_says_what_a_checkpoint_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(tmp_path, best=None, early_stop=None, ema=None, steps=2, checkpoint_every=2)
    assert plain.summary["best"] is None and plain.summary["stopped_early"] is None
    out = prints(capsys, "train", "--resume", str(plain.folder), "--steps", "6", "--ema", "0.5", "--best", "max:top1",
                 "--early-stop", "2")  # fmt: skip
    assert "warning: the checkpoint has no averaged weights; --ema 0.5 starts from its weights" in out
    assert "warning: the checkpoint knows no best top1: evaluations are compared from here on" in out
    assert "checkpoint after step 4, the best so far (top-1 37.5%): " in out
    assert "(16 samples of the training data, averaged weights)" in out
    assert f"best: top-1 75.0% after step 6, checkpoint {plain.folder / 'checkpoints' / '6'}" in out
    assert "no best checkpoint; train with --best" in fails(
        capsys, "checkpoint", "show", str(train(tmp_path, best=None, checkpoint_every=3).folder / "best")
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"best": "max:dice"}, r"'dice', which the evaluations do not measure; .*known: loss, top1, top5"),
        ({"best": "dice"}, "min:dice or max:dice"),
        ({"best": "top1", "placement": "0:0-2.0:3", "mode": "pipedream", "microbatches": 4}, "step 1 .* multiple of 3"),
    ],
    ids=str,
)
def test_refuses_what_it_could_not_keep_before_a_folder_is_made(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        train(tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_exports_no_average_of_a_run_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(tmp_path, best=None, early_stop=None, ema=None, steps=1, checkpoint_every=1, eval_every=None)
    target = str(tmp_path / "w.safetensors")
    said = fails(capsys, "checkpoint", "export", str(plain.folder), target, "--weights", "ema")
    assert "has no averaged weights; train with --ema" in said


def test_a_small_run_imports_no_compiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes a second of every process; the shapes and the proof are known from a run before."""
    text = "train --model resnet8 --emulate --placement 0:0.0:1 --cut layer2.0.conv1 --batch 8 --steps 1 --runs"
    prints(capsys, *text.split(), str(tmp_path))
    code = "import sys; from stagewright.cli.main import main; main(); print('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-c", code, *text.split(), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout.splitlines()[-1] == "False"
