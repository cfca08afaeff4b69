"""The thread that looks on: it writes what it sees, and nothing that goes wrong with it reaches the run."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stagewright.events import Usage
from stagewright.hardware import monitor as module
from stagewright.hardware.meters import HostMeter, RankProcess
from stagewright.hardware.monitor import Monitor
from tests.nvml_like import Card, Library, uuid

EVERY = 0.05


def own() -> Sequence[RankProcess]:
    return [RankProcess(0, os.getpid(), 77)]


def watch(
    path: Path,
    ranks: Callable[[], Sequence[RankProcess]] = own,
    *,
    gpus: bool = False,
    looks: int = 3,
    until: Callable[[Monitor], bool] | None = None,
) -> tuple[Monitor, list[Usage], list[str]]:
    """Let a monitor look so often, and give back what it told."""
    heard: list[Usage] = []
    warnings: list[str] = []
    find = (lambda nvml: [uuid(0)]) if gpus else None
    with Monitor(path, EVERY, ranks, find, heard.append, warnings.append) as monitor:
        began = time.monotonic()
        while not (until(monitor) if until else monitor.looks >= looks):
            assert time.monotonic() - began < 20
            time.sleep(0.01)
    return monitor, heard, warnings


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_look_with_the_process_of_each_rank(tmp_path: Path) -> None:
    monitor, heard, warnings = watch(tmp_path / "monitor.jsonl")
    kept = lines(tmp_path / "monitor.jsonl")
    assert len(kept) == len(heard) == monitor.looks >= 3 and not warnings
    assert 0 <= kept[0]["seconds"] < kept[1]["seconds"] and kept[1]["seconds"] >= EVERY
    (rank,) = kept[-1]["ranks"]
    assert rank["rank"] == 0 and rank["memory"] > 10 << 20 and rank["torch_memory"] == 77
    assert kept[-1]["gpus"] == [] and kept[-1]["memory"] > rank["memory"] // 2
    assert monitor.totals.describe()["moments"] == monitor.looks
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]


def test_a_run_that_goes_on_appends_and_its_seconds_go_on(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    path.write_text('{"seconds": 41.5, "cores": 1}\n{"seconds": 42.')  # torn by a kill
    watch(path)
    text = path.read_text().splitlines()
    assert text[1] == '{"seconds": 42.' and json.loads(text[2])["seconds"] >= 41.5


def test_gpus_are_looked_at_and_the_library_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([Card(used=3 << 30)])
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monitor, _, warnings = watch(tmp_path / "monitor.jsonl", gpus=True)
    assert [gpu["memory"] for gpu in lines(tmp_path / "monitor.jsonl")[-1]["gpus"]] == [3 << 30]
    assert monitor.totals.describe()["gpus"][0]["peak_memory"] == 3 << 30 and not warnings and not library.is_open


def test_no_driver_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([])
    library.init_error = "NVML Shared Library Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monitor, _, warnings = watch(tmp_path / "monitor.jsonl", gpus=True)
    assert monitor.looks >= 3
    assert warnings == [
        "the monitor can't ask GPUs for memory and power: NVML Shared Library Not Found; the run goes on"
    ]


def test_a_gpu_that_falls_off_the_bus_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(silent={"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates"})
    monkeypatch.setitem(sys.modules, "pynvml", Library([card]))
    _, _, warnings = watch(tmp_path / "monitor.jsonl", gpus=True)
    assert warnings == [f"the monitor gets no answer from GPU 0 ({uuid(0)}); the run goes on"]


def test_gpus_that_the_driver_does_not_show_are_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library([Card()]))
    warnings: list[str] = []
    with Monitor(tmp_path / "m.jsonl", EVERY, own, lambda nvml: [], lambda use: None, warnings.append) as monitor:
        while monitor.looks < 2:
            time.sleep(0.01)
    assert len(warnings) == 1 and "finds none of the run's GPUs" in warnings[0]


def test_a_disk_without_room_is_one_warning_and_totals_go_on(tmp_path: Path) -> None:
    monitor, heard, warnings = watch(tmp_path / "missing" / "monitor.jsonl")
    assert len(warnings) == 1 and "could not be written" in warnings[0] and "the run goes on" in warnings[0]
    assert monitor.totals.describe()["moments"] == len(heard) >= 3


def test_a_fault_of_its_own_ends_the_monitor_and_not_the_run(tmp_path: Path) -> None:
    def broken() -> Sequence[RankProcess]:
        raise KeyError("nobody thought of this")

    _, _, warnings = watch(tmp_path / "monitor.jsonl", broken, until=lambda monitor: not monitor._thread.is_alive())
    assert len(warnings) == 1 and warnings[0].startswith("the monitor stopped: KeyError")


def test_a_hanging_driver_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    monkeypatch.setattr(module, "_PATIENCE", 0.2)

    def hanging() -> Sequence[RankProcess]:
        freed.wait(30)
        return []

    monitor = Monitor(tmp_path / "m.jsonl", EVERY, hanging, None, lambda use: None, lambda warning: None)
    began = time.monotonic()
    with monitor:
        pass
    assert time.monotonic() - began < 10
    freed.set()


def test_the_lines_of_a_long_run_thin_out_but_not_its_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FULL_SECONDS", 0.0)
    monitor, heard, _ = watch(tmp_path / "monitor.jsonl", looks=13)
    kept = lines(tmp_path / "monitor.jsonl")
    expected = [look for look in range(monitor.looks) if look % 10 == 0 or look == monitor.looks - 1]
    assert len(heard) == monitor.looks >= 13 and len(kept) == len(expected)
    assert kept[-1]["seconds"] == pytest.approx(heard[-1].seconds, abs=1e-3)


def test_a_rank_that_ended_is_left_out() -> None:
    meter = HostMeter()
    _, _, uses = meter.read([RankProcess(0, os.getpid()), RankProcess(1, 2**22 + 1)])
    assert [use.rank for use in uses] == [0]


def test_cores_are_those_kept_busy_between_looks() -> None:
    meter, moments = HostMeter(), [_now()]
    meter.read(own())
    moments.append(_now())
    while time.monotonic() < moments[1][0] + 0.4:
        pass
    moments.append(_now())
    _, _, (use,) = meter.read(own())
    moments.append(_now())
    (before, first), (began, start), (ended, stop), (after, last) = moments
    assert (stop - start) / (after - before) - 0.05 <= use.cores <= (last - first) / (ended - began) + 0.05
    assert meter.read(own())[2][0].cores == use.cores, "too soon to tell anew"


def _now() -> tuple[float, float]:
    """The clock, and this process's own."""
    return time.monotonic(), time.process_time()
