"""torchrun, and srun's environment, start one process per rank of the same command: it trains as it does by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.runtime.checkpoint.folder import list_folders
from tests.distributed.test_command import ROOT, command, ranks_of
from tests.marks import nightly, soak
from tests.waiting import LONG, wait_until

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def torchrun(runs: Path, processes: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    words = [*TORCHRUN, str(processes), "--max-restarts", str(restarts), *command(runs, *arguments)[1:]]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """The code, the output, and the lines of ours among the errors."""
    out, error = process.communicate(timeout=LONG)
    return process.returncode, out, [line for line in error.splitlines() if line.startswith("stagewright: ")]


def test_trains_the_same_weights_as_the_command_itself(tmp_path: Path) -> None:
    options = (
        "--steps",
        "60",
        "--samples",
        "64",
        "--eval-every",
        "30",
        "--monitor-every",
        "0.05",
    )  # samples in any run
    weights = [tmp_path / "alone.safetensors", tmp_path / "torchrun.safetensors"]
    subprocess.run(
        command(tmp_path / "alone", *options, "--export", str(weights[0])),
        cwd=ROOT, capture_output=True, timeout=LONG, check=True,
    )  # fmt: skip
    code, out, errors = end(torchrun(tmp_path / "runs", 3, *options, "--export", str(weights[1])))
    assert (code, errors) == (0, [])
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert out.count("done: 60 steps") == 1 and out.count("evaluation after step 60") == 1  # rank 0 alone prints
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["batches"] == 60 and {rank["rank"] for rank in summary["use"]["ranks"]} == {0, 1, 2}
    assert (run / "report.html").exists() and ranks_of(tmp_path) == []


@soak
def test_srun_starts_ranks_by_its_own_variables(port: int, tmp_path: Path) -> None:
    place = {"SLURM_STEP_NUM_TASKS": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = command(tmp_path, "--steps", "4", "--samples", "64")
    started = [
        subprocess.Popen(
            words, env={**os.environ, **place, "SLURM_PROCID": str(rank)},
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    ended = [end(process) for process in started]
    assert [(code, errors) for code, _, errors in ended] == [(0, [])] * 3
    assert "done: 4 steps" in ended[0][1] and [out for _, out, _ in ended[1:]] == ["", ""]
    assert len(list(tmp_path.iterdir())) == 1


@nightly
def test_names_both_numbers_where_processes_and_ranks_differ(tmp_path: Path) -> None:
    code, _, errors = end(torchrun(tmp_path, 2, "--steps", "4"))
    assert code and len(errors) == 1 and "the plan has 3 ranks but 2 processes were started" in errors[0]
    assert not list(tmp_path.iterdir())


@soak
def test_torchrun_restarts_a_killed_rank_in_the_same_folder(tmp_path: Path) -> None:
    runs, weights = tmp_path / "runs", [tmp_path / "alone.safetensors", tmp_path / "restarted.safetensors"]
    options = ("--steps", "400", "--samples", "64", "--checkpoint-every", "10")
    process = torchrun(runs, 3, *options, "--export", str(weights[0]), restarts=1)
    wait_until(lambda: [run for run in runs.glob("*") if list_folders(run)])
    os.kill(ranks_of(runs)[1], signal.SIGKILL)
    code, out, errors = end(process)
    (run,) = runs.iterdir()
    assert code == 0 and len(errors) == 1, errors
    assert "stage 0 replica 1 (rank 1, machine 0) was killed by SIGKILL at 0" in errors[0]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["batch"] for record in records if record["kind"] == "step"] == list(range(400))
    (resumed,) = [record for record in records if record["kind"] == "resumed"]
    assert resumed["batch"] >= 10 and re.search(r"done: 400 steps", out)
    undisturbed = command(tmp_path / "alone", *options, "--emulate", "--export", str(weights[1]))
    subprocess.run(undisturbed, cwd=ROOT, capture_output=True, timeout=LONG, check=True)
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert ranks_of(tmp_path) == []


@soak
def test_sigterm_saves_a_checkpoint_and_leaves_no_process(tmp_path: Path) -> None:
    process = torchrun(tmp_path, 3, "--steps", "1000000", "--samples", "64")
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*/metrics.jsonl")))
    process.send_signal(signal.SIGTERM)  # which torchrun passes on to each process
    code, _, errors = end(process)
    (run,) = tmp_path.iterdir()
    assert code and len(errors) == 1 and "interrupted after step" in errors[0] and f"--resume {run}" in errors[0]
    assert len(list_folders(run)) == 1 and ranks_of(tmp_path) == []


@soak
def test_srun_trains_the_same_weights_as_the_command_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "tests/slurm.sh", sys.executable, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    if "skipped: " in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done: 4 steps") == 1 and "the same weights" in done.stdout
