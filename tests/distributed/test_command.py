"""`stagewright train` with real ranks: it finishes, or fails with one line and leaves no process running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.marks import soak
from tests.waiting import LONG, wait_until

ROOT = Path(__file__).parents[2]
COMMON = ("--model", "tests.distributed.test_command:tiny", "--placement", "0:0-1.0:2", "--cut", "3", "--batch", "8")


def tiny() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 30 * 30, 10)
    )


class Raising(torch.nn.Module):
    """Raises at its fifth training forward; a condition on values makes it a leaf for the tracer."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isfinite().all() and x.abs().sum() > 0 and "RANK" in os.environ:
            Raising.calls += 1
            if Raising.calls == 5:
                raise RuntimeError("the layer gave up")
        return x


def raising() -> torch.nn.Module:
    return torch.nn.Sequential(*tiny(), Raising())


def command(runs: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "stagewright", "train", *COMMON, "--runs", str(runs), *arguments]


def start(runs: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(runs, *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ranks_of(runs: Path) -> list[int]:
    """Process ids of the ranks whose job is under this folder, in the order of ranks."""
    found: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
            if b"stagewright.runtime.process.rank" in words and any(
                word.startswith(str(runs).encode()) for word in words
            ):
                environment = (process / "environ").read_bytes().split(b"\0")
                rank = next(int(item[5:]) for item in environment if item.startswith(b"RANK="))
                found[rank] = int(process.name)
        except (OSError, StopIteration):
            continue
    return [pid for _, pid in sorted(found.items())]


def is_training(runs: Path) -> bool:
    return any(path.stat().st_size for path in runs.glob("*/metrics.jsonl"))


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that trains until a test ends it."""
    process = start(tmp_path, "--steps", "1000000", "--samples", "64")
    wait_until(lambda: is_training(tmp_path))
    yield process
    process.kill()
    process.communicate()


def test_trains_evaluates_and_exports(tmp_path: Path) -> None:
    weights = tmp_path / "trained.safetensors"
    arguments = ("--steps", "12", "--samples", "60", "--eval-every", "6", "--export", str(weights), "--json")
    arguments += ("--monitor-every", "0.1")  # a rank may live for less than a second
    done = subprocess.run(
        command(tmp_path, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=True
    )
    summary = json.loads(done.stdout)
    assert summary["batches"] == 12 and summary["images_per_second"] > 0
    assert [evaluated["samples"] for evaluated in summary["evaluations"]] == [60, 60]
    assert "epoch 2  step 12/12  loss" in done.stderr and "evaluation after step 6: loss" in done.stderr
    tiny().load_state_dict(load_file(weights))
    trace = json.loads((Path(summary["folder"]) / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2}
    assert {rank["rank"] for rank in summary["use"]["ranks"]} == {0, 1, 2}
    used = summary["use"]["ranks"]  # cores only from the second look on, which a run this short may not last to
    assert all(rank["peak_memory"] > 50 << 20 and rank["mean_cores"] >= 0 for rank in used)
    assert ranks_of(tmp_path) == []


def test_names_a_rank_that_raises(tmp_path: Path) -> None:
    process = start(tmp_path, "--model", "tests.distributed.test_command:raising", "--steps", "100")
    _, error = process.communicate(timeout=LONG)
    assert process.returncode == 2 and error.count("\n") == 1 and "Traceback" not in error
    assert "stage 1 replica 0 (rank 2, machine 0) failed at 1F" in error and "the layer gave up" in error
    (log,) = tmp_path.glob("*/log.txt")
    assert "Traceback" in log.read_text()
    assert ranks_of(tmp_path) == []


def test_names_a_killed_rank_and_stops_all_ranks(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
    _, error = endless.communicate(timeout=LONG)
    assert endless.returncode == 2 and error.count("\n") == 1
    assert "stage 0 replica 1 (rank 1, machine 0) was killed by SIGKILL at 0" in error
    assert ranks_of(tmp_path) == []


def test_ctrl_c_saves_a_checkpoint_and_prints_one_line(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    for pid in (*ranks_of(tmp_path), endless.pid):  # a terminal sends it to the whole process group
        os.kill(pid, signal.SIGINT)
    _, error = endless.communicate(timeout=LONG)
    (run,) = tmp_path.iterdir()
    assert endless.returncode == 2 and error.count("\n") == 1 and "interrupted after step" in error
    assert error.endswith(f"resume with stagewright train --resume {run}\n")
    assert len(list((run / "checkpoints").iterdir())) == 1 and ranks_of(tmp_path) == []


def test_ranks_do_not_outlive_their_supervisor(endless: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(ranks_of(tmp_path)) == 3
    os.kill(ranks_of(tmp_path)[1], signal.SIGSTOP)  # it can't watch its parent itself
    endless.kill()
    wait_until(lambda: ranks_of(tmp_path) == [])


@soak
def test_stops_when_the_loss_is_not_finite(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "100", "--lr", "1e30")
    _, error = process.communicate(timeout=LONG)
    assert process.returncode == 2 and error.count("\n") == 1
    assert "stage 1 replica 0" in error and "batch" in error and "--lr" in error
