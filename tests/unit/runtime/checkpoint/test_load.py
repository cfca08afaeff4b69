"""A run that is stopped and resumed equals the run that was never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stagewright.events import BatchLosses, Evaluated, Event, ShareSaved, Step
from stagewright.runtime.checkpoint.folder import Checkpoint, list_folders
from stagewright.runtime.checkpoint.save import flats_of
from stagewright.runtime.job import Job
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.log import Journal, Ledger
from tests.keeping import KILLS, emulate_job, emulate_keeping, keeping, losses_from, resumed, same_bits, saved_at
from tests.marks import daily
from tests.parity import SCALED, SETTINGS, Case, EmulatedRun, emulate, make_job

ADAMW = {"name": "adamw", "lr": 0.01}
CASES = [
    Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, microbatches=3),
    Case("normed", "0:0-2.0:3-4.0:5-6.0:7", "second,third,head", mode="stale", staleness=3, optimizer=ADAMW),
    Case("dropping", "0:0-6.0:7", "third", mode="stale", versions=(3, 1), microbatches=12),
    Case("normed", "0:0.0:1.0:2", "second,third", mode="stale", staleness=2, optimizer={"predict": True}),
    Case("normed", "0:0-1.0:2", "third", optimizer={"clip": 0.3}),
    Case("normed", "0:0-1.0:2-4", "third", mode="pipedream", optimizer=ADAMW, steps=9),
    Case("residual", "0:0.0:0-1.0:1", "second,third", mode="pipedream"),
    Case("cumulative", "0:0-3", mode="dp", microbatches=3, optimizer={"momentum": 0.0}),
    Case("normed", "0:0-3", mode="dp", optimizer={"nesterov": True}, precision="fp32"),
    Case("normed", "0:0-1.0:0-1", "third", mode="stale", staleness=1, microbatches=3, eval_every=4, optimizer=ADAMW),
    *(
        Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, optimizer=SETTINGS[name])
        for name in SETTINGS
        if name not in ("sgd", "adamw")
    ),
]

# The long tests run every case static and dynamic, the others alternate.
BOTH_WAYS = [
    replace(case, dynamic=dynamic)
    for index, case in enumerate(CASES)
    for dynamic in ((False, True) if KILLS else (index % 2 == 1,))
]


def slots_of(run: EmulatedRun) -> dict[tuple[int, int, str], torch.Tensor]:
    """Every flat tensor of every replica."""
    return {
        (worker.rank, stage, kind): flat
        for worker in run.emulation.workers
        for stage, replica in worker.replicas.items()
        for kind, flat in flats_of(replica)
    }


def buffers_of(run: EmulatedRun) -> list[torch.Tensor]:
    return [buffer for buffers in run.replica_statistics().values() for buffer in buffers.values()]


@pytest.mark.parametrize("case", daily(BOTH_WAYS, 2), ids=str)
def test_resuming_from_any_checkpoint_gives_the_same_bits(case: Case, tmp_path: Path) -> None:
    whole = emulate(case, tmp_path)
    kept = emulate_keeping(case, tmp_path, every=2, keep=0)
    assert same_bits(kept.weights, whole.weights) and kept.microbatch_losses == whole.microbatch_losses
    batches = [int(folder.name) for folder in list_folders(Path(kept.job.folder))]
    step = kept.job.plan.pause_step
    assert batches and all(batch % step == 0 for batch in batches)
    for batch in [batch for batch in batches if batch < case.steps]:
        again = emulate_job(resumed(make_job(case, tmp_path), saved_at(kept.job, batch)))
        assert same_bits(again.weights, whole.weights)
        assert losses_from(again, 0) == losses_from(whole, batch * case.microbatches)
        assert all(map(torch.equal, slots_of(again).values(), slots_of(whole).values()))
        assert all(map(torch.equal, buffers_of(again), buffers_of(whole)))
        assert again.scores == {at: score for at, score in whole.scores.items() if at > batch}


def test_a_checkpoint_that_is_due_within_a_round_is_saved_where_that_ends(tmp_path: Path) -> None:
    case = Case("normed", "0:0-2.0:3", "third", mode="pipedream", microbatches=2, steps=9)
    kept = emulate_keeping(case, tmp_path, every=2, keep=0)
    assert kept.job.plan.pause_step == 3
    assert [int(folder.name) for folder in list_folders(Path(kept.job.folder))] == [3, 6, 9]


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {file.name: (checkpoint.folder / file.name).read_bytes() for file in checkpoint.manifest.files}


@pytest.mark.parametrize("case", BOTH_WAYS[::-1] if KILLS else daily(BOTH_WAYS[::2], 2), ids=str)
def test_unplanned_pauses_change_no_bit(case: Case, tmp_path: Path) -> None:
    case = replace(case, steps=12)
    whole = emulate(case, tmp_path)
    kept = emulate_keeping(case, tmp_path, minutes=1e-9, keep=0)  # as often as possible
    assert same_bits(kept.weights, whole.weights) and kept.microbatch_losses == whole.microbatch_losses
    assert len(list_folders(Path(kept.job.folder))) >= 2
    planned = emulate_keeping(case, tmp_path, every=kept.job.plan.pause_step, keep=0)
    for folder in list_folders(Path(kept.job.folder)):
        assert read_all(saved_at(kept.job, int(folder.name))) == read_all(saved_at(planned.job, int(folder.name)))


def test_a_run_that_is_asked_to_stop_pauses_and_ends(tmp_path: Path) -> None:
    case = replace(CASES[0], steps=20)
    job = keeping(make_job(case, tmp_path))
    stopping: list[Emulation] = []

    def on_event(event: Event) -> None:
        if isinstance(event, BatchLosses) and len(stopping) == 1:
            stopping[0].pauses.stop()

    emulation = Emulation(job, on_event)
    stopping.append(emulation)
    emulation.run()
    assert emulation.is_stopped and 0 < emulation.done < 6


def test_a_checkpoint_contains_every_tensor_once(tmp_path: Path) -> None:
    case = Case("normed", "0:0-2.0:3", "third", mode="stale", versions=(3, 1), optimizer=ADAMW, precision="fp32")
    kept = emulate_keeping(case, tmp_path, every=8)
    manifest = saved_at(kept.job, 8).manifest
    sizes = [sum(p.end - p.offset for p in replica(kept, s).ring.parameters) for s in range(2)]
    weights = 4 * (sizes[0] * (1 + 2 + 3) + sizes[1] * (1 + 2))
    buffers = sum(tensor.nbytes for tensor in buffers_of(kept))
    headers = manifest.bytes - weights - buffers
    assert 0 < headers < 1024 * len(manifest.files)
    writers = {file.kind: file for file in manifest.files if file.stage == 0}
    assert set(writers) == {"master", "optimizer/exp_avg", "optimizer/exp_avg_sq", "slot/0", "slot/1", "slot/2"} | {
        f"buffers/{index}" for index in range(3)
    }


@pytest.mark.parametrize(
    "case",
    [
        Case("steep", "0:0-1.0:2", "third", mode="stale", staleness=1),
        Case("steep", "0:0-1.0:2", "third"),
        Case("steep", "0:0-1", microbatches=6),
    ],
    ids=str,
)
def test_resumes_the_loss_scale(case: Case, tmp_path: Path, scaled: None) -> None:
    """The scale of a batch after the pause depends on skip decisions before it."""
    case = replace(case, steps=14, **SCALED)
    case = replace(case, optimizer={"lr": 1e-5})
    job = keeping(make_job(case, tmp_path), every=7)
    whole = run_all(job)
    again = run_all(replace(job, start=7, resume=str(saved_at(job, 7).folder)))
    expected = scales_of(whole, case)[7:]
    assert scales_of(again, case) == expected and len(set(expected)) > 1


def run_all(job: Job) -> list[Event]:
    """The events of a job that saves checkpoints."""
    events: list[Event] = []
    with Ledger(job, lambda record: None) as ledger:

        def on_event(event: Event) -> None:
            events.append(event)
            ledger.handle(event)

        Emulation(job, on_event).run()
    return events


def scales_of(events: Sequence[Event], case: Case) -> list[float | None]:
    """The scale of each batch, in order."""
    losses = [event for event in events if isinstance(event, BatchLosses)]
    scales = {number // case.microbatches: event.scale for event in losses for number, *_ in event.losses}
    return [scales[batch] for batch in sorted(scales)]


def replica(run: EmulatedRun, stage: int):  # type: ignore[no-untyped-def]
    return next(worker.replicas[stage] for worker in run.emulation.workers if stage in worker.replicas)


def test_replicas_share_the_files_to_write(tmp_path: Path) -> None:
    case = Case("plain", "0:0-2", mode="stale", versions=(2,))
    kept = emulate_keeping(case, tmp_path, every=8)
    wrote = {event.rank: len(event.files) for event in kept.events if isinstance(event, ShareSaved)}
    assert wrote == {0: 2, 1: 1, 2: 1}  # master, momentum and two versions over three replicas


def test_metrics_of_a_resumed_run_have_every_step_once(tmp_path: Path) -> None:
    case = Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, microbatches=3, eval_every=3)
    kept = emulate_keeping(case, tmp_path, every=3, keep=0)  # at 3, 6 and 8, and so are evaluations
    metrics = Path(kept.job.folder) / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"kind": "step", "bat')  # as a killed supervisor may leave it
    records = Journal(metrics, 6).records
    assert [record.batch for record in records if isinstance(record, Step)] == list(range(6))
    assert [record.batch for record in records if isinstance(record, Evaluated)] == [3, 6]
    emulate_job(resumed(kept.job, saved_at(kept.job, 3)))
    records = Journal(metrics, 10**9).records
    assert [record.batch for record in records if isinstance(record, Step)] == list(range(8))
    assert [record.batch for record in records if isinstance(record, Evaluated)] == [3, 6, 8]


def test_another_optimizer_starts_without_the_momentum_of_the_first(tmp_path: Path) -> None:
    case = Case(placement="0:0.0:1", cut="third", steps=4)
    job = keeping(make_job(case, tmp_path), every=2, keep=0)
    emulate_job(job)
    for name, begins in (("sgd", False), ("lars", True), ("rmsprop", True)):
        other = make_job(replace(case, optimizer=SETTINGS[name]), tmp_path, resume=str(saved_at(job, 2).folder))
        for worker in Emulation(other, lambda event: None).workers:
            for replica in worker.replicas.values():
                assert bool(replica.optimizer.state["momentum_buffer"].any()) is not begins
