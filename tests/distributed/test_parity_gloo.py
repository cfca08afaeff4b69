"""Real ranks over gloo: against the reference, against the emulation, and against themselves."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.pool import Pool, PoolError
from tests.parity import (
    Case,
    Run,
    assert_parity,
    assert_same_bits,
    assert_scores,
    emulate,
    make_job,
    refer,
)

ALL_STAGES = "second,third,head"
CASES = [
    Case("normed", "0:0", mode="stale", versions=(2,), eval_every=4),
    Case("dropping", "0:0-1", microbatches=3, eval_every=4),
    Case("normed", "0:0-3", microbatches=3, eval_every=4),
    Case("normed", "0:0-3", microbatches=2, mode="stale", versions=(2,)),
    Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, microbatches=3, eval_every=3),
    Case("residual", "0:0-2.0:3", "third", optimizer={"clip": 0.3, "name": "adamw", "lr": 0.01}),
    Case("dropping", "0:0-6.0:7", "third", mode="stale", staleness=1, microbatches=12, eval_every=4),
    Case("normed", "0:0-6.0:7", "head", mode="stale", staleness=1, microbatches=4, eval_every=4),
    Case("normed", "0:0-6.0:7", "third", microbatches=3, optimizer={"clip": 0.3}),
    Case("plain", "0:0-6.0:7", "third", mode="pipedream", microbatches=2),
    Case("residual", "0:0.0:1-2", "third", mode="stale", versions=(1, 3)),
    Case("branching", "0:0-1.0:2-4", "right", mode="stale", staleness=1, eval_every=3),
    Case("normed", "0:0-1.0:2-4", "third", mode="pipedream", eval_every=3),
    Case("normed", "0:0-2.0:3-4.0:5-6.0:7", ALL_STAGES, mode="stale", staleness=3, microbatches=6, eval_every=4),
    Case("residual", "0:0-2.0:3-4.0:5-6.0:7", ALL_STAGES, mode="stale", staleness=1, microbatches=2),
    Case("dropping", "0:0-2.0:3-4.0:5-6.0:7", ALL_STAGES, mode="pipedream", microbatches=3),
    Case("normed", "0:0-2.0:3-4.0:5-6.0:7", ALL_STAGES, optimizer={"clip": 0.3}),
    Case("normed", "0:0-1.0:0-1", "third", mode="stale", staleness=1, microbatches=3, eval_every=4),
    Case("normed", "0:0-1.0:1,0", "third", microbatches=3, eval_every=4),
    Case("normed", "0:0.0:0-1.0:1", "second,third", microbatches=3, optimizer={"clip": 0.3}, eval_every=4),
    Case("dropping", "0:0.0:0-1.0:1", "second,third", mode="stale", staleness=2),
    Case("frozen_first", "0:0-1.0:2", "second", mode="stale", staleness=1, microbatches=3),
    Case("normed_residual", "0:0-1.0:2", "head", freeze="stem,block", mode="stale", staleness=1, eval_every=4),
    Case("tokens", "0:0-1.0:2", "mix", mode="stale", staleness=1, microbatches=3, eval_every=4),
    Case("in_place", "0:0-1.0:2", "relu", mode="stale", staleness=1, microbatches=3),
    Case("recurrent", "0:0-1.0:2", "lstm", mode="stale", staleness=1, microbatches=3, eval_every=4),
    Case("normed", "0:0-2.0:3", "third", mode="stale", staleness=1, precision="fp32", eval_every=4),
]


def run(pool: Pool, case: Case, folder: Path) -> Run:
    return pool.run(make_job(case, folder, export="for the pool.safetensors"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_static_and_dynamic_ranks_equal_the_reference_and_each_other(case: Case, pool: Pool, tmp_path: Path) -> None:
    static, result = run(pool, case, tmp_path), refer(case)
    assert_parity(case, static, result)
    if case.eval_every is not None:
        assert_scores(case, static, result)
    dynamic = run(pool, replace(case, dynamic=True), tmp_path)
    assert_same_bits(static, dynamic)
    assert static.scores == dynamic.scores
    assert_same_bits(static, emulate(case, tmp_path))


@pytest.mark.parametrize("case", [CASES[4], CASES[7], CASES[13], CASES[19]], ids=str)
def test_a_second_run_and_one_without_evaluations_give_the_same_bits(case: Case, pool: Pool, tmp_path: Path) -> None:
    assert case.eval_every is not None
    first = run(pool, case, tmp_path)
    assert_same_bits(first, run(pool, case, tmp_path))
    assert_same_bits(first, run(pool, replace(case, eval_every=None), tmp_path))


def test_the_pool_reports_a_failed_job_and_runs_the_next_one(pool: Pool, tmp_path: Path) -> None:
    case = Case("plain", "0:0-1.0:2", "third")
    with pytest.raises(PoolError, match=r"rank 2 failed:(.|\n)*NonFiniteLoss: the loss of batch \d is (nan|inf)"):
        run(pool, replace(case, optimizer={"lr": 1e300}), tmp_path)
    assert_parity(case, run(pool, case, tmp_path), refer(case))
    pool.processes[1].kill()
    with pytest.raises(PoolError, match=r"ranks \[1\] exited with \[-9\]"):
        run(pool, case, tmp_path)
