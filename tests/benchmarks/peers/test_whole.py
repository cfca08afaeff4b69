"""Pairs of whole commands: turns, steady speeds, seconds to the first steps, and one line where a command fails."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.outcome import new_outcome, summary
from benchmarks.peers.cases import SUITES, only_cases
from benchmarks.peers.whole import CommandPair, run_pair
from stagewright.data.datasets import open_records
from stagewright.errors import RunFailed
from stagewright.voice import SILENT, Voice

_OURS = """
import json, os, pathlib, sys
runs = pathlib.Path(sys.argv[1]) / 'runs'
folder = runs / str(len(list(runs.glob('*'))))
folder.mkdir(parents=True)
folder.joinpath('summary.json').write_text(json.dumps({'images_per_second': float(sys.argv[2])}))
pathlib.Path(os.environ['TRITON_CACHE_DIR']).mkdir(parents=True, exist_ok=True)
print('epoch 1  step   1/110'); print('epoch 1  step  10/110'); print('done')
"""


@dataclass(frozen=True, slots=True)
class _Scripts(CommandPair):
    """Scripts in place of commands that need a GPU."""

    plain: str = "print('step 10/110'); print(100.0)"

    def commands(self, steps: int, folder: Path) -> tuple[list[str], list[str]]:
        ours, theirs = (self._script(folder, speed) for speed in ("99.5", "100"))
        if not self.from_files:
            return ours, [sys.executable, "-c", self.plain]
        records = open_records(f"ofrecord:{folder}/images")
        assert len(records) == 6 and records.get(5).data.startswith(b"P6\n341 256\n255\n") and records.classes == 6
        return self._script(folder, "98"), theirs

    def _script(self, folder: Path, speed: str) -> list[str]:
        return [sys.executable, "-c", _OURS, str(folder), speed]


def test_a_pair_compares_speeds_and_starts_turn_by_turn() -> None:
    said: list[str] = []
    outcome = run_pair(
        new_outcome("gpu", "", 3, 110), _Scripts("resnet50", 256, "bf16"), 3, 110, Voice(progress=said.append)
    )
    speeds, empty, full = outcome.ratios
    assert [len(row.repeats) for row in outcome.rows] == [3, 3, 1, 1, 2, 2]
    assert [row.unit for row in outcome.rows] == ["", "", "seconds", "seconds", "seconds", "seconds"]
    assert speeds.ratio.value == pytest.approx(0.995) and speeds.goal == ">= 0.99 known to 0.01"
    pairs = [ours.rate / theirs.rate for ours, theirs in zip(*(row.repeats for row in outcome.rows[4:]), strict=True)]
    assert min(pairs) <= full.ratio.value <= max(pairs)
    assert "empty caches" in empty.group and "full caches" in full.group
    speed, start, *_ = summary(outcome)
    assert "train is 0.99" in speed and "times as fast as plain script" in speed
    assert "train takes" in start and "times as long as plain script" in start
    sides = [line.rpartition(", ")[2] for line in said]
    assert sides == ["stagewright train", "plain script", "plain script", "stagewright train"] + sides[:2]


def test_a_pair_from_files_compares_the_same_command_with_synthetic_images() -> None:
    pair, said = _Scripts("resnet50", 256, "bf16", from_files=True, images=6), list[str]()
    outcome = run_pair(new_outcome("gpu", "", 2, 110), pair, 2, 110, Voice(progress=said.append))
    (speeds,) = outcome.ratios
    assert [len(row.repeats) for row in outcome.rows] == [2, 2] and speeds.ratio.value == pytest.approx(0.98)
    assert (speeds.goal, speeds.is_met) == (">= 0.97", True) and "from files" in speeds.ours
    (chosen,) = only_cases(SUITES["gpu"], "files").pairs
    command, other = chosen.commands(110, Path("here"))
    assert "ofrecord:here/images" in command and "synthetic" in other and "--workers" not in command
    assert set(other) - set(command) == {"synthetic", "--samples", "28160"}


def test_a_command_that_fails_ends_a_pair_in_one_line() -> None:
    for plain in ("import sys; sys.exit('no CUDA here')", "print('step 9/110')"):
        with pytest.raises(RunFailed, match="ended with") as caught:
            run_pair(new_outcome("gpu", "", 1, 110), _Scripts("resnet50", 256, "bf16", plain=plain), 1, 110, SILENT)
        assert "\n" not in str(caught.value)


def test_pairs_are_chosen_by_their_description() -> None:
    chosen = only_cases(SUITES["gpu"], "whole")
    assert not chosen.cases and [pair.model for pair in chosen.pairs] == [
        "resnet50",
        "vgg16",
        "alexnet",
        "vit_b_16",
        "resnet50",
        "resnet50",
    ]
    assert [pair.steps for pair in chosen.pairs] == [110] * 5 + [440]
    assert [pair.commands(1, Path())[1][-1] for pair in chosen.pairs] == ["default"] * 5 + ["reduce-overhead"]
    command = chosen.pairs[0].commands(110, Path("runs"))[0]
    assert command[1:4] == ["-m", "stagewright", "train"] and "--compile" in command
