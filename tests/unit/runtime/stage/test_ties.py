"""Parameters that several stages use: every plan equals the reference, and homes never differ by a bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stagewright.errors import RunFailed, UserError
from stagewright.run.export import export_checkpoint
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.stage import gradients
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.ties import TieOnRank
from tests.keeping import emulate_job, keeping, saved_at
from tests.marks import IS_NIGHTLY
from tests.parity import (
    SCALED,
    SETTINGS,
    Case,
    EmulatedRun,
    assert_equals_reference,
    assert_near,
    assert_parity,
    assert_same_bits,
    build,
    emulate,
    make_data,
    make_job,
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


def assert_ties_equal_reference(case: Case, folder: Path) -> EmulatedRun:
    run = assert_equals_reference(case, folder)
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
    "lars": replace(STALE, optimizer={**SETTINGS["lars"], "clip": 0.05}),
    "rmsprop": replace(SYNC, optimizer=SETTINGS["rmsprop"]),
    "predict": replace(TWO, optimizer={"predict": True}),
    "predict adamw": replace(STALE, optimizer={"predict": True, "name": "adamw", "lr": 0.01}),
    "pipedream": replace(SYNC, mode="pipedream"),
    "pipedream clip": replace(SYNC, mode="pipedream", placement="0:0-1.0:2.0:3.0:4-5", optimizer={"clip": 0.02}),
    "clip sync": replace(SYNC, optimizer={"clip": 0.05}),
    "clip stale": replace(STALE, optimizer={"clip": 0.02}),
    "clip two to one": replace(TWO, optimizer={"clip": 0.02, "name": "adamw", "lr": 0.01}, dynamic=True),
    "replicas": replace(STALE, placement="0:0-1.0:2.0:3-5.0:6-7", microbatches=3, bucket=25),
    "buckets": replace(TWO, placement="0:0.0:1-2", bucket=25),  # the tied weight is between others
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


DAILY = (
    *("stale", "predict", "pipedream clip", "clip sync", "clip stale", "clip two to one", "replicas", "one rank"),
    *("lars", "rmsprop", "buckets", "chained", "half", "reused on one rank"),
)


@pytest.mark.parametrize("name", CASES if IS_NIGHTLY else DAILY)
def test_a_tied_parameter_is_trained_as_in_the_reference(name: str, tmp_path: Path) -> None:
    assert_ties_equal_reference(CASES[name], tmp_path)


def test_bits_do_not_depend_on_scheduling_or_evaluation(tmp_path: Path) -> None:
    case = replace(STALE, placement="0:0-1.0:2.0:3.0:4-5", optimizer={"clip": 0.02})
    run = emulate(case, tmp_path)
    assert_same_bits(run, emulate(replace(case, dynamic=True, eval_every=3), tmp_path))


@pytest.mark.parametrize("case", [Case(placement="0:0.0:1"), Case(placement="0:0-1.0:2", dynamic=True)], ids=str)
def test_a_model_cut_between_blocks_trains_as_one_stage(case: Case, tmp_path: Path) -> None:
    """Where no microbatch of a batch uses a tied parameter it is left alone in all homes, momentum and decay too."""
    case = replace(case, model="unrecorded", cut="blocks.1", microbatches=1, optimizer={"weight_decay": 0.1})
    run, whole = emulate(case, tmp_path), emulate(replace(case, placement="0:0", cut=None), tmp_path)
    assert run.job.way == "blocks"
    tied = {parameter.names: parameter.homes for tie in run.job.plan.ties for parameter in tie.parameters}
    assert tied == {("gain",): (0, 1), ("embed.weight", "head.weight"): (0, 1)}
    ids, _ = make_data(case)
    assert {bool(ids[batch * case.batch, 0] < 4) for batch in range(3)} == {True, False}
    assert_near(run.weights, whole.weights, 1e-10)


# --- fp16 and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("options", [{"lr": 1e-5}, {"lr": 1e-3, "clip": 0.3}], ids=["sgd", "clip"])
def test_a_scaled_loss_skips_in_all_homes_together(options: dict[str, Any], tmp_path: Path) -> None:
    case = Case("tied_steep", "0:0-1.0:2", "third", optimizer=options, ties=(("second.weight", (0, 1)),), steps=10)
    case = replace(case, **SCALED)
    run, result = emulate(case, tmp_path), refer(case)
    assert_near(run.weights, result.weights | result.buffers, 1e-4)
    assert {any(skips) for skips in result.skipped} == {True, False}
    assert torch.equal(run.weights["second.weight"], run.weights["third.weight"])


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp16", "mode": "stale", "staleness": 1}, "fp16 needs mode sync .*share 'embed.weight'"),
        ({"mode": "stale", "versions": (4, 3, 2, 1)}, "versions 4,3,2,1: stages 0, 3 share .*give 4,3,2,4"),
        ({"mode": "pipedream", "placement": "0:0-1.0:2.0:3.0:4"}, "equally many replicas, not 2,1"),
    ],
)
def test_what_a_tie_can_not_have_is_one_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        make_job(replace(SYNC, **change), tmp_path)
    assert "\n" not in str(error.value)


# --- Equal homes ------------------------------------------------------------------------------------------------------


def test_the_first_home_gives_its_values_to_the_others(tmp_path: Path) -> None:
    case = replace(STALE, placement="0:0-1.0:2.0:3.0:4-5")
    emulation = Emulation(make_job(case, tmp_path), lambda event: None)
    for rank in (1, 4, 5):
        for replica in emulation.workers[rank].replicas.values():
            index = [number for number, own in enumerate(replica.ring.parameters) if "weight" in own.names[0]][-1]
            replica.ring.parameters[index].view(replica.ring.master).add_(rank)
            replica.restart_versions()
    emulation.run()
    assert_near(emulation.weights(), refer(case).weights, 1e-10)


def test_homes_that_differ_are_a_fault_at_the_next_checkpoint(tmp_path: Path) -> None:
    job = keeping(make_job(replace(STALE, steps=4), tmp_path), every=2, keep=0)
    right = Replica.update

    def wrong(replica: Replica, update: int, *rest: Any) -> None:
        right(replica, update, *rest)
        if replica.stage.is_last and update == 0:
            replica.ring.master[0] += 1e-12

    with mock.patch.object(Replica, "update", wrong), pytest.raises(RunFailed) as error:
        emulate_job(job)
    found = "tied parameter 'embed.weight' of stages 0, 3 has other values on rank 3 than on rank 0 at batch 2"
    assert found in str(error.value)


# --- Checkpoints and export -------------------------------------------------------------------------------------------

ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    case = replace(STALE, optimizer=ADAMW | {"clip": 0.05})
    whole = emulate(case, tmp_path)
    first = keeping(make_job(replace(case, steps=5), tmp_path), every=5, keep=0)
    emulate_job(first)
    assert_same_weights(whole, emulate_job(make_job(case, tmp_path, resume=str(saved_at(first, 5).folder))))


def assert_same_weights(first: EmulatedRun, second: EmulatedRun) -> None:
    assert set(first.weights) == set(second.weights)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


@pytest.mark.parametrize("optimizer", [{}, ADAMW], ids=["sgd", "adamw"])
def test_resumes_under_plans_with_other_homes(optimizer: dict[str, Any], tmp_path: Path) -> None:
    """Without lag every plan trains what one process does, so changes of plan change nothing."""
    plans = [
        replace(SYNC, optimizer=optimizer),
        Case("language", "0:0-1.0:2", "second", optimizer=optimizer, ties=TWO.ties),
        Case("language", "0:0-1", optimizer=optimizer),
        replace(SYNC, optimizer=optimizer),
    ]
    resume: dict[str, Any] = {}
    for number, case in enumerate(plans):
        job = keeping(make_job(replace(case, steps=2 * number + 2), tmp_path, **resume), every=1000, keep=0)
        run = emulate_job(job)
        resume = {"resume": str(saved_at(job, 2 * number + 2).folder)}
    assert_near(run.weights, refer(plans[0]).weights, 1e-10)


def test_a_change_of_lag_begins_with_one_version_in_all_homes(tmp_path: Path) -> None:
    job = keeping(make_job(replace(SYNC, steps=3), tmp_path), every=3, keep=0)
    emulate_job(job)
    later = make_job(STALE, tmp_path, resume=str(saved_at(job, 3).folder))
    assert [stage.origin for stage in later.plan.stages] == [3, 3, 3, 3]
    run = emulate_job(later)
    assert torch.equal(run.weights["embed.weight"], run.weights["head.weight"])


def test_an_exported_checkpoint_loads_into_the_plain_model(tmp_path: Path) -> None:
    job = keeping(make_job(replace(STALE, steps=4), tmp_path), every=4, keep=0)
    run = emulate_job(job)
    exported = load_file(export_checkpoint(saved_at(job, 4), tmp_path / "weights.safetensors"))
    assert set(exported) == set(build("language").state_dict())
    assert_near(exported, run.weights, 0.0)
    build("language").double().load_state_dict(exported)


# --- Injected faults --------------------------------------------------------------------------------------------------


def test_homes_that_are_not_summed_are_found(tmp_path: Path) -> None:
    job = keeping(make_job(replace(STALE, steps=2), tmp_path), every=2, keep=0)
    nothing = mock.patch.object(TieOnRank, "sum", lambda tie, update: None)
    with nothing, pytest.raises(RunFailed, match="tied parameter"):
        emulate_job(job)


def test_a_stage_leaves_tied_parameters_to_the_tie(tmp_path: Path) -> None:
    """With them in a bucket as well, gradients of replicas would count twice."""
    case = replace(TWO, steps=3)
    buckets = gradients.make_buckets
    wrong = mock.patch.object(gradients, "make_buckets", lambda *given: buckets(*given[:3]))
    with wrong, pytest.raises((AssertionError, RunFailed)):
        assert_parity(case, emulate(case, tmp_path), refer(case))
