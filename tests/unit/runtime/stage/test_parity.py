"""Every shape, mode and model equals the reference, with all ranks in this process; and its bits repeat."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from stagewright.config.modes import Mode
from stagewright.plan.plan import Stage
from stagewright.runtime.comm.memory import MemoryCollective
from stagewright.runtime.comm.transport import Pending
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.worker import Worker
from stagewright.schedule.lower import updates_in
from stagewright.schedule.policy import overlapped_backward
from tests.marks import daily, pairs
from tests.parity import (
    SETTINGS,
    Case,
    Drive,
    assert_equals_reference,
    assert_near,
    assert_same_bits,
    build,
    emulate,
    make_job,
    refer,
)


def initial_state(case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(case.seed)
    return build(case.model).double().state_dict()


# --- Shapes and modes -------------------------------------------------------------------------------------------------

SHAPES = {
    "0:0": None,
    "0:0-1": None,
    "0:0-3": None,
    "0:0-1.0:2": "third",
    "0:0-2.0:3": "third",
    "0:0-6.0:7": "head",
    "0:0.0:1-2": "second",
    "0:0-1.0:2-4": "third",
    "0:0-2.0:3-4.0:5-6.0:7": "second,third,head",
    "0:0-1.0:0-1": "third",  # two stages on the same ranks
    "0:0-1.0:1,0": "third",  # the same, but each microbatch changes its rank
    "0:0.0:0-1.0:1": "second,third",  # three stages on two ranks, partly shared
    "0:0-1.0:2.0:0-1": "second,head",  # ranks that run both the first and the last stage
}
MICROBATCHES = (4, 3, 6, 2, 3, 4, 12)  # per batch of 12: multiples of 2, 3, 4 and others, also fewer than the replicas


def modes(stages: int) -> Iterator[dict[str, object]]:
    yield {"mode": "sync"}
    yield {"mode": "pipedream"}
    if stages == 1:
        yield from ({"mode": "stale", "versions": versions} for versions in [(2,), (3,)])
    else:
        yield {"mode": "stale", "versions": tuple(range(1, 2 * stages, 2))}  # 1,3: the last stage lags most
        yield from ({"mode": "stale", "staleness": staleness} for staleness in sorted({1, stages - 1}))


def test_every_mode_is_trained() -> None:
    missing = set(map(str, Mode)) - {"dp", *(choice["mode"] for choice in modes(2))}
    assert not missing, f"{missing}: add a line to `modes`"


def shape_cases() -> Iterator[Case]:
    counts = itertools.cycle(MICROBATCHES)
    for placement, cut in SHAPES.items():
        for mode in modes(placement.count(".") + 1):
            yield Case("normed", placement, cut, microbatches=next(counts), eval_every=4, **mode)
            if "versions" not in mode:
                yield Case("plain", placement, cut, microbatches=next(counts), **mode)
        if cut is not None:
            yield Case("plain", placement, cut, microbatches=next(counts), mode="stale", staleness=0)


@pytest.mark.parametrize("case", daily(shape_cases(), 2), ids=str)
def test_every_shape_and_mode_equals_the_reference(case: Case, tmp_path: Path) -> None:
    assert_equals_reference(case, tmp_path)


def test_data_parallel_uses_all_devices_for_one_stage(tmp_path: Path) -> None:
    case = Case("normed", "0:0-1.0:2", mode="dp", microbatches=4, eval_every=4)
    run = assert_equals_reference(case, tmp_path)
    assert [stage.replicas for stage in run.job.plan.stages] == [3]


def test_microbatches_are_chosen_by_default(tmp_path: Path) -> None:
    case = Case("plain", "0:0-1.0:2", "third", mode="stale", staleness=1)
    job = make_job(replace(case, microbatches=None), tmp_path)  # type: ignore[arg-type]
    assert job.plan.microbatches == 4


# --- Models -----------------------------------------------------------------------------------------------------------

LAGGING = {"mode": "stale", "staleness": 1}


def model_cases() -> Iterator[Case]:
    one_each, two_to_one, shared = "0:0.0:1", "0:0-1.0:2", "0:0-1.0:0-1"
    three, partly = "0:0-1.0:2-3.0:4", "0:0.0:0-1.0:1"
    for model, cut, placements in [
        ("dropping", "third", (two_to_one, shared)),
        ("dropping", "second,head", (three, partly)),
        ("residual", "third", (two_to_one, shared)),
        ("residual", "second,third", (three, partly)),  # the skip passes through a whole stage
        ("branching", "right", (two_to_one, shared)),
        ("branching", "left,right", (three, partly)),
        ("branching", "head", (two_to_one,)),
        ("frozen_middle", "third", (two_to_one,)),
        (
            "frozen_middle",
            "second,third",
            (three, partly),
        ),  # a stage without trainable weights, through which gradients pass
        ("frozen_first", "second", (two_to_one, shared)),  # a stage without backward
        ("frozen_first", "second,third", (three,)),
        ("tied", "second", (two_to_one,)),
        ("tied", "head", (two_to_one, shared)),
        ("reused", "second", (two_to_one,)),
        ("reused", "head", (two_to_one, shared)),
        ("in_place", "relu", (one_each, two_to_one, shared)),
        ("in_place", "second", (two_to_one,)),
        ("alias", "head", (two_to_one,)),
        ("gated", "gate", (two_to_one, shared)),
        ("gated", "head", (two_to_one,)),
        ("sequential", "2", (two_to_one, shared)),
        ("listed", "2", (two_to_one,)),
        ("listed", "1,4", (three,)),
        ("tokens", "mix", (two_to_one, shared)),
        ("tokens", "mix,head", (three,)),
        ("unused", "third", (two_to_one,)),
        ("recurrent", "lstm", (two_to_one,)),
        ("recurrent", "head", (two_to_one, shared)),
        ("cumulative", "third", (two_to_one,)),
        ("dense", "head", (two_to_one, shared)),
    ]:
        for placement in placements:
            yield Case(model, placement, cut, microbatches=3, eval_every=5, **LAGGING)
    for model in ("gated", "untraceable", "alias", "tied", "unused", "recurrent", "tokens", "dropping", "cumulative"):
        yield Case(model, "0:0-1", microbatches=3, eval_every=5)
    for model in ("untraceable", "tied", "recurrent", "dropping"):
        yield Case(model, "0:0", mode="stale", versions=(2,), eval_every=5)
    yield Case("residual", two_to_one, "add", owners="head", microbatches=3, eval_every=5, **LAGGING)


@pytest.mark.parametrize("case", daily(model_cases(), 2), ids=lambda case: f"{case}/{case.cut}")
def test_every_model_equals_the_reference(case: Case, tmp_path: Path) -> None:
    assert_equals_reference(replace(case, optimizer={"weight_decay": 0.02}), tmp_path)


@pytest.mark.parametrize(
    ("model", "mode"), pairs(["dropping", "residual", "frozen_first", "tied", "recurrent"], ["sync", "pipedream"])
)
def test_models_equal_the_reference_in_other_modes(model: str, mode: str, tmp_path: Path) -> None:
    cut = {"frozen_first": "second", "tied": "second", "recurrent": "lstm"}.get(model, "third")
    assert_equals_reference(Case(model, "0:0-2.0:3-4", cut, mode=mode, eval_every=3), tmp_path)


@pytest.mark.parametrize("model", ["sometimes", "other_times"])
def test_parameters_that_only_some_microbatches_use_are_trained(model: str, tmp_path: Path) -> None:
    """Without momentum and decay, so that no gradient and a zero gradient are the same."""
    case = Case(model, "0:0-1", microbatches=3, optimizer={"momentum": 0.0})
    untrained = initial_state(case)
    run = assert_equals_reference(case, tmp_path)
    assert not torch.equal(run.weights["gate.conv.weight"], untrained["gate.conv.weight"])


# --- Optimizers, clipping, label smoothing, precision -----------------------------------------------------------------

OPTIMIZERS = [
    {"momentum": 0.0},
    {"name": "adamw", "lr": 0.01},
    *SETTINGS.values(),
    {"clip": 0.3},
    {"clip": 0.3, "name": "adamw", "lr": 0.01},
    {"clip": 0.3, **SETTINGS["lars"]},
    {"label_smoothing": 0.2},
]
CASES = {
    "sync": Case("normed", "0:0-2.0:3", "third"),
    "stale": Case("normed", "0:0-1.0:2-4", "third", mode="stale", staleness=1, microbatches=3),
    "pipedream": Case("normed", "0:0-1.0:2", "third", mode="pipedream", microbatches=3),
    "shared": Case("normed", "0:0.0:0-1.0:1", "second,third", microbatches=3),
    "one stage": Case("normed", "0:0-1", microbatches=3),
}


@pytest.mark.parametrize(("name", "options"), pairs(CASES, OPTIMIZERS), ids=str)
def test_every_optimizer_equals_the_reference(name: str, options: dict[str, object], tmp_path: Path) -> None:
    assert_equals_reference(replace(CASES[name], optimizer=options), tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_clipped_by_the_whole_norm_only_without_lag(name: str, tmp_path: Path) -> None:
    """The choice of the norm makes a difference that the comparison above can see."""
    case = replace(CASES[name], optimizer={"clip": 0.3})
    clipped, free = refer(case), refer(replace(case, optimizer={}))
    with pytest.raises(AssertionError, match="beyond"):
        assert_near(clipped.weights, free.weights, 1e-6)
    plan = make_job(case, tmp_path).plan
    assert plan.agree is (name in ("sync", "shared"))


FP32 = [
    Case("normed", "0:0-2.0:3", "third", mode="stale", staleness=1, dynamic=True),
    Case("plain", "0:0-2.0:3-4.0:5-6.0:7", "second,third,head", mode="stale", staleness=3, microbatches=6),
    Case("residual", "0:0-1.0:0-1", "third", microbatches=3, dynamic=True),
    Case("dropping", "0:0.0:1-2", "second", mode="pipedream"),
]


@pytest.mark.parametrize(
    ("case", "options"),
    pairs(
        FP32,
        [{}, {"name": "adamw", "lr": 0.005}, *(one for name, one in SETTINGS.items() if name not in ("sgd", "adamw"))],
    ),
    ids=str,
)
def test_fp32_runs_equal_the_reference(case: Case, options: dict[str, object], tmp_path: Path) -> None:
    case = replace(case, precision="fp32", optimizer=options, eval_every=4)
    run = assert_equals_reference(case, tmp_path)
    assert {tensor.dtype for tensor in run.weights.values()} <= {torch.float32, torch.int64}


# --- Bits -------------------------------------------------------------------------------------------------------------

BITS = [
    Case("dropping", "0:0-6.0:7", "third", mode="stale", staleness=1, microbatches=12),
    Case("normed", "0:0-2.0:3-4.0:5-6.0:7", "second,third,head", mode="stale", versions=(4, 1, 3, 2), microbatches=6),
    Case("normed", "0:0-1.0:0-1", "third", mode="stale", staleness=1, microbatches=3),
    Case("normed", "0:0.0:0-1.0:1", "second,third", microbatches=3, optimizer={"clip": 0.3}),
    Case("dropping", "0:0-1.0:2-4", "third", mode="pipedream"),
    Case("residual", "0:0-2.0:3", "third", optimizer={"clip": 0.3, "name": "adamw"}),
    Case("normed", "0:0-3", microbatches=3),
]


def in_random_order(seed: int) -> Drive:
    """Advances one rank at a time, chosen at random among those that need not wait."""
    choose = random.Random(seed)

    def drive(emulation: Emulation, work: Callable[[Worker], Iterator[Pending]]) -> Iterator[None]:
        runs = [work(worker) for worker in emulation.workers]
        waiting = {run: next(run, None) for run in runs}
        while ready := [run for run, pending in waiting.items() if pending is not None and pending.is_completed()]:
            run = choose.choice(ready)
            pending = waiting[run]
            assert pending is not None
            pending.wait()
            waiting[run] = next(run, None)
        assert not any(waiting.values()), "ranks wait for each other"
        yield from ()

    def run(emulation: Emulation) -> None:
        with mock.patch.object(Emulation, "drive", drive):
            emulation.run()

    return run


@pytest.mark.parametrize("case", daily(BITS, 2), ids=str)
def test_bits_do_not_depend_on_timing_scheduling_or_evaluation(case: Case, tmp_path: Path) -> None:
    run = emulate(case, tmp_path)
    assert_same_bits(run, emulate(case, tmp_path))
    assert_same_bits(run, emulate(replace(case, eval_every=3), tmp_path))
    dynamic = replace(case, dynamic=True)
    assert_same_bits(run, emulate(dynamic, tmp_path))
    assert_same_bits(run, emulate(replace(dynamic, eval_every=3), tmp_path))
    for seed, order in enumerate((case, dynamic, dynamic)):
        assert_same_bits(run, emulate(order, tmp_path, in_random_order(seed)))


@pytest.mark.parametrize("case", BITS, ids=str)
def test_dynamic_scheduling_equals_the_reference(case: Case, tmp_path: Path) -> None:
    assert_equals_reference(replace(case, dynamic=True, eval_every=3), tmp_path)


@pytest.mark.parametrize(("case", "dynamic"), pairs(BITS, [False, True]))
def test_gpipe_equals_the_reference(case: Case, dynamic: bool, tmp_path: Path) -> None:
    assert_equals_reference(replace(case, policy="gpipe", dynamic=dynamic), tmp_path)


@pytest.mark.parametrize("bucket", [0, 25])
def test_buckets_change_no_bit(bucket: int, tmp_path: Path) -> None:
    case = Case("normed", "0:0-2.0:3-4", "third", mode="stale", staleness=1)
    assert_same_bits(emulate(case, tmp_path), emulate(replace(case, bucket=bucket), tmp_path))


@pytest.mark.parametrize("case", BITS, ids=str)
def test_sums_start_during_the_backwards_that_the_policy_names_and_no_others(case: Case, tmp_path: Path) -> None:
    """This changes no bit, so that comparing weights does not show it."""
    running: tuple[Stage, int] | None = None
    found = set()

    def backward(replica: Replica, microbatch: int, version: int, overlap: bool, scale: float | None = None) -> None:
        nonlocal running
        running = replica.stage, microbatch
        right_backward(replica, microbatch, version, overlap, scale)
        running = None

    def start_sum(collective: MemoryCollective, tensor: torch.Tensor) -> Pending:
        if running is not None:
            found.add((running[0].index, running[1]))
        return right_sum(collective, tensor)

    right_backward, right_sum = Replica.backward, MemoryCollective.sum
    job = make_job(case, tmp_path)
    with mock.patch.object(Replica, "backward", backward), mock.patch.object(MemoryCollective, "sum", start_sum):
        Emulation(job, lambda event: None).run()
    assert found == {
        (stage.index, overlapped_backward(job.plan, stage, rank, update))
        for stage in job.plan.stages
        for rank in stage.ranks
        for update in updates_in(stage, range(job.plan.boundary(job.batches)))
        if overlapped_backward(job.plan, stage, rank, update) is not None
    }


def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    case = Case("dropping", "0:0-1.0:2", "third")
    with pytest.raises(AssertionError):
        assert_same_bits(emulate(case, tmp_path), emulate(replace(case, seed=6), tmp_path))


@pytest.mark.parametrize("model", ["normed", "dropping", "gated"])
def test_before_its_first_step_a_run_has_the_seeded_weights(model: str, tmp_path: Path) -> None:
    case = Case(model, "0:0-1.0:2", "head", eval_every=4)
    emulation = Emulation(make_job(case, tmp_path), lambda event: None)
    assert_near(emulation.weights(), initial_state(case), 0.0)
