"""CUDA MPS around a measurement: it is ended however the measurement ends, and its faults are no end of it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from stagewright.bench import mps

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


@pytest.mark.parametrize("deaf", ["", "exec sleep 60"])
def test_the_daemon_ends_with_the_measurement(deaf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch, deaf=deaf)
    monkeypatch.setattr(mps, "_PATIENCE", 1)
    with pytest.raises(KeyboardInterrupt), mps.shared_gpu(print):
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid) and "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        raise KeyboardInterrupt
    assert not is_alive(pid) and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert (tmp_path / "order").read_text() == "quit -t 1\n"  # not longer than told for clients that hang


def test_a_daemon_that_does_not_start_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch, fault="echo no permission >&2; exit 1")
    told: list[str] = []
    with mps.shared_gpu(told.append):
        pass
    assert told == ["CUDA MPS does not start: no permission; ranks take turns"]
    assert not (tmp_path / "order").exists()
