"""Events and records: one codec; the fields of records are a file format that old and new runs share."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import pytest

from stagewright.events import (
    BatchLosses,
    Best,
    Called,
    DecodeError,
    Evaluated,
    Event,
    Failure,
    File,
    Finished,
    GpuUsage,
    Ready,
    Record,
    Replaced,
    ReplicaState,
    Restarted,
    Resumed,
    Saved,
    Score,
    Scored,
    ShareSaved,
    Shortage,
    SignedInt,
    Skipped,
    Step,
    Stopped,
    Unsaved,
    Usage,
    decode,
    encode,
    fits,
    read_records,
    read_usage,
)
from stagewright.metrics import LOSS, Criterion, Span

LINES: dict[str, Record] = {
    '{"kind": "step", "batch": 3, "epoch": 0, "loss": 2.5, "lr": 0.1, "seconds": 1.0, "images_per_second": 64.0}': Step(
        3, 0, 2.5, 0.1, 1.0, 64.0
    ),
    '{"kind": "evaluated", "batch": 4, "samples": 8, "loss": 2.0, "metrics": {"top1": 0.25, "mae": 0.5}}': Evaluated(
        4, 8, 2.0, {"top1": 0.25, "mae": 0.5}
    ),
    '{"kind": "replaced", "index": 7, "reason": "7.jpg: truncated"}': Replaced(7, "7.jpg: truncated"),
    '{"kind": "saved", "batch": 4, "bytes": 100, "seconds": 0.5, "waited": 0.25}': Saved(4, 100, 0.5, 0.25),
    '{"kind": "saved", "batch": 4, "bytes": 100, "seconds": 0.5, "waited": 0.0, "best": {"criterion": '
    '{"metric": "top1", "is_lower_better": false}, "batch": 4, "value": 0.5, "since": 0}}': Saved(
        4, 100, 0.5, best=Best(Criterion("top1", False), 4, 0.5)
    ),
    '{"kind": "unsaved", "batch": 4, "reason": "no space"}': Unsaved(4, "no space"),
    '{"kind": "restarted", "batch": 4, "cause": "rank 1 was killed"}': Restarted(4, "rank 1 was killed"),
    '{"kind": "resumed", "batch": 4, "checkpoint": "runs/a/checkpoints/4", "plan": "stale 7-1"}': Resumed(
        4, "runs/a/checkpoints/4", "stale 7-1"
    ),
}


EVENTS: tuple[Event, ...] = (
    Ready(0, 12.5, "boot"),
    BatchLosses(1, ((4, 0.5, 1.0), (5, 0.25, 8.0)), 12.5, 1024.0),
    Scored(1, 4, Score(8, {"loss": (math.inf, 8.0), "top1": (2.0, 7.5)})),
    Called(1, 4, "engine.evaluate of 8 samples", "train.py:12"),
    Skipped(1, 7),
    Replaced(7, "7.jpg: truncated"),
    Shortage(2, 10**10),
    Stopped(0, 4),
    Finished(1, (Span(1, "compute", "F", "0F3@2", 0.5, 0.75),)),
    ShareSaved(0, 4, 0.1, (ReplicaState(0, 1, 12, {"step": 4.0}, {"current": 2.0, "used": {"3": 4.0}}),)),
    ShareSaved(0, 4, 0.1, files=(File("stage-0.master.safetensors", 0, "master", 100, "ab"),)),
    ShareSaved(0, 4, 0.1, error="no space"),
    ShareSaved(0, 4, 0.1, best=Best(Criterion("top1", False))),
    Failure(2, "KeyError", "KeyError: 'x'", "0F3@2", 0, is_users=False, traceback="Traceback ..."),
    Restarted(4, "rank 1 was killed"),
)


def test_the_best_evaluation_is_the_first_of_the_best_and_counts_those_since() -> None:
    best = Best(Criterion("top1", is_lower_better=False))
    found = []
    for batch, value in enumerate([math.nan, 0.5, 0.5, None, 0.75, 0.7, math.inf]):
        best = best.after(Evaluated(batch, 8, 1.0, {} if value is None else {"top1": value}))
        found.append((best.batch, best.value, best.since))
    assert found == [
        (0, None, 1),
        (1, 0.5, 0),
        (1, 0.5, 1),
        (1, 0.5, 2),
        (4, 0.75, 0),
        (4, 0.75, 1),
        (4, 0.75, 2),
    ]
    assert best.stall() == "no better top-1 than 75.0% (step 4) in 2 evaluations"
    assert Best(Criterion("top1", False), since=1).stall() == "no top-1 in 1 evaluation"


def test_the_loss_is_better_where_it_is_less() -> None:
    best = Best(Criterion.parse(LOSS))
    for batch, loss in enumerate([3.0, 2.0, 2.5, 2.0]):
        best = best.after(Evaluated(batch, 8, loss, {"loss_of_my_own": 0.0}))
    assert best == Best(Criterion(LOSS, True), 1, 2.0, 2)


def read(line: str) -> list[Record]:
    return [record for _, record in read_records([line.encode()])]


@pytest.mark.parametrize("line", LINES)
def test_a_record_is_one_json_object_with_its_kind_first(line: str) -> None:
    assert encode(LINES[line]) == line
    assert read(line) == [LINES[line]]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_arrives_as_it_was_sent(event: Event) -> None:
    assert decode(encode(event)) == event
    assert decode(encode(event).encode()) == event


def test_every_kind_of_event_and_record_is_tested() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {type(record) for record in LINES.values()} == set(get_args(Record))


def test_only_fp16_steps_have_a_loss_scale() -> None:
    step = Step(0, 0, 1.0, 0.1, 1.0, 64.0, loss_scale=1024.0)
    assert json.loads(encode(step))["loss_scale"] == 1024.0 and read(encode(step)) == [step]


def test_the_loss_of_a_run_that_diverged_is_read() -> None:
    (step,) = read(encode(Step(0, 0, math.nan, 0.1, 1.0, 64.0)))
    assert isinstance(step, Step) and math.isnan(step.loss)
    evaluated = Evaluated(0, 8, math.inf, {"perplexity": math.inf})
    assert read(encode(evaluated)) == [evaluated]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"rank": 0}', "kind None is unknown"),
        ('{"kind": ["ready"], "rank": 0}', r"kind \['ready'\] is unknown"),
        ('{"kind": "step", "batch": 3}', "kind 'step' is unknown"),  # a record, which ranks do not send
        ('{"kind": "stopped", "batch": 1}', "Stopped lacks 'rank'"),
        ('{"kind": "ready", "time": 1.0, "clock": "", "rank": 0, "x": 1}', "Ready has no field 'x'"),
        ('{"kind": "ready", "time": 1.0, "clock": "", "rank": true}', "Ready.rank: True is not int"),
        ('{"kind": "ready", "time": 1.0, "clock": "", "rank": -1}', "Ready.rank: -1 is not int"),
        ('{"kind": "ready", "time": 1.0, "clock": "", "rank": 1.0}', "Ready.rank: 1.0 is not int"),
        ('{"kind": "stopped", "rank": 0, "batch": null}', "Stopped.batch: None is not int"),
        ('{"kind": "batchlosses", "rank": 0, "losses": [[1]], "time": 1}', r"BatchLosses.losses: \[1\] is not"),
        ('{"kind": "batchlosses", "rank": 0, "losses": [], "time": NaN}', "BatchLosses.time: nan is not float"),
        ('{"kind": "scored", "rank": 0, "batch": 1, "score": []}', "Scored.score: Score is"),
        ('{"kind": "scored", "rank": 0, "batch": 1, "score": {"top1": 1.0}}', "Scored.score: Score has no field"),
        (
            '{"kind": "scored", "rank": 0, "batch": 1, "score": {"totals": {"top1": [1, 1e400]}}}',
            "Scored.score: Score.totals: inf is not",
        ),
        ('{"kind": "ready", "ra', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (f'{{"kind": "ready", "time": 1.0, "clock": "", "rank": {"[" * 900}{"]" * 900}}}', "Ready.rank: .* is not int"),
        ("[]", "kind None is unknown"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_event_is_refused_by_kind_and_field(text: str, said: str) -> None:
    with pytest.raises(DecodeError, match=said):
        decode(text)


@pytest.mark.parametrize(
    "line",
    ["", "7", "{}", '{"kind": "stop"}', '{"kind": "saved", "batch": 4}', '{"kind": "saved", "x": 1}']
    + [encode(Ready(0, 12.5, "boot")), "[" * 100_000, '{"kind": "restarted", "batch": 4, "cau'],
    ids=lambda text: text[:40],
)
def test_lines_that_are_no_records_are_left_out(line: str) -> None:
    kept = encode(Restarted(4, "rank 1 was killed")).encode()
    assert list(read_records([kept, line.encode(), kept])) == [(kept, Restarted(4, "rank 1 was killed"))] * 2


def test_a_sample_without_newer_fields_is_read() -> None:
    gpu = '{"uuid":"a","index":0,"memory":null,"utilisation":0.5}'
    line = f'{{"seconds":1,"cores":0.5,"memory":7,"gpus":[{gpu}],"ranks":[]}}'.encode()
    assert list(read_usage([line, b"\xff", line[:-1]])) == [Usage(1, 0.5, 7, (GpuUsage("a", 0, None, 0.5),), ())]


@pytest.mark.parametrize(
    ("value", "hint", "is_fitting"),
    [
        (-9, SignedInt, True),
        (-9, int, False),
        (2**63, int, False),
        (["a"], tuple[str, ...], True),
        ([1], tuple[str, ...], False),
        (10**400, float, False),
        (None, float, False),
        (None, float | None, True),
        ({"a": 1}, Any, True),
    ],
)
def test_type_hints_are_the_format(value: object, hint: Any, is_fitting: bool) -> None:
    assert fits(value, hint) == is_fitting


def test_an_evaluation_is_the_mean_over_all_replicas() -> None:
    scores = [
        Score(6, {"loss": (9.0, 6.0), "top1": (3.0, 6.0), "mae": (1.0, 2.0)}),
        Score(2, {"loss": (7.0, 2.0), "top1": (1.0, 2.0), "mae": (5.0, 1.0), "none": (0.0, 0.0)}),
    ]
    assert Evaluated.of(5, scores) == Evaluated(5, 8, 2.0, {"top1": 0.5, "mae": 2.0})


def test_evaluations_of_older_runs_are_read() -> None:
    line = '{"kind": "evaluated", "batch": 4, "samples": 8, "loss": 2.0, "top1": 0.25, "top5": 0.5}'
    assert read(line) == [Evaluated(4, 8, 2.0, {"top1": 0.25, "top5": 0.5})]
    assert read(line.replace("0.25", '"x"')) == []
