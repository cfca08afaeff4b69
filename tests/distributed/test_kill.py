"""`kill -9` of random ranks, also while they write a checkpoint: the run restarts and ends with the same result.

STAGEWRIGHT_KILLS sets the number of kills per plan (`make soak`); without it there are two kills of one plan.
"""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stagewright.config.sections import Config
from stagewright.config.toml import make_config
from stagewright.events import BatchLosses, Event, Restarted, ShareSaved
from stagewright.run.train import Result, run
from stagewright.runtime.process.log import Ledger
from tests.distributed.test_command import ranks_of
from tests.keeping import KILLS, same_bits
from tests.marks import IS_NIGHTLY
from tests.shared import shared_file

STEPS = 300 if KILLS else 40
MOST_EVENTS = 48 if KILLS else 8  # losses before a kill


class Killer:
    """Gets a run's events and kills one rank per start, by turns after a random number of batches and in mid-write.

    Events come one at a time, and a checkpoint is committed by its last `saved` event: at an earlier one its files are
    certainly on the disk and incomplete. Never the same rank twice in a row: the same fault twice would end the run.
    """

    def __init__(self, runs: Path, kills: int, world: int, seed: int) -> None:
        self.killed: list[str] = []
        self._runs = runs
        self._left = kills
        self._ranks = set(range(world))
        self._random = random.Random(seed)
        self._last: int | None = None
        self._arm()

    def _arm(self) -> None:
        self._is_armed = self._left > 0
        self._in_write = self._left % 2 == 1
        self._losses = self._random.randint(1, MOST_EVENTS)  # events to wait for
        self._saved: dict[int, set[int]] = {}

    def handle(self, event: Event) -> None:
        if isinstance(event, Restarted):
            self._arm()
        elif isinstance(event, BatchLosses):
            self._losses -= 1
            if self._is_armed and not self._in_write and self._losses <= 0:
                self._kill(self._ranks)
        elif isinstance(event, ShareSaved):
            saved = self._saved.setdefault(event.batch, set())
            saved.add(event.rank)
            if self._is_armed and self._in_write and (writing := self._ranks - saved - {self._last}):
                self._kill(writing)

    def _kill(self, ranks: set[int]) -> None:
        self._is_armed, self._left = False, self._left - 1
        files = len(list(self._runs.glob("*/checkpoints/*.partial/*")))
        rank = self._random.choice(sorted(ranks - {self._last}))
        os.kill(ranks_of(self._runs)[rank], signal.SIGKILL)
        self._last = rank
        self.killed.append(f"in a write of {files} files so far" if files else "between writes")


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


@pytest.mark.skipif(not (KILLS or IS_NIGHTLY), reason="takes long: make nightly")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("placement", ["0:0-1.0:2-3", "0:0-2.0:3"] if KILLS else ["0:0-1.0:2-3"])
def test_killed_ranks_do_not_change_the_result(placement: str, tmp_path: Path) -> None:
    before = config(placement, tmp_path / "undisturbed")
    undisturbed = run(replace(before, run=replace(before.run, emulate=not KILLS)))
    runs = tmp_path / "killed"
    world = max(ranks_of_stages(placement)[-1]) + 1
    killer = Killer(runs, KILLS or 2, world, seed=len(placement))
    handle = Ledger.handle

    def handle_and_kill(self: Ledger, event: dict[str, Any]) -> None:
        handle(self, event)
        killer.handle(event)

    with mock.patch.object(Ledger, "handle", handle_and_kill):
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
