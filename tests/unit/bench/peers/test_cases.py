"""Goals of ratios."""

from __future__ import annotations

from stagewright.bench.peers.cases import at_least, at_most, not_slower
from stagewright.bench.statistics import Interval


def test_goals_are_met_by_the_ratio_or_by_its_interval() -> None:
    ratio = Interval(0.95, 0.9, 1.01)
    assert not_slower().is_met(ratio)
    assert not not_slower().is_met(Interval(0.95, 0.9, 0.99))
    assert at_most(0.95).is_met(ratio) and not at_most(0.5).is_met(ratio)
    assert at_least(0.95).is_met(ratio) and not at_least(1.2).is_met(ratio)
