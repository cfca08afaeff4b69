"""Real ranks load real images: the first stage's ranks load the samples of an emulated run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.config.toml import make_config
from stagewright.run.train import run
from tests.distributed.test_command import ROOT
from tests.marks import soak
from tests.pictures import jpeg, message, write_parts
from tests.waiting import LONG


def test_ranks_and_emulation_load_the_same_samples(tmp_path: Path) -> None:
    messages = [message(jpeg(index, 32, 32), index % 10) for index in range(40)]
    messages[7] = message(b"\xff\xd8 no picture", 3)
    root = write_parts(tmp_path / "data", [messages[:20], messages[20:]])
    options = {
        "model": {"name": "resnet8"},
        "data": {"source": f"ofrecord:{root}", "loader_threads": 2},
        "plan": {"placement": "0:0-1.0:2", "mode": "stale", "batch": 8, "microbatches": 4},
        "run": {"steps": 10, "eval_every": 5, "runs": str(tmp_path / "runs")},
    }
    alone = {"data": {"loader_threads": 1}, "run": {"emulate": True}}
    real, emulated = (run(make_config(options, extra)).summary for extra in ({}, alone))
    assert real["bad_records"] == emulated["bad_records"] == 1
    assert real["loss"] == pytest.approx(emulated["loss"], rel=1e-4)
    for one, other in zip(real["evaluations"], emulated["evaluations"], strict=True):
        assert one["samples"] == other["samples"] == 40 and one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@soak
def test_too_many_bad_records_fail_with_one_line(tmp_path: Path) -> None:
    messages = [message(jpeg(index, 32, 32) if index % 4 else b"none", index % 10) for index in range(40)]
    root = write_parts(tmp_path / "data", [messages])
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", "train", "--model", "resnet8", "--data", f"ofrecord:{root}",
         "--placement", "0:0.0:1", "--batch", "8", "--steps", "20", "--max-bad", "3", "--runs", str(tmp_path / "runs")],
        cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "4 bad records" in done.stderr and "--max-bad is 3" in done.stderr
