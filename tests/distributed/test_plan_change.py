"""A run resumes under another plan: its first step equals that of a single process from the same checkpoint.

The single process reads the checkpoint's files without our code, and steps by the rules of the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stagewright.events import BatchLosses, ShareSaved
from stagewright.run.export import export_checkpoint
from stagewright.runtime.checkpoint.folder import Checkpoint
from stagewright.runtime.job import Job
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.log import Ledger
from tests import models, reference
from tests.distributed.pool import Pool
from tests.keeping import emulate_job, keeping, same_bits, saved_at
from tests.parity import TOLERANCE, Case, Run, assert_near, build, make_job, plain_score

Execute = Callable[[Job], Run]


@dataclass(frozen=True)
class Step:
    loss: float
    weights: dict[str, torch.Tensor]


def single_step(case: Case, folder: Path) -> Step:
    """One batch in one process, from the files of a checkpoint."""
    about = json.loads((folder / "manifest.json").read_text())
    batch = about["batch"]

    def read(kind: str) -> dict[str, torch.Tensor]:
        return {k: v for path in sorted(folder.glob(f"stage-*.{kind}.safetensors")) for k, v in load_file(path).items()}

    options = {{"name": "optimizer"}.get(name, name): value for name, value in case.optimizer.items() if name != "lr"}
    setup = reference.Setup(
        (1,), (1,), case.batch, case.microbatches, 1, case.seed, torch.float64, lr=lambda _: case.lr(batch), **options
    )
    model = build(case.model).double().train()
    (stage,) = reference.make_stages(model, lambda name: 0, setup)
    stage.history = [read("master")]
    count = max((int(state["optimizer"].get("step", 0)) for state in about["stages"]), default=0)
    first, second = read("optimizer-momentum_buffer") or read("optimizer-exp_avg"), read("optimizer-exp_avg_sq")
    stage.moments = {
        name: reference.Moments(count, first[name], second.get(name, torch.zeros_like(weight)))
        for name, weight in stage.history[0].items()
    }
    images, labels = models.make_data(case.model, case.samples, seed=3)
    losses = []
    samples = reference.epochs_in_identity_order(case.samples, case.batch)(batch)
    for number, piece in enumerate(samples.chunk(case.microbatches)):
        fields = {"image": images.double()[piece], "label": labels[piece]}
        loss, _, gradients = reference.run_microbatch(model, [stage], number, fields)
        losses.append(loss)
        stage.add(number, gradients)
        reference.update_finished([stage], number, setup)
    return Step(sum(losses) / len(losses), stage.history[-1])


def on_pool(pool: Pool) -> Execute:
    def execute(job: Job) -> Run:
        with Ledger(job, lambda record: None) as ledger:
            run = pool.run(job)
            for event in run.events:
                if isinstance(event, ShareSaved):
                    ledger.handle(event)
        return run

    return execute


def train_to(
    execute: Execute, case: Case, folder: Path, steps: int, before: Checkpoint | None
) -> tuple[Run, Checkpoint]:
    """Train up to a batch, from a checkpoint or from the start, and save a checkpoint there."""
    case = replace(case, steps=steps)
    resume = {} if before is None else {"resume": str(before.folder)}
    job = keeping(make_job(case, folder, export="for the pool.safetensors", **resume), every=1000, keep=0)
    run = execute(job)
    return run, saved_at(job, steps)


def resume_each(execute: Execute, cases: list[Case], folder: Path) -> None:
    """Each plan resumes from the checkpoint of the one before."""
    _, checkpoint = train_to(execute, cases[0], folder, 3, None)
    for case in cases[1:]:
        start = checkpoint.batch
        expected = single_step(case, checkpoint.folder)
        run, after = train_to(execute, case, folder, start + 1, checkpoint)
        (loss,) = batch_losses(run)
        assert loss == pytest.approx(expected.loss, rel=1e-10)
        assert_near(after.read("master"), expected.weights, TOLERANCE["fp64"])
        further, checkpoint = train_to(execute, case, folder, start + 3, checkpoint)
        assert batch_losses(further)[0] == loss and len(batch_losses(further)) == 3


def batch_losses(run: Run) -> list[float]:
    losses = {number: loss for e in run.events if isinstance(e, BatchLosses) for number, loss, _ in e.losses}
    count = run.job.plan.microbatches
    ordered = [losses[number] for number in sorted(losses)]
    assert sorted(losses) == list(range(min(losses), max(losses) + 1))
    return [sum(ordered[first : first + count]) / count for first in range(0, len(ordered), count)]


SEVEN_ONE = Case("normed", "0:0-6.0:7", "head", mode="stale", staleness=1, microbatches=12)
EIGHT = Case("normed", "0:0-7", mode="dp", microbatches=12)
TWO_ONE = Case("normed", "0:0-1.0:2", "third", microbatches=4)
PIPEDREAM = Case("normed", "0:0-2.0:3", "second", mode="pipedream", microbatches=3)
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}


def test_resumes_seven_one_stale_as_eight_data_parallel_as_two_one_sync(pool: Pool, tmp_path: Path) -> None:
    resume_each(on_pool(pool), [SEVEN_ONE, EIGHT, TWO_ONE], tmp_path)


CHAINS = {
    "adamw": [replace(case, optimizer=ADAMW) for case in (SEVEN_ONE, EIGHT, TWO_ONE, SEVEN_ONE)],
    "pipedream": [PIPEDREAM, TWO_ONE, replace(PIPEDREAM, placement="0:0-2"), EIGHT],  # one stage: a round is a batch
    "microbatches": [TWO_ONE, replace(TWO_ONE, microbatches=3), replace(TWO_ONE, mode="stale", staleness=1)],
    "ranks": [replace(TWO_ONE, placement="0:0-2.0:3"), replace(TWO_ONE, placement="0:0"), TWO_ONE],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_resumes_under_other_plans(chain: str, tmp_path: Path) -> None:
    cases = [replace(case, cut=None) if "." not in case.placement else case for case in CHAINS[chain]]
    resume_each(emulate_job, cases, tmp_path)


def test_a_run_under_a_new_plan_resumes_bit_for_bit(tmp_path: Path) -> None:
    stale = Case("normed", "0:0.0:1.0:2", "second,third", mode="stale", versions=(4, 2, 1))
    _, checkpoint = train_to(emulate_job, SEVEN_ONE, tmp_path, 3, None)
    straight, _ = train_to(emulate_job, stale, tmp_path, 9, checkpoint)
    for batch in (4, 5, 7):  # before, while and after the lag has built up
        _, later = train_to(emulate_job, stale, tmp_path, batch, checkpoint)
        assert [stage.origin for stage in later.manifest.plan.stages] == [3, 3, 3]
        further, _ = train_to(emulate_job, stale, tmp_path, 9, later)
        assert same_bits(further.weights, straight.weights)


def test_statistics_keep_their_weight_under_a_new_plan(tmp_path: Path) -> None:
    run, checkpoint = train_to(emulate_job, SEVEN_ONE, tmp_path, 5, None)
    for case in (EIGHT, TWO_ONE, replace(TWO_ONE, placement="0:0-4.0:5")):
        emulation = Emulation(make_job(case, tmp_path, resume=str(checkpoint.folder)), lambda event: None)
        assert_near(emulation.weights(), run.weights, 1e-12)


def test_an_exported_checkpoint_scores_in_the_plain_model_as_in_the_run(tmp_path: Path) -> None:
    case = replace(SEVEN_ONE, eval_every=4)
    job = keeping(make_job(case, tmp_path), every=4, keep=0)
    run = emulate_job(job)
    for batch in (4, 8):
        exported = export_checkpoint(saved_at(job, batch), tmp_path / "weights.safetensors")
        samples, loss, *hits = plain_score(case, load_file(exported))
        assert run.scores[batch][0] == samples
        assert run.scores[batch][1] == pytest.approx(loss, rel=1e-12)
        assert run.scores[batch][2:] == pytest.approx(hits, rel=1e-12)
    assert_near(load_file(exported), run.weights, 1e-15)
