"""Growth: what runs used is counted from their files, and the last of a group is compared with its first."""

from pathlib import Path

import pytest

from stagewright.bench.micro.growth import DOUBLED, Shape, Taken, counts, make_outcome, take, train
from stagewright.bench.pages import headlines
from stagewright.cluster.placement import parse_placement
from stagewright.metrics import MIB, Span
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode


def test_every_shape_doubles_the_one_before_and_has_stages_of_as_many_layers() -> None:
    microbatches, stages, ranks = (doubled.shapes for doubled in DOUBLED)
    assert [shape.microbatches for shape in microbatches] == [4, 8, 16, 32]
    assert [len(parse_placement(shape.placement)) for shape in stages] == [1, 2, 4, 8]
    assert [len(parse_placement(shape.placement)[0]) for shape in ranks] == [1, 2, 4, 8]
    assert [shape.cut for shape in stages] == [None, "4", "2,4,6", "1,2,3,4,5,6,7"]
    assert all(shape.cut is None for shape in ranks)


def test_waits_are_neither_messages_nor_forwards() -> None:
    plan = make_plan(parse_placement("0:0-1.0:2"), batch=4, microbatches=2, mode=Mode.SYNC)
    done = [(0, "F"), (0, "SA"), (0, "R"), (0, "U"), (1, "F"), (1, "R"), (1, "U"), (2, "F"), (2, "F"), (2, "SG")]
    waited = [(0, "F"), (0, "SA"), (2, "SG"), (2, "SG"), (1, "R")]
    spans = [Span(rank, "compute", kind, kind, 0.0, 1.0) for rank, kind in done]
    spans += [Span(rank, "wait", kind, kind, 0.0, 1.0) for rank, kind in waited]
    assert counts(spans, plan) == (1.0, 1.0)
    assert counts([span for span in spans if span.rank == 2], plan) == (0.5, 0.0)


def test_the_last_of_a_group_is_compared_with_its_first() -> None:
    found = {shape: [Taken(400 * MIB, 100.0, 1.0, 0.0)] * 2 for doubled in DOUBLED for shape in doubled.shapes}
    last = DOUBLED[0].shapes[-1]
    assert make_outcome(found).ratios[0].is_met
    found[last] = [Taken(424 * MIB, 100.0, 1.0, 0.0)] * 2
    outcome = make_outcome(found)
    assert [ratio.is_met for ratio in outcome.ratios] == [False, None, None]
    assert outcome.ratios[0].ratio.value == pytest.approx(1.06)
    assert "32 microbatches use 1.06 times as much as 4 microbatches" in next(headlines(outcome))
    assert "messages a microbatch: 1; sums an update: 0; 100 images/s" in outcome.rows[0].note


def test_a_run_is_measured_by_its_own_files(tmp_path: Path) -> None:
    taken = take(train(Shape("", "", "0:0.0:1", "stale", 4), str(tmp_path)))
    assert (taken.sent, taken.sums) == (1.0, 0.0)
    assert taken.memory > 100 * MIB and taken.rate > 0
