"""CUDA MPS around a measurement: it is ended however the measurement ends, and its faults are no end of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from stagewright.bench import machine as mps

_DAEMON = """#!/bin/sh
# a stand-in: -d starts a process and notes its id; an order on stdin is noted, and obeyed unless told otherwise
cd "$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -d ]; then
    {fault}
    sleep 60 > /dev/null 2>&1 &
    echo $! > nvidia-cuda-mps-control.pid
    echo $! > {folder}/pid
else
    cat > {folder}/order
    {deaf}
    kill $(cat nvidia-cuda-mps-control.pid)
fi
"""


def daemon(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fault: str = "", deaf: str = "") -> None:
    script = folder / "nvidia-cuda-mps-control"
    script.write_text(_DAEMON.format(folder=folder, fault=fault, deaf=deaf))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ends(pid: int) -> bool:
    """Whether it is gone soon: a signal takes its time."""
    for _ in range(200):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("deaf", ["", "exec sleep 60"])
def test_the_daemon_ends_with_the_measurement(deaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch, deaf=deaf)
    monkeypatch.setattr(mps, "MPS_SECONDS", 1)
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/of/the/user")
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt), mps.shared_gpu(print):
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
        assert all(Path(os.environ[name]).is_dir() for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"))
        raise KeyboardInterrupt
    assert ends(pid) and dict(os.environ) == before
    assert (tmp_path / "order").read_text() == "quit -t 1\n"  # not longer than told for clients that hang


def test_a_daemon_that_does_not_start_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch, fault="echo no permission >&2; exit 1")
    told: list[str] = []
    with mps.shared_gpu(told.append):
        pass
    assert told == ["CUDA MPS does not start: no permission; ranks take turns"]
    assert not (tmp_path / "order").exists()


def test_a_users_own_daemon_gets_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/of/the/user")
    with mps.shared_gpu(print):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/of/the/user"
    assert not (tmp_path / "pid").exists() and not (tmp_path / "order").exists()


def test_without_mps_ranks_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    told: list[str] = []
    with mps.shared_gpu(told.append):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "not installed" in told[0]
