"""Records of metrics.jsonl: their fields are a file format that old and new runs share."""

from __future__ import annotations

import json

import pytest

from stagewright.events import (
    Evaluated,
    Record,
    Replaced,
    Restarted,
    Resumed,
    Saved,
    Score,
    Step,
    Unsaved,
    as_fields,
    as_record,
)

LINES: dict[str, Record] = {
    '{"kind": "step", "batch": 3, "epoch": 0, "loss": 2.5, "lr": 0.1, "seconds": 1.0, "images_per_second": 64.0}': Step(
        3, 0, 2.5, 0.1, 1.0, 64.0
    ),
    '{"kind": "evaluated", "batch": 4, "samples": 8, "loss": 2.0, "top1": 0.25, "top5": 0.5}': Evaluated(
        4, 8, 2.0, 0.25, 0.5
    ),
    '{"kind": "replaced", "index": 7, "reason": "7.jpg: truncated"}': Replaced(7, "7.jpg: truncated"),
    '{"kind": "saved", "batch": 4, "bytes": 100, "seconds": 0.5}': Saved(4, 100, 0.5),
    '{"kind": "unsaved", "batch": 4, "reason": "no space"}': Unsaved(4, "no space"),
    '{"kind": "restarted", "batch": 4, "cause": "rank 1 was killed"}': Restarted(4, "rank 1 was killed"),
    '{"kind": "resumed", "batch": 4, "checkpoint": "runs/a/checkpoints/4", "plan": "stale 7-1"}': Resumed(
        4, "runs/a/checkpoints/4", "stale 7-1"
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_a_record_is_one_json_object_with_its_kind_first(line: str) -> None:
    assert json.dumps(as_fields(LINES[line])) == line
    assert as_record(json.loads(line)) == LINES[line]


def test_only_fp16_steps_have_a_loss_scale() -> None:
    step = Step(0, 0, 1.0, 0.1, 1.0, 64.0, loss_scale=1024.0)
    assert as_fields(step)["loss_scale"] == 1024.0 and as_record(as_fields(step)) == step


@pytest.mark.parametrize("fields", [{}, {"kind": "stop"}, {"kind": "saved", "batch": 4}, {"kind": "saved", "x": 1}])
def test_other_objects_are_not_records(fields: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError)):
        as_record(fields)


def test_an_evaluation_is_the_mean_over_all_replicas() -> None:
    scores = [Score(6, 9.0, 3.0, 6.0), Score(2, 7.0, 1.0, 2.0)]
    assert Evaluated.of(5, scores) == Evaluated(5, 8, 2.0, 0.5, 1.0)
