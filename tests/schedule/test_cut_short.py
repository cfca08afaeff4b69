"""A span that a pause cuts short: what is left out, and that what is left is still right."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from stagewright.schedule.action import Action
from stagewright.schedule.check import check_programs
from stagewright.schedule.lower import program
from tests.schedule.test_properties import Case, cases, many


@dataclass
class Rank:
    """Follows its program, and learns of the pause when it reaches some microbatch before it."""

    case: Case
    rank: int
    stop: int
    learns_at: int
    limit: int = sys.maxsize
    done: list[Action] = field(default_factory=list)

    def run(self) -> list[Action]:
        for action in program(self.case.plan, self.rank, self.case.span, lambda: self.limit):
            last = action.microbatch
            if last is None:
                assert action.version is not None
                last = (action.version + 1) * self.case.round(action.stage) - 1
            if last >= self.learns_at:
                self.limit = self.stop
                if last >= self.stop:
                    continue  # what a gate does: the pause was settled while the rank waited to begin
            self.done.append(action)
        return self.done


@many
@given(cases(), st.data())
def test_a_program_cut_short_is_right_and_does_what_the_short_one_does(case: Case, data: st.DataObject) -> None:
    plan, span = case.plan, case.span
    step = plan.pause_step * plan.microbatches
    first = -(-span.start // step) * step
    stops = range(first, span.stop, step)
    if not stops:
        return
    stop = data.draw(st.sampled_from(stops))
    short = range(span.start, stop)
    ranks = [Rank(case, rank, stop, data.draw(st.integers(span.start, stop))) for rank in range(plan.world)]
    programs = {rank.rank: rank.run() for rank in ranks}
    for rank, actions in programs.items():
        assert Counter(actions) == Counter(program(plan, rank, short))
    check_programs(plan, programs, short)
