"""Parameters that several stages use: every plan equals the reference, and homes never differ by a bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity import (
    Case,
    EmulatedRun,
    assert_parity,
    assert_scores,
    emulate,
    refer,
)

FOUR = {"placement": "0:0.0:1.0:2.0:3", "cut": "first,second,head"}
ENDS = (("embed.weight", (0, 3)),)
SYNC = Case("language", **FOUR, ties=ENDS)
STALE = replace(SYNC, mode="stale", staleness=3)
TWO = Case("language", "0:0-1.0:2", "second", mode="stale", staleness=1, ties=(("embed.weight", (0, 1)),))


def values_of(run: EmulatedRun, names: set[str]) -> list[Tensor]:
    """A parameter's master, in every replica of every home."""
    return [
        parameter.view(replica.ring.master)
        for worker in run.emulation.workers
        for replica in worker.replicas.values()
        for parameter in replica.ring.parameters
        if names & set(parameter.names)
    ]


def assert_equals_reference(case: Case, folder: Path) -> EmulatedRun:
    run, result = emulate(case, folder), refer(case)
    assert_parity(case, run, result)
    if case.eval_every is not None:
        assert_scores(case, run, result)
    for name, _ in case.ties:
        names = {name, "head.weight"} if name == "embed.weight" else {name}
        first, *others = values_of(run, names)
        assert all(torch.equal(first, other) for other in others)
    return run


CASES = {
    "sync": replace(SYNC, eval_every=4),
    "stale": replace(STALE, eval_every=4),
    "stale n1": replace(SYNC, mode="stale", staleness=1),
    "two to one": TWO,
    "dynamic": replace(STALE, dynamic=True, eval_every=3),
    "gpipe": replace(SYNC, policy="gpipe"),
    "adamw": replace(STALE, optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0.1}),
    "predict": replace(TWO, optimizer={"predict": True}),
    "predict adamw": replace(STALE, optimizer={"predict": True, "name": "adamw", "lr": 0.01}),
    "pipedream": replace(SYNC, mode="pipedream"),
    "pipedream clip": replace(SYNC, mode="pipedream", placement="0:0-1.0:2.0:3.0:4-5", optimizer={"clip": 0.02}),
    "clip sync": replace(SYNC, optimizer={"clip": 0.05}),
    "clip stale": replace(STALE, optimizer={"clip": 0.02}),
    "clip two to one": replace(TWO, optimizer={"clip": 0.02, "name": "adamw", "lr": 0.01}, dynamic=True),
    "replicas": replace(STALE, placement="0:0-1.0:2.0:3-5.0:6-7", microbatches=3, bucket=25),
    "too few": replace(TWO, placement="0:0-2.0:3-4", microbatches=2),
    "one rank": replace(STALE, placement="0:0.0:1.0:2.0:0", optimizer={"clip": 0.02}),
    "one rank sync": replace(SYNC, placement="0:0-1.0:2.0:2.0:0-1", optimizer={"clip": 0.05}),
    "crossed ranks": replace(STALE, placement="0:0-1.0:2.0:3.0:1,0"),
    "twice": replace(STALE, model="tied_twice", ties=(*ENDS, ("first.weight", (1, 2)))),
    "chained": replace(STALE, model="chained", optimizer={"clip": 0.02}, ties=(*ENDS, ("gain.weight", (0, 1, 2)))),
    "half": replace(STALE, model="half_tied"),
    "fp32": replace(STALE, precision="fp32"),
    "tied": Case("tied", "0:0-1.0:2", "third", mode="stale", staleness=1, ties=(("second.weight", (0, 1)),)),
    "reused": Case(
        "reused",
        "0:0-1.0:2",
        "second_1",
        owners="head",
        mode="stale",
        staleness=1,
        ties=(("second.weight", (0, 1)), ("second.bias", (0, 1))),
        eval_every=4,
    ),
    "reused on one rank": Case(
        "reused",
        "0:0.0:0",
        "second_1",
        owners="head",
        mode="stale",
        staleness=1,
        ties=(("second.weight", (0, 1)), ("second.bias", (0, 1))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tied_parameter_is_trained_as_in_the_reference(name: str, tmp_path: Path) -> None:
    assert_equals_reference(CASES[name], tmp_path)
