"""Turns of a monitor: which segments are looked at, and what their speeds say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stagewright.bench.micro import monitor as module
from stagewright.bench.micro.monitor import Found, Segments
from stagewright.events import Step


class Counting:
    """A monitor that only knows when it looks on."""

    def __init__(self) -> None:
        self.samples = 2
        self.processor_seconds = 0.001
        self.is_on = False

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False


def test_two_of_four_segments_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counting] = []

    def make(*arguments: Any) -> Counting:
        made.append(Counting())
        return made[-1]

    monkeypatch.setattr(module, "make_monitor", make)
    monkeypatch.setattr(module, "ROUNDS", 2)
    job: Any = SimpleNamespace(plan=SimpleNamespace(batch=10))
    turns = Segments(job, 4, lambda text: None)
    on: list[bool] = []
    for batch in range(40 + 8 * 5 + 3):
        turns.receive(Step(batch, 0, 1.0, 0.1, batch * 0.5, 20.0))
        on.append(any(monitor.is_on for monitor in made))
    segments = [on[40 + 5 * index : 40 + 5 * index + 4] for index in range(8)]
    expected = [True, False, False, True] * 2
    assert segments == [[is_on] * 4 for is_on in expected] and not any(on[:40]) and not on[-1]
    assert turns.watched == turns.alone == [20.0] * 4  # four batches of ten in two seconds
    assert len(turns.monitors) == 4


def test_a_cost_shows_through_a_machine_that_slows_down() -> None:
    """Speed falls by a fifth over the run, the monitor takes 3 %: the ratio says 0.97 all the same."""
    speeds = [100 - 0.1 * segment for segment in range(200)]
    watched = tuple(speed * 0.97 for index, speed in enumerate(speeds) if index % 4 in (0, 3))
    alone = tuple(speed for index, speed in enumerate(speeds) if index % 4 in (1, 2))
    found = Found("cpu", watched, alone, 0.5, 100, 0.1, 0.2)
    assert found.ratio.value == pytest.approx(0.97, abs=1e-6)
    assert found.share == pytest.approx(0.002)  # a millisecond a look, two looks a second
    assert module.describe(found)["ratio"]["value"] == found.ratio.value
