"""What a monitor's samples say about a run, and CUDA MPS around a measurement."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from stagewright.bench import machine
from stagewright.bench.machine import with_usage
from stagewright.bench.result import Repeat
from stagewright.cluster.placement import parse_placement
from stagewright.events import GpuUsage, RankUsage, Usage
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.voice import SILENT, Voice
from tests.waiting import is_running, wait_until

PLAN = make_plan(parse_placement("0:0-1.0:2"), batch=8, microbatches=4, mode=Mode.STALE, cuts=("x",))
_DAEMON = """#!/bin/sh
# a stand-in: -d starts a process and notes its id; an order on stdin is noted, and obeyed unless `deaf` prevents it
cd "$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -d ]; then
    {fault}
    sleep 3600 > /dev/null 2>&1 &
    echo $! > nvidia-cuda-mps-control.pid
    echo $! > {folder}/pid
else
    cat > {folder}/order
    {deaf}
    kill $(cat nvidia-cuda-mps-control.pid)
fi
"""


def sample(cores: float, *memory: int, gpus: tuple[GpuUsage, ...] = ()) -> Usage:
    ranks = tuple(RankUsage(rank, held, 0.5) for rank, held in enumerate(memory))
    return Usage(0.0, cores, 0, gpus, ranks)


def observed(folder: Path, *samples: Usage, torn: str = "") -> Repeat:
    """A repeat whose run left these samples of its monitor."""
    (folder / "monitor.jsonl").write_text("".join(f"{json.dumps(asdict(one))}\n" for one in samples) + torn)
    return with_usage(Repeat(1.0), folder, PLAN)


def test_memory_is_the_peak_of_the_fullest_rank_per_stage(tmp_path: Path) -> None:
    found = observed(tmp_path, sample(1.5, 10, 40, 5), sample(2.5, 20, 30, 7), sample(3.5, 1, 1, 1))
    assert found.memory == (40, 7) and found.others == 1.0 and found.foreign == 0 and found.gpu_memory == ()


def test_throttled_and_shared_gpus_are_observed(tmp_path: Path) -> None:
    gpus = [GpuUsage(f"GPU-{index}", index, 100 * (index + 1), 0.5) for index in range(3)]
    hot = GpuUsage("GPU-1", 1, 500, 0.5, throttled=("heat", "power"), foreign=2)
    found = observed(tmp_path, sample(1.5, 1, 1, 1, gpus=tuple(gpus)), sample(1.5, 1, 1, 1, gpus=(hot,)))
    assert found.gpu_memory == (500, 300) and found.throttled == ("heat", "power") and found.foreign == 2


def test_reads_a_monitor_file_with_an_unfinished_line(tmp_path: Path) -> None:
    whole = sample(1.5, 10, 40, 5)
    assert observed(tmp_path, whole, torn=json.dumps(asdict(whole))[:20]).memory == (40, 5)


def test_observes_nothing_without_a_monitor(tmp_path: Path) -> None:
    assert with_usage(Repeat(1.0), tmp_path, PLAN) == Repeat(1.0)


def daemon(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fault: str = "", deaf: str = "") -> None:
    script = folder / "nvidia-cuda-mps-control"
    script.write_text(_DAEMON.format(folder=folder, fault=fault, deaf=deaf))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)


def ends(pid: int) -> bool:
    """Wait until it ends: a signal takes a moment."""
    return wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("deaf", ["", "exec sleep 3600"])
def test_the_mps_daemon_ends_with_the_measurement(deaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch, deaf=deaf)
    seconds = 3 if deaf else 30  # half of what the script has to note its order
    monkeypatch.setattr(machine, "MPS_SECONDS", seconds)
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/of/the/user")
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt), machine.shared_gpu(SILENT):
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid)
        assert all(Path(os.environ[name]).is_dir() for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"))
        raise KeyboardInterrupt
    assert ends(pid) and dict(os.environ) == before
    assert (tmp_path / "order").read_text() == f"quit -t {seconds}\n"  # clients that hang are not waited for any longer


def test_warns_if_the_mps_daemon_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch, fault="echo no permission >&2; exit 1")
    warnings: list[str] = []
    with machine.shared_gpu(Voice(warn=warnings.append)):
        pass
    assert warnings == ["CUDA MPS does not start: no permission; ranks take turns"]
    assert not (tmp_path / "order").exists()


def test_leaves_the_mps_daemon_of_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/of/the/user")
    with machine.shared_gpu(SILENT):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/of/the/user"
    assert not (tmp_path / "pid").exists() and not (tmp_path / "order").exists()


def test_warns_if_mps_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    warnings: list[str] = []
    with machine.shared_gpu(Voice(warn=warnings.append)):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "not installed" in warnings[0]
