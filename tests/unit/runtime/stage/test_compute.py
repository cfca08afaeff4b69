"""Compiled stages give the reference's numbers, and compile once per stage however many versions there are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from tests.parity import Case, assert_near, emulate, make_job, refer


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", "0:0.0:1.0:2", "second,third", mode="stale", staleness=2, steps=6, eval_every=3),
        Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, steps=6, dynamic=True),
    ],
    ids=str,
)
def test_compiled_stages_equal_the_reference_and_compile_once(case: Case, tmp_path: Path) -> None:
    """On the CPU without code generation, on which the graphs, their number and their results do not depend."""
    torch._dynamo.reset()
    counters.clear()
    with (
        mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        mock.patch("tests.parity.make_job", partial(make_job, compile=True)),
    ):
        run = emulate(case, tmp_path)
    expected = refer(case)
    assert_near(run.weights, expected.weights | expected.buffers, 1e-9)
    assert counters["stats"]["unique_graphs"] == run.job.plan.world, "one per rank, since here they share a process"
