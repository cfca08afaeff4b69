"""What a rank's mapped file says of its process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stagewright.runtime.stage import recorder as module
from stagewright.runtime.stage.recorder import FlightRecorder, GpuRecorder
from stagewright.runtime.status_file import State, read_process, read_status
from stagewright.schedule.action import Action, Op

UPDATE = Action(Op.UPDATE, 0, 0, None, 4, None)


class Event:
    """An event of a GPU that is not there."""

    def synchronize(self) -> None:
        pass


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuRecorder:
    monkeypatch.setattr(module, "_timed", Event)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 123 << 20)
    return GpuRecorder(tmp_path / "0.at")


def test_a_file_names_its_process_from_the_start(tmp_path: Path) -> None:
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


def test_a_gpu_rank_leaves_what_torch_holds_and_its_first_update_settles_it(
    on_gpu: GpuRecorder, tmp_path: Path
) -> None:
    for has_updated in (False, True):
        assert read_status(tmp_path / "0.at", 0).has_updated is has_updated
        on_gpu.begin(UPDATE)
        on_gpu.ready(UPDATE)
        on_gpu.end(UPDATE)
    sight = read_status(tmp_path / "0.at", 0)
    assert sight.state is State.BETWEEN and sight.action == UPDATE and sight.count == 2
    assert read_process(tmp_path / "0.at") == (os.getpid(), 123 << 20)
