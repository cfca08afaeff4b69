"""Unplanned pauses: all ranks agree on one batch, which none of them has begun."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from stagewright.cluster.placement import parse_placement
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.runtime.checkpoint.pauses import STOP, EmulatedPauses, Pauses, pause_batch
from stagewright.runtime.gate import Gate
from stagewright.runtime.job import NEVER
from tests.waiting import LONG, wait_until

MICROBATCHES = 4


def make(mode: Mode = Mode.STALE) -> Plan:
    return make_plan(parse_placement("0:0-1.0:2"), batch=8, microbatches=MICROBATCHES, mode=mode)


def test_a_gate_holds_batches_that_have_not_begun_and_no_others() -> None:
    gate = Gate(MICROBATCHES)
    assert gate.enter(5) and gate.is_completed()
    assert gate.hold() == 2  # batches 0 and 1 have begun
    assert gate.enter(7) and not gate.enter(8) and not gate.is_completed()
    gate.pause_at(3)
    assert gate.is_completed() and gate.limit == 12
    assert gate.enter(8) and gate.enter(11) and not gate.enter(12)
    gate.reopen()
    assert gate.enter(12) and gate.batch == NEVER


def test_a_gate_that_starts_later_counts_from_there() -> None:
    gate = Gate(MICROBATCHES)
    gate.start_at(7)
    assert gate.hold() == 7


def test_waiting_at_a_gate_ends_when_the_batch_is_known() -> None:
    gate = Gate(MICROBATCHES)
    gate.hold()
    threading.Timer(0.05, gate.pause_at, (9,)).start()
    gate.wait()
    assert gate.batch == 9


def test_emulated_ranks_do_not_pause_again_before_one_has_begun_a_batch() -> None:
    """However short the time between pauses is, or no batch would ever begin."""
    pauses = EmulatedPauses(make(), minutes=1e-9)
    gates = [pauses.gate() for _ in range(2)]
    for batch in range(3):
        assert all(gate.enter(MICROBATCHES * batch) for gate in gates[:: 1 if batch else -1])
        assert not gates[0].enter(MICROBATCHES * (batch + 1))  # this rank asks, as one has begun a batch since
        assert [gate.batch for gate in gates] == [batch + 1] * 2
        for gate in gates:
            gate.reopen()


@pytest.mark.parametrize(("reached", "pause"), [([3, 5, 4], 5), ([0, 0, 0], 0)])
def test_the_pause_is_the_first_batch_that_no_rank_has_begun(reached: list[int], pause: int) -> None:
    assert pause_batch(make(), reached) == pause


def test_pipedream_pauses_where_every_round_ends_with_a_batch() -> None:
    plan = make_plan(parse_placement("0:0-2.0:3-4"), batch=8, microbatches=4, mode=Mode.PIPEDREAM)
    assert plan.alignment == 6 and plan.pause_step == 3  # 12 microbatches: two of 6, three of 4
    assert pause_batch(plan, [4, 4, 3, 5, 4]) == 6


class Rank(threading.Thread):
    """Goes through batches at its own speed, at most two ahead of the slowest rank."""

    def __init__(self, number: int, store: HashStore, everyone: list[Rank], minutes: float) -> None:
        super().__init__(daemon=True)
        self.gate = Gate(MICROBATCHES)
        self.begun: list[int] = []
        self.paused: list[int] = []
        self._everyone = everyone
        self._random = random.Random(number)
        self._pauses = Pauses(store, number, make(), self.gate, minutes)

    def run(self) -> None:
        batch = 0
        while not (self.gate.is_last_pause and self.gate.batch == batch):
            if self.gate.batch == batch:
                self.paused.append(batch)
                self.gate.reopen()
            if batch > min((rank.begun[-1] if rank.begun else -1) for rank in self._everyone) + 2:
                time.sleep(0.0005)
                continue
            if not self.gate.enter(batch * MICROBATCHES):
                self.gate.wait()
                continue
            self.begun.append(batch)
            time.sleep(self._random.uniform(0, 0.003))
            batch += 1
        self.paused.append(batch)
        self._pauses.close()


def run_ranks(minutes: float, is_enough: Callable[[list[Rank]], bool]) -> list[Rank]:
    store = HashStore()
    ranks: list[Rank] = []
    ranks += [Rank(number, store, ranks, minutes) for number in range(3)]
    for rank in ranks:
        rank.start()
    wait_until(lambda: is_enough(ranks))
    store.set(STOP, STOP)
    for rank in ranks:
        rank.join(LONG)
        assert not rank.is_alive(), "the ranks never agreed"
    return ranks


def test_ranks_stop_together_at_a_batch_that_none_has_begun() -> None:
    first, *others = run_ranks(0.0, lambda ranks: min(len(rank.begun) for rank in ranks) > 20)
    assert len(first.paused) == 1 and all(rank.paused == first.paused for rank in others)
    assert all(rank.begun == list(range(first.paused[0])) for rank in (first, *others))


def test_timed_pauses_repeat_and_are_the_same_on_every_rank() -> None:
    first, *others = run_ranks(0.3 / 60, lambda ranks: len(ranks[0].paused) >= 2)
    assert len(first.paused) >= 3 and all(rank.paused == first.paused for rank in others)
    assert all(rank.begun == list(range(first.paused[-1])) for rank in (first, *others))
