"""Real ranks pause at unplanned batches, save and continue, without changing a bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.events import ShareSaved
from stagewright.runtime.checkpoint.folder import list_folders
from stagewright.runtime.job import Job
from stagewright.runtime.process.log import Ledger
from tests.distributed.pool import Pool
from tests.keeping import KILLS, keeping, resumed, same_bits, saved_at
from tests.marks import IS_NIGHTLY
from tests.parity import Case, Run, make_job

CASES = [
    Case("normed", "0:0-2.0:3", "third", mode="stale", staleness=1, microbatches=4, batch=96, samples=200),  # by gloo
    Case("dropping", "0:0-1.0:2-4", "third", mode="pipedream", microbatches=4, optimizer={"name": "adamw", "lr": 0.01}),
    Case("normed", "0:0-1.0:1,0", "third", microbatches=3, optimizer={"clip": 0.3}),
    Case("plain", "0:0-7", mode="dp", microbatches=3),  # in each batch, most ranks only join the all-reduce
]


def run(pool: Pool, job: Job) -> Run:
    with Ledger(job, lambda record: None) as ledger:
        done = pool.run(job)
        for event in done.events:
            if isinstance(event, ShareSaved):
                ledger.handle(event)
    return done


ALL = [replace(case, dynamic=dynamic, steps=120) for case in CASES for dynamic in (False, True)]
FEW = [replace(CASES[0], steps=40), *([replace(CASES[3], steps=24)] if IS_NIGHTLY else [])]


@pytest.mark.parametrize("case", ALL if KILLS else FEW, ids=str)
def test_timed_pauses_change_no_bit(case: Case, pool: Pool, tmp_path: Path) -> None:
    for steps in (case.steps, 4 * case.steps, 16 * case.steps):  # a fast run may end before its first pause
        case = replace(case, steps=steps)
        kept = run(pool, keeping(make_job(case, tmp_path, export="for the pool"), minutes=0.05 / 60, keep=0))
        if folders := list_folders(Path(kept.job.folder)):
            break
    assert folders, "the run ended before its first pause"
    whole = run(pool, make_job(case, tmp_path, export="for the pool"))
    assert same_bits(kept.weights, whole.weights) and kept.microbatch_losses == whole.microbatch_losses
    checkpoint = saved_at(kept.job, int(folders[0].name))
    checkpoint.verify()
    if checkpoint.batch < case.steps:
        again = run(pool, resumed(make_job(case, tmp_path, export="for the pool"), checkpoint))
        assert same_bits(again.weights, whole.weights)
