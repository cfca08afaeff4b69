"""`kill -9` of random ranks, also while they write a checkpoint: the run ends by itself, as if nothing had happened.

STAGEWRIGHT_KILLS sets how many kills each plan has to take (`make soak`); without it one plan takes two.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stagewright.config.sections import Config
from stagewright.config.toml import make_config
from stagewright.run.train import Result, run
from stagewright.runtime.process.log import Ledger
from tests.distributed.test_command import ranks_of
from tests.keeping import KILLS, same_bits
from tests.shared import shared_file

STEPS = 300 if KILLS else 40
LONGEST = 1.0  # seconds of training before a kill


class Killer:
    """Hears what a run hears; once a start trains, kills one of its ranks at a random time, or in mid-write."""

    def __init__(self, runs: Path, kills: int, seed: int) -> None:
        self.killed: list[str] = []
        self._runs = runs
        self._left = kills
        self._random = random.Random(seed)
        self._is_armed = True

    def hear(self, event: dict[str, Any]) -> None:
        if event["kind"] == "restarted":
            self._is_armed = True
        elif event["kind"] == "losses" and self._is_armed and self._left:
            self._is_armed, self._left = False, self._left - 1
            in_write = self._left % 2 == 0
            threading.Thread(target=self._kill, args=(in_write, self._random.uniform(0, LONGEST)), daemon=True).start()

    def _kill(self, in_write: bool, delay: float) -> None:
        if in_write:
            limit = time.monotonic() + 30
            while not list(self._runs.glob("*/checkpoints/*.partial")) and time.monotonic() < limit:
                time.sleep(0.0005)
            time.sleep(self._random.uniform(0, 0.01))
        else:
            time.sleep(delay)
        torn = [path.name for path in self._runs.glob("*/checkpoints/*.partial/*")]
        os.kill(self._random.choice(ranks_of(self._runs)), signal.SIGKILL)
        self.killed.append(f"in a write of {len(torn)} files so far" if torn else "between writes")


def config(placement: str, runs: Path, **checkpoint: object) -> Config:
    data = shared_file("data/cifar10/train")
    return make_config(
        {
            "model": {"name": "resnet8"},
            "data": {"source": f"ofrecord:{data}", "limit": 480, "loader_threads": 1},
            "plan": {"placement": placement, "mode": "stale", "batch": 24, "cut": "layer3"},
            "optimizer": {"lr": 0.05, "weight_decay": 1e-4},
            "run": {
                "steps": STEPS,
                "eval_every": STEPS // 2,
                "runs": str(runs),
                "export": str(runs / "weights.safetensors"),
                "max_restarts": KILLS + 3,
            },
            "checkpoint": checkpoint,
        }
    )


def ranks_of_stages(placement: str) -> list[range]:
    ends = [stage.partition(":")[2].partition("-") for stage in placement.split(".")]
    return [range(int(first), int(last or first) + 1) for first, _, last in ends]


def records_of(result: Result, kind: str) -> list[dict[str, Any]]:
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("placement", ["0:0-1.0:2-3", "0:0-2.0:3"] if KILLS else ["0:0-1.0:2-3"])
def test_killed_ranks_leave_no_trace_in_the_result(placement: str, tmp_path: Path) -> None:
    before = config(placement, tmp_path / "undisturbed")
    is_exact = max(len(stage) for stage in ranks_of_stages(placement)) <= 2  # more replicas gloo adds in another order
    undisturbed = run(replace(before, run=replace(before.run, emulate=is_exact and not KILLS)))
    runs = tmp_path / "killed"
    killer = Killer(runs, KILLS or 2, seed=len(placement))
    hear = Ledger.handle

    def overhear(self: Ledger, event: dict[str, Any]) -> None:
        hear(self, event)
        killer.hear(event)

    with mock.patch.object(Ledger, "handle", overhear):
        result = run(config(placement, runs, every=3))
    print(f"\n{placement}: {len(killer.killed)} kills: {', '.join(killer.killed)}")
    assert len(killer.killed) == (KILLS or 2) and any(text.startswith("in a write") for text in killer.killed)
    causes = [record["cause"] for record in records_of(result, "restarted")]
    assert all("was killed by SIGKILL at" in cause for cause in causes), causes
    assert same_bits(result.weights(), undisturbed.weights())
    assert [step.loss for step in result.steps] == [step.loss for step in undisturbed.steps]
    assert [record["batch"] for record in records_of(result, "step")] == list(range(STEPS))
    assert [record["batch"] for record in records_of(result, "evaluated")] == [STEPS // 2, STEPS]
    assert result.evaluations == undisturbed.evaluations
    assert ranks_of(tmp_path) == []
