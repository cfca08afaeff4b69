"""Heats of whole commands: turns, steady speeds, seconds to the first steps, and one line where a command fails."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagewright.bench.pages import headlines
from stagewright.bench.peers.cases import SUITES, only_cases
from stagewright.bench.peers.whole import Heat, run_heat
from stagewright.bench.result import new_outcome
from stagewright.errors import RunFailed

_OURS = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1]) / str(len(list(pathlib.Path(sys.argv[1]).glob('*'))))
folder.mkdir(parents=True)
folder.joinpath('summary.json').write_text(json.dumps({'images_per_second': 99.5}))
pathlib.Path(os.environ['TRITON_CACHE_DIR']).mkdir(parents=True, exist_ok=True)
print('epoch 1  step   1/110'); print('epoch 1  step  10/110'); print('done')
"""


@dataclass(frozen=True, slots=True)
class _Scripts(Heat):
    """Scripts in place of commands that need a GPU."""

    plain: str = "print('step 10/110'); print(100.0)"

    def ours(self, steps: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", _OURS, str(folder)]

    def theirs(self, steps: int) -> list[str]:
        return [sys.executable, "-c", self.plain]


def test_a_heat_compares_speeds_and_starts_turn_by_turn() -> None:
    said: list[str] = []
    outcome = run_heat(new_outcome("gpu", "", 3, 110), _Scripts("resnet50", 256, "bf16"), 3, 110, said.append)
    speeds, empty, full = outcome.ratios
    assert [len(row.repeats) for row in outcome.rows] == [3, 3, 1, 1, 2, 2]
    assert [row.unit for row in outcome.rows] == ["", "", "seconds", "seconds", "seconds", "seconds"]
    assert speeds.ratio.value == pytest.approx(0.995) and speeds.goal == ">= 0.99 known to 0.01"
    assert "empty caches" in empty.group and "full caches" in full.group and 0.2 < full.ratio.value < 5.0
    speed, start, _ = headlines(outcome)
    assert "train is 0.99" in speed and "times as fast as plain script" in speed
    assert "train takes" in start and "times as long as plain script" in start
    sides = [line.rpartition(", ")[2] for line in said]
    assert sides == ["stagewright train", "plain script", "plain script", "stagewright train"] + sides[:2]


def test_a_command_that_fails_ends_a_heat_in_one_line() -> None:
    for plain in ("import sys; sys.exit('no CUDA here')", "print('step 9/110')"):
        with pytest.raises(RunFailed, match="ended with") as caught:
            run_heat(new_outcome("gpu", "", 1, 110), _Scripts("resnet50", 256, "bf16", plain), 1, 110, lambda _: None)
        assert "\n" not in str(caught.value)


def test_heats_are_chosen_by_their_description() -> None:
    chosen = only_cases(SUITES["gpu"], "whole")
    assert not chosen.cases and [heat.model for heat in chosen.heats] == [
        "resnet50",
        "vgg16",
        "alexnet",
        "vit_b_16",
        "resnet50",
    ]
    command = chosen.heats[0].ours(110, Path("runs"))
    assert command[1:4] == ["-m", "stagewright", "train"] and "--compile" in command
