"""Parameters that several stages use, trained by real ranks over gloo."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.parity import TOLERANCE, Case, assert_near, assert_parity, assert_same_bits, emulate, make_job, refer

ENDS = (("embed.weight", (0, 3)),)
FOUR = Case("language", "0:0.0:1.0:2.0:3", "first,second,head", ties=ENDS)
CASES = {
    "sync, clipped": replace(FOUR, optimizer={"clip": 0.05}),
    "stale, clipped": replace(FOUR, mode="stale", staleness=3, optimizer={"clip": 0.02, "name": "adamw", "lr": 0.01}),
    "stale 2-1": Case(
        "language", "0:0-1.0:2", "second", mode="stale", staleness=1, eval_every=4, ties=(("embed.weight", (0, 1)),)
    ),
    "homes on one rank": replace(FOUR, placement="0:0-1.0:2.0:3.0:1,0", mode="stale", staleness=1, microbatches=3),
    "overlapping": replace(FOUR, model="chained", mode="stale", staleness=1, ties=(*ENDS, ("gain.weight", (0, 1, 2)))),
}


DAILY = ("stale, clipped", "homes on one rank")


@pytest.mark.parametrize("name", CASES if os.environ.get("STAGEWRIGHT_NIGHTLY") else DAILY)
def test_ranks_equal_the_reference_static_and_dynamic(name: str, pool: Pool, tmp_path: Path) -> None:
    case = CASES[name]
    static = pool.run(make_job(case, tmp_path, export="for the pool.safetensors"))
    assert_parity(case, static, refer(case))
    dynamic = pool.run(make_job(replace(case, dynamic=True), tmp_path, export="for the pool.safetensors"))
    assert_same_bits(static, dynamic)
    assert_near(static.weights, emulate(case, tmp_path).weights, TOLERANCE[case.precision] / 100)
