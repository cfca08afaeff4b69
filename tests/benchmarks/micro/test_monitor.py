"""`bench monitor`: which segments are monitored, and what their speeds mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.micro import monitor
from benchmarks.micro.monitor import Segments
from stagewright.events import Step
from stagewright.voice import SILENT


class FakeMonitor:
    """A monitor that only knows whether it is running."""

    def __init__(self) -> None:
        self.samples = 2
        self.processor_seconds = 0.001
        self.is_on = False

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False


def test_two_of_four_segments_are_monitored(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeMonitor] = []

    def make(*arguments: Any) -> FakeMonitor:
        made.append(FakeMonitor())
        return made[-1]

    monkeypatch.setattr(monitor, "make_monitor", make)
    monkeypatch.setattr(monitor, "ROUNDS", 2)
    job: Any = SimpleNamespace(plan=SimpleNamespace(batch=10))
    monitored = Segments(job, 4, SILENT)
    on: list[bool] = []
    for batch in range(40 + 8 * 5 + 3):
        monitored.receive(Step(batch, 0, 1.0, 0.1, batch * 0.5, 20.0))
        on.append(any(one.is_on for one in made))
    segments = [on[40 + 5 * index : 40 + 5 * index + 4] for index in range(8)]
    expected = [True, False, False, True] * 2
    assert segments == [[is_on] * 4 for is_on in expected] and not any(on[:40]) and not on[-1]
    assert monitored.watched == monitored.alone == [20.0] * 4  # four batches of ten in two seconds
    assert len(monitored.monitors) == 4


def test_the_ratio_is_right_although_the_machine_slows_down() -> None:
    """Speed falls by a fifth over the run, the monitor takes 3 %: the ratio is 0.97."""
    segments: Any = SimpleNamespace(watched=[], alone=[], monitors=[FakeMonitor()])
    for index in range(200):
        speed = 100 - 0.1 * index
        if index % 4 in (0, 3):
            segments.watched.append(speed * 0.97)
        else:
            segments.alone.append(speed)
    found = monitor.make_outcome(segments, "cpu", 0.25)
    (ratio,) = found.ratios
    assert ratio.ratio.value == pytest.approx(0.97, abs=1e-6) and len(found.rows[0].repeats) == 50
    assert (ratio.ours, ratio.goal) == ("with the monitor", "not slower")
    assert found.figures["% of a core that its thread takes"] == pytest.approx(0.2)  # half a millisecond of 250
