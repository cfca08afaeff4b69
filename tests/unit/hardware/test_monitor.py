"""The monitor writes what it samples, and its faults never reach the run."""

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

from stagewright.events import GpuUsage, RankUsage, Usage
from stagewright.hardware import monitor as module
from stagewright.hardware.meters import HostMeter, RankProcess
from stagewright.hardware.monitor import Monitor, Totals
from stagewright.voice import Voice
from tests.nvml_like import Card, Library, uuid
from tests.waiting import LONG, wait_until

EVERY = 0.05


def own() -> Sequence[RankProcess]:
    return [RankProcess(0, os.getpid(), 77)]


def run_monitor(
    path: Path,
    ranks: Callable[[], Sequence[RankProcess]] = own,
    *,
    gpus: bool = False,
    samples: int = 3,
    until: Callable[[Monitor], bool] | None = None,
) -> tuple[Monitor, list[Usage], list[str]]:
    """Run a monitor for so many samples; return it with what it reported."""
    reported: list[Usage] = []
    warnings: list[str] = []
    find = (lambda nvml: [uuid(0)]) if gpus else None
    with Monitor(path, EVERY, ranks, find, reported.append, Voice(warnings.append)) as monitor:
        wait_until(lambda: until(monitor) if until else monitor.samples >= samples)
    return monitor, reported, warnings


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_writes_one_line_per_sample_with_the_process_of_each_rank(tmp_path: Path) -> None:
    monitor, reported, warnings = run_monitor(tmp_path / "monitor.jsonl")
    kept = lines(tmp_path / "monitor.jsonl")
    assert len(kept) == len(reported) == monitor.samples >= 3 and not warnings
    assert 0 <= kept[0]["seconds"] < kept[1]["seconds"] and kept[1]["seconds"] >= EVERY
    (rank,) = kept[-1]["ranks"]
    assert rank["rank"] == 0 and rank["memory"] > 10 << 20 and rank["torch_memory"] == 77
    assert kept[-1]["gpus"] == [] and kept[-1]["memory"] > rank["memory"] // 2
    assert monitor.totals.describe()["moments"] == monitor.samples
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]


def test_a_resumed_run_appends_and_continues_its_seconds(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    whole = '{"seconds": 41.5, "cores": 1, "memory": 1, "gpus": [], "ranks": []}'
    path.write_text(f'{whole}\n{{"seconds": 42.')  # torn by a kill
    run_monitor(path)
    text = path.read_text().splitlines()
    assert text[1] == '{"seconds": 42.' and json.loads(text[2])["seconds"] >= 41.5


def test_samples_gpus_and_closes_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([Card(used=3 << 30)])
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monitor, _, warnings = run_monitor(tmp_path / "monitor.jsonl", gpus=True)
    assert [gpu["memory"] for gpu in lines(tmp_path / "monitor.jsonl")[-1]["gpus"]] == [3 << 30]
    assert monitor.totals.describe()["gpus"][0]["peak_memory"] == 3 << 30 and not warnings and not library.is_open


def test_a_missing_driver_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([])
    library.init_error = "NVML Shared Library Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monitor, _, warnings = run_monitor(tmp_path / "monitor.jsonl", gpus=True)
    assert monitor.samples >= 3
    (warning,) = warnings
    assert "NVML Shared Library Not Found" in warning


def test_a_gpu_that_falls_off_the_bus_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(silent={"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates"})
    monkeypatch.setitem(sys.modules, "pynvml", Library([card]))
    _, _, warnings = run_monitor(tmp_path / "monitor.jsonl", gpus=True)
    (warning,) = warnings
    assert f"GPU 0 ({uuid(0)})" in warning


def test_gpus_missing_from_the_driver_are_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library([Card()]))
    warnings: list[str] = []
    with Monitor(
        tmp_path / "m.jsonl", EVERY, own, lambda nvml: [], lambda use: None, Voice(warnings.append)
    ) as monitor:
        wait_until(lambda: monitor.samples >= 2)
    assert len(warnings) == 1 and "finds none of the run's GPUs" in warnings[0]


def test_a_file_that_cannot_be_written_is_one_warning_and_totals_continue(tmp_path: Path) -> None:
    monitor, reported, warnings = run_monitor(tmp_path / "missing" / "monitor.jsonl")
    assert len(warnings) == 1 and str(tmp_path / "missing") in warnings[0]
    assert monitor.totals.describe()["moments"] == len(reported) >= 3


def test_an_exception_ends_the_monitor_but_not_the_run(tmp_path: Path) -> None:
    def broken() -> Sequence[RankProcess]:
        raise KeyError("nobody thought of this")

    _, _, warnings = run_monitor(tmp_path / "monitor.jsonl", broken, until=lambda monitor: not monitor.is_running)
    assert len(warnings) == 1 and warnings[0].startswith("the monitor stopped: KeyError")


def test_a_hanging_driver_does_not_delay_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    monkeypatch.setattr(module, "PATIENCE", 0.2)

    def hanging() -> Sequence[RankProcess]:
        freed.wait(LONG)
        return []

    monitor = Monitor(tmp_path / "m.jsonl", EVERY, hanging, None, lambda use: None)
    with monitor:
        pass
    assert monitor.is_running, "leaving the context waited for the driver"
    freed.set()


def test_a_long_run_writes_fewer_lines_but_samples_as_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_SECONDS", 0.0)
    monitor, reported, _ = run_monitor(tmp_path / "monitor.jsonl", samples=13)
    kept = lines(tmp_path / "monitor.jsonl")
    expected = [sample for sample in range(monitor.samples) if sample % 10 == 0 or sample == monitor.samples - 1]
    assert len(reported) == monitor.samples >= 13 and len(kept) == len(expected)
    assert kept[-1]["seconds"] == pytest.approx(reported[-1].seconds, abs=1e-3)


def test_a_rank_that_has_ended_is_left_out() -> None:
    meter = HostMeter()
    _, _, usages = meter.read([RankProcess(0, os.getpid()), RankProcess(1, 2**22 + 1)])
    assert [usage.rank for usage in usages] == [0]


def test_cores_are_those_kept_busy_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, moments = HostMeter(), [_now()]
    meter.read(own())
    moments.append(_now())
    while time.monotonic() < moments[1][0] + 0.4:
        pass
    moments.append(_now())
    _, _, (usage,) = meter.read(own())
    moments.append(_now())
    (before, first), (began, start), (ended, stop), (after, last) = moments
    assert (stop - start) / (after - before) - 0.05 <= usage.cores <= (last - first) / (ended - began) + 0.05
    monkeypatch.setattr("stagewright.hardware.meters.SHORTEST_WINDOW", LONG)
    assert meter.read(own())[2][0].cores == usage.cores, "too soon for another reading"


def _now() -> tuple[float, float]:
    """Seconds of the wall clock, and of this process's processor time."""
    return time.monotonic(), time.process_time()


def sample(seconds: float, *gpus: GpuUsage, memory: int = 10, held: int | None = None) -> Usage:
    return Usage(seconds, 2.0, 1000 + int(seconds), gpus, (RankUsage(0, memory, 0.5, held), RankUsage(1, 5, 1.0)))


def gpu(power: float | None, energy: float | None, *throttled: str, memory: int = 100, foreign: int = 0) -> GpuUsage:
    return GpuUsage("GPU-a", 3, memory, 0.5, power, energy, 50.0, 1e9, throttled, foreign)


def test_totals_are_peaks_means_energy_and_throttled_seconds() -> None:
    totals = Totals()
    totals.add(sample(10.0, gpu(100, 5000, "power cap")))  # the time before the first sample is unknown
    totals.add(sample(11.0, gpu(200, 5150, "power cap"), memory=30, held=7))
    totals.add(sample(13.0, gpu(300, 5700, "power cap", "software thermal", memory=900), held=3))
    totals.add(sample(14.0, gpu(200, 5900, foreign=2)))
    found = totals.describe()
    (card,) = found["gpus"]
    assert (card["peak_memory"], card["foreign"], card["index"], card["uuid"]) == (
        900,
        2,
        3,
        "GPU-a",
    )
    assert card["throttled"] == {"power cap": 3.0, "software thermal": 2.0} and card["throttled_seconds"] == 3.0
    assert (card["energy"], card["mean_power"]) == (900, pytest.approx((200 + 2 * 300 + 200) / 4))
    assert (found["energy"], found["foreign"], found["throttled_seconds"]) == (900, 2, 3.0)
    assert (found["seconds"], found["moments"], found["peak_machine_memory"]) == (4.0, 4, 1014)
    first, second = found["ranks"]
    assert (first["peak_memory"], first["peak_torch_memory"], first["mean_cores"]) == (30, 7, 0.5)
    assert (second["rank"], second["peak_torch_memory"]) == (1, None)


def test_energy_without_a_counter_is_power_times_seconds() -> None:
    totals = Totals()
    for seconds, power in ((0, 100), (2, 150), (3, 250)):
        totals.add(sample(float(seconds), gpu(power, None)))
    assert totals.describe()["energy"] == 2 * 150 + 250


def test_an_energy_counter_that_restarts_never_subtracts() -> None:
    totals = Totals()
    for seconds, energy in ((0, 9000), (1, 9100), (2, 10), (3, 60)):
        totals.add(sample(float(seconds), gpu(None, energy)))
    assert totals.describe()["energy"] == 150


def test_totals_without_gpus_are_none() -> None:
    totals = Totals()
    totals.add(sample(0.0))
    found = totals.describe()
    assert (found["gpus"], found["energy"], found["mean_power"], found["foreign"]) == ([], None, None, None)
