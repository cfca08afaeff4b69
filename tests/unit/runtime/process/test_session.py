"""A script's loop over the batches of a run: what it sees, and what leaving it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.events import BatchLosses, Event, ShareSaved
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.session import Session, last_begun
from stagewright.runtime.script.feed import BatchLoader
from tests.keeping import keeping
from tests.parity import Case, make_job, refer

CASES = [
    Case(placement="0:0", mode="dp"),
    Case(placement="0:0-2", mode="dp"),
    Case(placement="0:0.0:1", cut="second"),
    Case(placement="0:0-1.0:2", cut="second", mode="stale", staleness=1),
    Case(placement="0:0-1.0:2.0:3", cut="second,third", mode="stale", staleness=2, microbatches=3),
    Case(placement="0:0.0:1.0:0", cut="second,third", mode="stale", staleness=2),
    Case(placement="0:0-2.0:3", cut="second", mode="stale", staleness=1, microbatches=2),
    Case(placement="0:0.0:1", cut="second", mode="stale", staleness=1, dynamic=True),
]


def open_session(case: Case, folder: Path, **checkpoint: Any) -> tuple[Session, list[Event]]:
    events: list[Event] = []
    session = Emulation(replace(keeping(make_job(case, folder), **checkpoint), is_scripted=True), events.append)
    session.begin()
    return session, events


def assert_trained(session: Session, case: Case) -> None:
    """The weights of a session are those of the reference after all steps."""
    weights = session.weights()
    assert session.done == case.steps
    for name, tensor in refer(case).weights.items():
        assert torch.allclose(weights[name], tensor, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_loop_sees_the_reference_s_losses_and_leaves_its_weights(case: Case, tmp_path: Path) -> None:
    session, _ = open_session(case, tmp_path)
    losses = [(done.batch, done.loss()) for done in session.train(case.steps)]
    assert [batch for batch, _ in losses] == list(range(case.steps))
    assert [loss for _, loss in losses] == pytest.approx(refer(case).losses, rel=1e-10)
    assert_trained(session, case)


def test_the_loader_of_an_epoch_is_closed_when_the_next_one_begins(tmp_path: Path) -> None:
    class Closing(BatchLoader):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    session, _ = open_session(CASES[0], tmp_path)
    first, second = (Closing({}, (), torch.float64, torch.device("cpu")) for _ in range(2))
    session.load_from(first)
    session.load_from(second)
    assert (first.closed, second.closed) == (1, 0)
    session.close()
    assert second.closed == 1


@pytest.mark.parametrize("checkpoint", [{}, {"every": 4}, {"minutes": 1e-9}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_leaving_the_loop_trains_what_was_begun_and_the_next_loop_continues(
    case: Case, tmp_path: Path, checkpoint: dict[str, Any]
) -> None:
    session, _ = open_session(case, tmp_path, **checkpoint)
    lag = max(case.num_versions) - 1
    for done in session.train(case.steps):
        if done.batch == 2:
            break
    assert session.done == 3 + lag
    rest = [done.batch for done in session.train(case.steps)]
    assert rest == list(range(3 + lag, case.steps))
    assert_trained(session, case)


@pytest.mark.parametrize("checkpoint", [{"every": 1}, {"minutes": 1e-9}], ids=str)
def test_what_interrupts_a_loop_passes_pauses_and_is_saved_behind_them(
    checkpoint: dict[str, Any], tmp_path: Path
) -> None:
    session, events = open_session(CASES[4], tmp_path, **checkpoint)
    for done in session.train(8):
        if done.batch == 2:
            session.states()
            assert session.done == last_begun(session.plan, 2) == 5
    session.close()
    saved = {event.batch for event in events if isinstance(event, ShareSaved)}
    assert 5 in saved and 4 not in saved


def test_losses_have_the_same_bits_on_every_rank(tmp_path: Path) -> None:
    case = Case(placement="0:0-1.0:2", cut="second", mode="stale", staleness=1, microbatches=6)
    session, events = open_session(case, tmp_path)
    seen: dict[int, set[float]] = {}
    for worker in session.workers:
        original = worker.batches_done

        def noting(action, original=original):
            for done in original(action):
                seen.setdefault(done.batch, set()).add(done.loss())
                yield done

        worker.batches_done = noting
    for _ in session.train(case.steps):
        pass
    assert len(seen) == case.steps and all(len(losses) == 1 for losses in seen.values())
    reported = {
        number: total for event in events if isinstance(event, BatchLosses) for number, total, _ in event.losses
    }
    for batch, (loss,) in seen.items():
        assert loss == sum(reported[number] for number in range(6 * batch, 6 * batch + 6)) / 6


def test_pipedream_stops_where_rounds_end_together(tmp_path: Path) -> None:
    case = Case(placement="0:0-2.0:3", cut="second", mode="pipedream", microbatches=2, steps=9)
    session, _ = open_session(case, tmp_path)
    assert session.plan.pause_step == 3
    for done in session.train(9):
        if done.batch == 0:
            break
    assert session.done % 3 == 0 and session.done == last_begun(session.plan, 0)
    assert [done.batch for done in session.train(9)] == list(range(session.plan.pause_step * 1, 9))[-(9 - 3) :]


class Listed:
    """Batches that a script gives one at a time."""

    def __init__(self) -> None:
        self.given = 0
        self.is_over = False

    def has(self, batch: int) -> bool | None:
        return True if batch < self.given else (False if self.is_over else None)


@pytest.mark.parametrize("case", [case for case in CASES if not case.dynamic], ids=str)
def test_batches_may_come_one_by_one(case: Case, tmp_path: Path) -> None:
    session, _ = open_session(case, tmp_path)
    feed, seen = Listed(), []
    for done in session.train(10**6, feed):
        if done is not None:
            seen.append(done.batch)
        elif feed.given < case.steps:
            feed.given += 1
        else:
            feed.is_over = True
    assert seen == list(range(case.steps))
    assert_trained(session, case)


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_a_checkpoint_in_the_loop_drains_and_the_loop_sees_every_batch(case: Case, tmp_path: Path) -> None:
    session, _ = open_session(case, tmp_path)
    seen = []
    for done in session.train(case.steps):
        seen.append(done.batch)
        if done.batch == 2:
            session.drain()
            assert session.done == min(case.steps, 2 + max(case.num_versions))
    assert seen == list(range(case.steps))
    assert_trained(session, case)


def test_what_the_script_draws_is_its_own(tmp_path: Path) -> None:
    session, _ = open_session(CASES[2], tmp_path)
    torch.manual_seed(7)
    expected = torch.rand(CASES[2].steps)
    torch.manual_seed(7)
    assert torch.equal(torch.stack([torch.rand(()) for _ in session.train(CASES[2].steps)]), expected)
