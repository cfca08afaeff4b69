"""How sides train one rank, without starting processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.sides import Unconnected
from stagewright.config.toml import make_config
from stagewright.run.prepare import prepare


def test_the_bound_trains_every_rank_without_the_others(tmp_path: Path) -> None:
    """Stage 0 has two ranks and stage 1 has one; each trains alone, and only the last stage computes losses."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": "vgg-small"},
        "data": {"samples": 16},
        "plan": {"placement": "0:0-1.0:2", "mode": "stale", "batch": 8, "microbatches": 4, "cut": "avgpool"},
        "run": {"steps": 4, "dynamic": True, "runs": str(tmp_path / "runs")},
    }
    job = prepare(make_config(tables)).job
    has_loss = []
    for rank in range(job.plan.world):
        side = Unconnected(job, rank, tmp_path)
        side.train(0, 2)
        side.train(2, 2)
        has_loss.append(side.loss is not None)
    assert has_loss == [False, False, True]
