"""What keeps CUDA graphs from being tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.runtime.process.assemble import graph_obstacle
from tests.parity import Case, make_job

_MAY_DIFFER = "may do something else for another batch"


@pytest.mark.parametrize(
    ("model", "placement", "cut", "words"),
    [
        ("plain", "0:0", None, "use --cuda-graph on"),
        ("dropping", "0:0", None, "use --cuda-graph on"),
        ("sometimes", "0:0", None, _MAY_DIFFER),
        ("untraceable", "0:0", None, _MAY_DIFFER),
        ("plain", "0:0.0:1", "third", "the run has 2 ranks"),
        ("plain", "0:0-1", None, "the run has 2 ranks"),
    ],
)
def test_only_what_is_known_to_run_alike_for_every_batch_on_one_rank_is_captured(
    model: str, placement: str, cut: str | None, words: str, tmp_path: Path
) -> None:
    mode = "stale" if cut else "dp"
    found = graph_obstacle(make_job(Case(model, placement, cut, mode=mode, steps=1), tmp_path))
    assert found is not None and words in found


def test_one_of_our_own_models_is_captured_unless_a_script_trains_it(tmp_path: Path) -> None:
    job = make_job(Case("plain", "0:0", mode="dp", steps=1), tmp_path)
    job = replace(job, config=replace(job.config, model=replace(job.config.model, name="resnet8")))
    assert graph_obstacle(job) is None
    assert graph_obstacle(replace(job, is_scripted=True)) == "a script may change its model between batches"
