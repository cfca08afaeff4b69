"""Supervisors that are interrupted, killed, or run out of disk leave no process running, and `--resume` works."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagewright
from stagewright.runtime.checkpoint.folder import list_folders, newest_intact
from tests.distributed.test_command import is_training, ranks_of, start
from tests.keeping import KILLS, same_bits
from tests.waiting import LONG, wait_until

soak = pytest.mark.skipif(not KILLS, reason="make soak runs it")
ENDLESS = ("--steps", "1000000", "--samples", "64")


def steps_of(run: Path) -> list[int]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["batch"] for record in records if record["kind"] == "step"]


def assert_resumes(run: Path, tmp_path: Path) -> None:
    """The resumed run ends with the bits of one that was never stopped, and has every step once."""
    newest, _ = newest_intact(run)
    assert newest is not None
    goal = newest.batch + 3
    options = {"steps": goal, "checkpoint_every": 0}
    resumed = stagewright.train(resume=str(run), export=str(tmp_path / "resumed.safetensors"), **options)
    assert resumed.folder == run and steps_of(run) == list(range(goal))
    straight = stagewright.train(
        "tests.distributed.test_command:tiny", placement="0:0-1.0:2", cut="3", batch=8, samples=64, emulate=True,
        runs=str(tmp_path / "straight"), export=str(tmp_path / "straight.safetensors"), **options,
    )  # fmt: skip
    assert same_bits(resumed.weights(), straight.weights())
    assert [step.loss for step in resumed.steps] == [step.loss for step in straight.steps]


@soak
def test_a_killed_supervisor_leaves_no_ranks_and_the_run_resumes(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs, *ENDLESS, "--checkpoint-every", "3")
    wait_until(lambda: [run for run in runs.glob("*") if list_folders(run)])
    time.sleep(0.3)
    process.kill()
    process.communicate()
    wait_until(lambda: ranks_of(runs) == [])
    (run,) = runs.iterdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "batch": 99')
    assert_resumes(run, tmp_path)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=soak), signal.SIGTERM], ids=lambda number: number.name
)
def test_an_interrupted_run_resumes(number: signal.Signals, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(runs, *ENDLESS)
    wait_until(lambda: is_training(runs))
    process.send_signal(number)
    wait_until(lambda: process.poll() is not None)
    _, error = process.communicate()
    (run,) = runs.iterdir()
    assert process.returncode == 2 and error.count("\n") == 1 and f"--resume {run}" in error
    assert len(list_folders(run)) == 1 and ranks_of(runs) == []
    assert_resumes(run, tmp_path)


@soak
def test_a_supervisor_killed_while_ranks_import_leaves_none(tmp_path: Path) -> None:
    process = start(tmp_path, *ENDLESS)
    wait_until(lambda: ranks_of(tmp_path))
    process.kill()
    process.communicate()
    wait_until(lambda: ranks_of(tmp_path) == [])


@soak
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_an_interrupt_while_ranks_start_ends_the_run(delay: float, tmp_path: Path) -> None:
    process = start(tmp_path, *ENDLESS)
    wait_until(lambda: ranks_of(tmp_path))
    time.sleep(delay)  # the processes exist, but are still importing
    process.send_signal(signal.SIGINT)
    wait_until(lambda: process.poll() is not None)
    _, error = process.communicate()
    assert process.returncode == 2 and error.count("\n") == 1
    assert re.match(r"stagewright: interrupted after step \d+; nothing is left running", error)
    assert ranks_of(tmp_path) == []


@soak
def test_a_second_interrupt_ends_the_run_although_a_rank_is_stopped(tmp_path: Path) -> None:
    process = start(tmp_path, *ENDLESS)
    wait_until(lambda: is_training(tmp_path))
    os.kill(ranks_of(tmp_path)[1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    wait_until(lambda: process.poll() is not None)
    _, error = process.communicate()
    assert process.returncode == 2 and error.count("\n") == 1 and "interrupted by SIGINT" in error
    wait_until(lambda: ranks_of(tmp_path) == [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with space for a run's other files and one checkpoint, but not two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system can't be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@soak
def test_a_fault_while_the_disk_is_full_restarts_once_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    process = start(small_disk, *ENDLESS, "--checkpoint-every", "20", "--keep", "1", "--monitor-every", "0")
    (run,) = wait_until(lambda: [run for run in small_disk.glob("*") if list_folders(run)])
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.kill(ranks_of(small_disk)[1], signal.SIGKILL)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    waits = next(line for line in lines if "waits for" in line)
    assert "(rank 1, machine 0) was killed by SIGKILL" in waits and "No space left on device" in waits
    ballast.unlink()
    restarts = next(line for line in lines if "restart 1 from batch" in line)
    assert "was killed by SIGKILL" in restarts
    first = len(steps_of(run))
    wait_until(lambda: len(steps_of(run)) > first + 20)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=LONG)
    assert process.returncode == 2 and error.count("\n") == 1 and f"--resume {run}" in error
    assert "was killed by SIGKILL" in (run / "log.txt").read_text() and steps_of(run) == list(range(len(steps_of(run))))


@soak
def test_a_full_disk_does_not_end_the_run(small_disk: Path) -> None:
    process = start(small_disk, "--steps", "40", "--samples", "64", "--checkpoint-every", "10", "--keep", "1")
    out, error = process.communicate(timeout=LONG)
    assert process.returncode == 0, error
    assert "checkpoint after step 10" in out and "no checkpoint after step 20: No space left on device" in out
    (run,) = small_disk.iterdir()
    assert [int(folder.name) for folder in list_folders(run)] == [10] and steps_of(run) == list(range(40))
    assert not list(run.glob("checkpoints/*.partial"))
