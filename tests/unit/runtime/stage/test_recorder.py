"""The status file shows a rank's action, its process and the memory that torch holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stagewright.runtime.stage import recorder as module
from stagewright.runtime.stage.recorder import FlightRecorder, GpuRecorder
from stagewright.runtime.status_file import RankState, read_process, read_status
from stagewright.schedule.action import Action, Op

UPDATE = Action(Op.UPDATE, 0, 0, None, 4, None)


class Event:
    """Stands for an event on a GPU."""

    def synchronize(self) -> None:
        pass


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuRecorder:
    monkeypatch.setattr(module, "timed_event", Event)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 123 << 20)
    return GpuRecorder(tmp_path / "0.at")


def test_a_status_file_names_its_process_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "0.at"
    assert read_process(path) == (0, None)
    path.write_bytes(b"short")
    assert read_process(path) == (0, None)
    recorder = FlightRecorder(path)
    assert read_process(path) == (os.getpid(), None)
    recorder.begin(UPDATE)
    recorder.ready(UPDATE)
    recorder.end(UPDATE)
    assert read_process(path) == (os.getpid(), None)


def test_a_gpu_rank_records_the_memory_of_torch_after_its_first_update(on_gpu: GpuRecorder, tmp_path: Path) -> None:
    for has_updated in (False, True):
        assert read_status(tmp_path / "0.at", 0).has_updated is has_updated
        on_gpu.begin(UPDATE)
        on_gpu.ready(UPDATE)
        on_gpu.end(UPDATE)
    status = read_status(tmp_path / "0.at", 0)
    assert status.state is RankState.BETWEEN and status.action == UPDATE and status.count == 2
    assert read_process(tmp_path / "0.at") == (os.getpid(), 123 << 20)
