"""What a monitor's moments say of a run: peaks by stage, others on the machine, throttled GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from stagewright.bench.machine import Observed, observed, summarize
from stagewright.cluster.placement import parse_placement
from stagewright.events import GpuUsage, RankUsage, Usage
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode

PLAN = make_plan(parse_placement("0:0-1.0:2"), batch=8, microbatches=4, mode=Mode.STALE, cuts=("x",))


def moment(cores: float, *memory: int, gpus: tuple[GpuUsage, ...] = ()) -> Usage:
    ranks = tuple(RankUsage(rank, held, 0.5) for rank, held in enumerate(memory))
    return Usage(0.0, cores, 0, gpus, ranks)


def test_the_fullest_rank_of_each_stage_at_its_peak() -> None:
    found = summarize([moment(1.5, 10, 40, 5), moment(2.5, 20, 30, 7), moment(3.5, 1, 1, 1)], PLAN)
    assert found.memory == (40, 7) and found.others == 1.0 and found.foreign == 0 and found.gpu_memory == ()


def test_gpus_throttled_or_shared_with_others_are_told() -> None:
    gpus = [GpuUsage(f"GPU-{index}", index, 100 * (index + 1), 0.5) for index in range(3)]
    hot = GpuUsage("GPU-1", 1, 500, 0.5, throttled=("heat", "power"), foreign=2)
    found = summarize([moment(1.5, 1, 1, 1, gpus=tuple(gpus)), moment(1.5, 1, 1, 1, gpus=(hot,))], PLAN)
    assert found.gpu_memory == (500, 300) and found.throttled == ("heat", "power") and found.foreign == 2


def test_a_monitor_file_with_a_torn_line_is_read(tmp_path: Path) -> None:
    whole = json.dumps(asdict(moment(1.5, 10, 40, 5)))
    (tmp_path / "monitor.jsonl").write_text(f"{whole}\n{whole[:20]}")
    assert observed(tmp_path, PLAN).memory == (40, 5)


def test_without_a_monitor_nothing_is_known(tmp_path: Path) -> None:
    assert observed(tmp_path, PLAN) == Observed()
