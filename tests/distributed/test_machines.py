"""The same command on two machines, which are network namespaces: they train together and stop together."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stagewright.config.toml import as_toml
from tests.distributed.namespaces import TOKEN, Machines, machines
from tests.distributed.test_command import ranks_of
from tests.marks import soak
from tests.parity import TOLERANCE, Case, assert_near, emulate, make_job, refer
from tests.waiting import LONG, wait_until

STAGES = Case("normed", "0:0-1.1:0", "third", mode="stale", staleness=1, steps=12)
DATA_PARALLEL = Case("dropping", "0:0,1:0", mode="dp", steps=12)


@pytest.fixture
def pair() -> Iterator[Machines]:
    with machines(3) as found:
        yield replace(found, count=2)  # the third is not part of the run


def _on_one_machine(case: Case) -> Case:
    return replace(case, placement=case.placement.replace("1:", "0:9"))


class Runs:
    """One run of two machines: its folders and its processes."""

    def __init__(self, pair: Machines, folder: Path, case: Case, *arguments: str, **tables: object) -> None:
        config = make_job(_on_one_machine(case), folder, export=str(folder / "trained.safetensors")).config
        config = replace(config, plan=replace(config.plan, placement=case.placement))
        (folder / "config.toml").write_text(as_toml(config))
        self.pair, self.folder, self.case = pair, folder, case
        self.arguments = ("--config", str(folder / "config.toml"), "--nodes", pair.nodes, *arguments)

    def start(self, machine: int, *more: str, token: str | None = TOKEN) -> subprocess.Popen[str]:
        runs = ("--runs", str(self.folder / f"machine-{machine}"))
        return self.pair.start(machine, "train", *self.arguments, *runs, *more, token=token)

    def is_training(self) -> bool:
        return any(path.stat().st_size for path in self.folder.glob("machine-0/*/metrics.jsonl"))

    def assert_result(self, *, is_exact: bool = False) -> None:
        """The weights are those of one process; bit for bit if it is ours that emulates the run."""
        trained = load_file(self.folder / "trained.safetensors")
        if is_exact:
            undisturbed = emulate(_on_one_machine(self.case), self.folder).weights
            assert trained.keys() == undisturbed.keys()
            assert all(torch.equal(trained[name], undisturbed[name]) for name in trained)
            return
        expected = refer(self.case)
        assert_near(trained, {**expected.weights, **expected.buffers}, TOLERANCE[self.case.precision])


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=LONG)
    return process.returncode, out, error


def listening(pair: Machines, machine: int) -> set[str]:
    """Addresses on which a machine listens, TCP over IPv4 and IPv6."""
    done = subprocess.run(pair.inside(machine, "ss", "-Htln"), capture_output=True, text=True, check=True)
    return {line.split()[3].rpartition(":")[0] for line in done.stdout.splitlines()}


def steps_of(folder: Path) -> list[int]:
    """The batches of the steps in a run's metrics, in their order."""
    (metrics,) = folder.glob("machine-0/*/metrics.jsonl")
    records = map(json.loads, metrics.read_text().splitlines())
    return [record["batch"] for record in records if record["kind"] == "step"]


JOIN = """
import socket
import sys
import time
from datetime import timedelta
for _ in range(9000):
    try:
        socket.create_connection((sys.argv[1], 29600), 1).close()
        break
    except OSError:
        time.sleep(0.1)  # nobody listens yet
from torch.distributed import TCPStore
try:
    store = TCPStore(sys.argv[1], 29600, is_master=False, timeout=timedelta(seconds=2))
    print("joined", store.list_keys())
except Exception as error:
    print("refused", type(error).__name__)
"""


def test_stages_on_two_machines_train_as_one_process_and_strangers_are_refused(pair: Machines, tmp_path: Path) -> None:
    runs = Runs(pair, tmp_path, replace(STAGES, steps=200), "--join-timeout", str(LONG))
    first = runs.start(0)
    stranger = pair.run(2, [sys.executable, "-c", JOIN, pair.address(0)])
    thief = runs.start(1, token="some other token, as long as it")
    wait_until(lambda: stranger.poll() is not None or first.poll() is not None)
    assert first.poll() is None, end(first)  # else nobody would ever listen
    _, out, error = end(stranger)
    assert "refused" in out and "joined" not in out
    code, out, error = end(thief)
    assert code == 2 and error.count("\n") == 1 and "use the same token on each machine" in error
    second = runs.start(1)
    wait_until(runs.is_training)
    addresses = [listening(pair, machine) for machine in range(2)]
    assert addresses[0] <= {"127.0.0.1", pair.address(0)} and pair.address(0) in addresses[0]
    assert addresses[1] <= {"127.0.0.1", pair.address(1)} and pair.address(1) in addresses[1]
    code, out, error = end(first)
    assert code == 0 and "done: 200 steps" in out, error
    assert f"warning: refused {pair.address(2)}: 1 connection" in out
    assert "warning: refused machine 1 (10.77.0.2): 1 connection" in out
    code, out, error = end(second)
    assert code == 0 and "metrics and weights are on machine 0" in out and error == ""
    runs.assert_result()
    (log,) = tmp_path.glob("machine-0/*/log.txt")
    assert f"refused {pair.address(2)}" in log.read_text()
    assert [path.name for path in tmp_path.glob("machine-*/*/summary.json")] == ["summary.json"]
    assert ranks_of(tmp_path) == [] and not any(TOKEN.encode() in path.read_bytes() for path in files(tmp_path))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_names_options_that_differ_on_both_machines(pair: Machines, tmp_path: Path) -> None:
    runs = Runs(pair, tmp_path, DATA_PARALLEL)
    both = [runs.start(0), runs.start(1, "--lr", "0.25")]
    for process in both:
        code, _, error = end(process)
        assert code == 2 and error.count("\n") == 1
        assert "machine 1 (10.77.0.2) has optimizer.lr = 0.25 but machine 0 has 0.05" in error


LOST, JOIN_SECONDS = 15, 120
LIMITS = ("--lost-timeout", str(LOST), "--join-timeout", str(JOIN_SECONDS))


@soak
def test_data_parallel_over_two_machines_trains_as_one_process(pair: Machines, tmp_path: Path) -> None:
    """As SLURM would start it."""
    runs = Runs(pair, tmp_path, DATA_PARALLEL)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 10.77.0.1\necho 10.77.0.2\n")
    scontrol.chmod(0o700)
    environment = {**os.environ, "STAGEWRIGHT_TOKEN": TOKEN, "SLURM_JOB_NODELIST": "10.77.0.[1-2]"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    both = []
    for machine in range(2):
        command = [sys.executable, "-m", "stagewright", "train", *runs.arguments, "--nodes", "slurm"]
        own = ["--runs", str(tmp_path / f"machine-{machine}")]
        both.append(pair.run(machine, [*command, *own], environment | {"SLURM_NODEID": str(machine)}))
    for process in both:
        code, _, error = end(process)
        assert code == 0, error
    runs.assert_result()


@soak
def test_either_machine_waits_for_the_other_and_names_it(pair: Machines, tmp_path: Path) -> None:
    for machine, other in ((0, "machine 1 (10.77.0.2)"), (1, "machine 0 (10.77.0.1)")):
        code, out, error = end(Runs(pair, tmp_path, DATA_PARALLEL, "--join-timeout", "20").start(machine))
        assert code == 2 and error.count("\n") == 1 and f"{other} did not join within 20 s" in error
        assert f"waiting for {other}" in out


def test_both_machines_name_a_killed_rank_and_stop(pair: Machines, tmp_path: Path) -> None:
    runs = Runs(pair, tmp_path, replace(STAGES, steps=1_000_000), *LIMITS)
    both = [runs.start(0), runs.start(1)]
    wait_until(runs.is_training)
    os.kill(ranks_of(tmp_path)[2], signal.SIGKILL)
    for process in both:
        code, _, error = end(process)
        assert code == 2 and error.count("\n") == 1
        assert "stage 1 replica 0 (rank 2, machine 1) was killed by SIGKILL at 1" in error
    assert ranks_of(tmp_path) == []


@soak
def test_restarts_both_machines_after_a_killed_rank(pair: Machines, tmp_path: Path) -> None:
    runs = Runs(pair, tmp_path, replace(STAGES, steps=300), *LIMITS, "--checkpoint-every", "20")
    both = [runs.start(0), runs.start(1)]
    wait_until(lambda: list(tmp_path.glob("machine-0/*/checkpoints/20/manifest.json")))
    os.kill(ranks_of(tmp_path)[2], signal.SIGKILL)
    for process in both:
        code, out, error = end(process)
        assert code == 0, error
        assert "(rank 2, machine 1) was killed by SIGKILL" in out
        assert re.search(r"restart 1 from batch [1-9]", out), out
    runs.assert_result(is_exact=True)


@soak
@pytest.mark.parametrize("seconds", [5, 2 * LOST])
def test_a_network_cut_that_heals_changes_no_bit(pair: Machines, tmp_path: Path, seconds: int) -> None:
    """TCP bridges a short cut; one longer than --lost-timeout makes both machines start again."""
    runs = Runs(pair, tmp_path, replace(STAGES, steps=1200), *LIMITS, "--checkpoint-every", "50")
    both = [runs.start(0), runs.start(1)]
    wait_until(runs.is_training)
    pair.cut(1)
    time.sleep(seconds)
    pair.heal(1)
    for process in both:
        code, out, error = end(process)
        assert code == 0, error
        assert ("restart 1 from batch" in out) == (seconds > LOST)
    runs.assert_result(is_exact=True)
    assert steps_of(tmp_path) == list(range(1200))
    assert ranks_of(tmp_path) == []


@soak
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_network_cut_that_stays_fails_both_with_one_line(pair: Machines, tmp_path: Path, restarts: str) -> None:
    runs = Runs(pair, tmp_path, replace(STAGES, steps=1_000_000), *LIMITS, "--max-restarts", restarts)
    both = [runs.start(0), runs.start(1)]
    wait_until(runs.is_training)
    pair.cut(1)
    for process, other in zip(both, ("machine 1 (10.77.0.2)", "machine 0 (10.77.0.1)"), strict=True):
        code, _, error = end(process)
        assert code == 2 and error.count("\n") == 1
        assert (
            f"lost {other}: no sign of it for {LOST} s" in error
            or f"{other} did not join within {JOIN_SECONDS} s" in error
        )
    assert ranks_of(tmp_path) == []


@soak
def test_a_killed_supervisor_leaves_no_rank_on_either_machine(pair: Machines, tmp_path: Path) -> None:
    runs = Runs(pair, tmp_path, replace(STAGES, steps=1_000_000), *LIMITS)
    both = [runs.start(0), runs.start(1)]
    wait_until(runs.is_training)
    both[1].kill()
    code, _, error = end(both[0])
    assert code == 2 and error.count("\n") == 1 and "machine 1" in error
    wait_until(lambda: ranks_of(tmp_path) == [])


@soak
@pytest.mark.parametrize("asked", [0, 1])
def test_ctrl_c_on_either_machine_stops_both_and_saves_a_checkpoint(pair: Machines, tmp_path: Path, asked: int) -> None:
    runs = Runs(pair, tmp_path, replace(STAGES, steps=1_000_000), *LIMITS)
    both = [runs.start(0), runs.start(1)]
    wait_until(runs.is_training)
    both[asked].send_signal(signal.SIGINT)
    for process in both:
        code, _, error = end(process)
        assert code == 2 and error.count("\n") == 1 and "interrupted" in error
    assert ranks_of(tmp_path) == [] and list(tmp_path.glob("machine-0/*/checkpoints/*/manifest.json"))


@soak
def test_checkpoints_need_a_shared_folder(pair: Machines, tmp_path: Path) -> None:
    runs = Runs(pair, tmp_path, DATA_PARALLEL, *LIMITS, "--checkpoint-every", "4")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    first = pair.start(0, "train", *runs.arguments, "--runs", str(hidden))
    command = [sys.executable, "-m", "stagewright", "train", *runs.arguments, "--runs", str(tmp_path / "seen")]
    script = f"mount -t tmpfs none {hidden} && exec {shlex.join(command)}"
    second = pair.run(1, ["unshare", "-m", "sh", "-c", script], os.environ | {"STAGEWRIGHT_TOKEN": TOKEN})
    for process in (first, second):
        code, _, error = end(process)
        assert code == 2 and error.count("\n") == 1
        assert "machine 1 (10.77.0.2) can't see" in error and "a shared file system" in error
