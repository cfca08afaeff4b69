"""Growth: usage is read from the files of runs, and the last of a series is compared with its first."""

from pathlib import Path

import pytest

from benchmarks.micro.growth import SERIES, Shape, Used, counts, make_outcome, train, usage_of
from benchmarks.outcome import summary
from stagewright.cluster.placement import parse_placement
from stagewright.metrics import MIB, Span
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode


def test_every_shape_doubles_the_one_before_and_its_stages_have_equal_numbers_of_layers() -> None:
    microbatches, stages, ranks = (series.shapes for series in SERIES)
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


def test_the_last_of_a_series_is_compared_with_its_first() -> None:
    found = {shape: [Used(400 * MIB, 100.0, 1.0, 0.0)] * 2 for series in SERIES for shape in series.shapes}
    last = SERIES[0].shapes[-1]
    assert make_outcome(found).ratios[0].is_met
    found[last] = [Used(424 * MIB, 100.0, 1.0, 0.0)] * 2
    outcome = make_outcome(found)
    assert [ratio.is_met for ratio in outcome.ratios] == [False, None, None]
    assert outcome.ratios[0].ratio.value == pytest.approx(1.06)
    assert "32 microbatches use 1.06 times as much memory as 4 microbatches" in next(summary(outcome))
    assert "messages per microbatch: 1; sums per update: 0; 100 images/s" in outcome.rows[0].note


def test_usage_is_read_from_the_files_of_a_run(tmp_path: Path) -> None:
    used = usage_of(train(Shape("", "", "0:0.0:1", "stale", 4), str(tmp_path)))
    assert (used.sent, used.sums) == (1.0, 0.0)
    assert used.memory > 100 * MIB and used.rate > 0
