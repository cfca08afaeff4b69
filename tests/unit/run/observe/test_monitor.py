"""The monitor of a run samples the processes and GPUs of its own ranks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.config.toml import make_config
from stagewright.hardware.gpu import Nvml
from stagewright.run.observe.monitor import check_monitor_rate, monitored, rank_processes, run_gpus
from stagewright.runtime.stage.recorder import FlightRecorder
from stagewright.runtime.status_file import status_path
from tests.nvml_like import Card, Library, uuid


def job(placement: str, folder: Path = Path(), **run: Any) -> Any:
    devices = [device for stage in parse_placement(placement, Cluster((Machine(),) * 2)) for device in stage]
    return SimpleNamespace(
        folder=str(folder), config=make_config({"run": run}), plan=SimpleNamespace(devices=sorted(devices))
    )


@pytest.mark.parametrize(
    ("placement", "run", "machine", "expected"),
    [
        ("0:0-1.0:3", {}, 0, {0, 1, 3}),
        ("0:0-1.1:2", {}, 1, {2}),
        ("0:4.0:5", {"share_gpu": True}, 0, {0, 1}),
        ("0:0-6.0:7", {"emulate": True}, 0, {0}),
        ("0:9", {}, 0, set()),  # the rank itself reports that the GPU is missing
    ],
)
def test_monitors_the_gpus_that_the_ranks_run_on(
    monkeypatch: pytest.MonkeyPatch, placement: str, run: dict[str, Any], machine: int, expected: set[int]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library = Library([Card()] * 4)
    library.nvmlInit()
    found = run_gpus(job(placement, device="cuda", **run), machine, Nvml(library))
    assert found == {uuid(index) for index in expected}


def test_follows_the_order_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    library = Library([Card()] * 4)
    library.nvmlInit()
    assert run_gpus(job("0:0", device="cuda"), 0, Nvml(library)) == {uuid(3)}


def test_finds_started_ranks_by_their_status_files(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    FlightRecorder(status_path(tmp_path, 1))
    FlightRecorder(status_path(tmp_path, 2))  # of another machine
    found = rank_processes(job("0:0-1.1:0", tmp_path), 0)
    assert [(rank.rank, rank.process) for rank in found] == [(1, os.getpid())]


def test_a_rate_of_zero_means_no_monitor(tmp_path: Path) -> None:
    with monitored(job("0:0", tmp_path, monitor_every=0.0), print) as monitor:
        assert monitor is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rate", [-1.0, 0.001, float("nan"), float("inf")])
def test_a_rate_out_of_bounds_is_one_line(rate: float) -> None:
    with pytest.raises(ValueError, match=r"--monitor-every is .*; give at least 0.05 seconds, or 0"):
        check_monitor_rate(make_config({"run": {"monitor_every": rate}}))
