"""Real ranks compare evaluations through their store: all stop early after the same one, and count on when resumed."""

from __future__ import annotations

from pathlib import Path

from stagewright.events import BatchLosses, Scored
from stagewright.runtime.checkpoint.folder import find_best
from stagewright.runtime.process.log import Ledger
from tests.distributed.pool import Pool
from tests.keeping import emulate_job, keeping, resumed, same_bits, saved_at
from tests.parity import Case, Run, make_job

CASE = Case("plain", "0:0-1.0:2-3", "third", mode="stale", staleness=1, steps=8, eval_every=2, optimizer={"lr": 1.0})
OPTIONS = {"best": "loss", "keep": 1}


def stop_of(run: Run) -> int:
    """The batch after which every rank of the last stage has ended."""
    trained = {number // CASE.microbatches for e in run.events if isinstance(e, BatchLosses) for number, *_ in e.losses}
    last = {event.rank: event.batch for event in run.events if isinstance(event, Scored)}
    assert set(last.values()) == {max(trained) + 1}
    return max(trained) + 1


def test_ranks_stop_early_together_and_count_on_after_a_resume(pool: Pool, tmp_path: Path) -> None:
    job = keeping(make_job(CASE, tmp_path, export="for the pool", early_stop=1), **OPTIONS)
    with Ledger(job, lambda record: None) as ledger:
        run = pool.run(job)
        for event in run.events:
            ledger.handle(event)
    best = int(find_best(Path(job.folder)).name)
    assert 2 < best + 2 == stop_of(run) < CASE.steps and ledger.stopped_early
    emulated = emulate_job(keeping(make_job(CASE, tmp_path, early_stop=1), **OPTIONS))
    assert stop_of(emulated) == stop_of(run) and same_bits(emulated.weights, run.weights)
    again = pool.run(resumed(job, saved_at(job, best)))
    assert stop_of(again) == stop_of(run) and same_bits(again.weights, run.weights)
