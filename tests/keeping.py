"""Runs that keep checkpoints, for tests: where they are, what they hold, and going on from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from stagewright.config.sections import CheckpointConfig
from stagewright.events import Record
from stagewright.runtime.checkpoint.folder import Checkpoint, checkpoints_folder, open_checkpoint
from stagewright.runtime.job import Job
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.log import Ledger
from tests.parity import Case, EmulatedRun, make_job

KILLS = int(os.environ.get("STAGEWRIGHT_KILLS", "0"))  # of each plan in the long tests; 0: the short ones


def keeping(job: Job, **options: Any) -> Job:
    """The job with a [checkpoint] table."""
    return replace(job, config=replace(job.config, checkpoint=CheckpointConfig(**options)))


def going_on(job: Job, checkpoint: Checkpoint) -> Job:
    return replace(job, start=checkpoint.batch, resume=str(checkpoint.folder))


def saved_at(job: Job, batch: int) -> Checkpoint:
    return open_checkpoint(checkpoints_folder(Path(job.folder)) / str(batch))


def emulate_job(job: Job, records: list[Record] | None = None) -> EmulatedRun:
    """Run a job with every rank in this process, and keep its checkpoints."""
    events: list[Mapping[str, Any]] = []
    with Ledger(job, job.order.batches, (records if records is not None else []).append) as ledger:

        def hear(event: dict[str, Any]) -> None:
            events.append(json.loads(json.dumps(event)))
            ledger.handle(event)

        emulation = Emulation(job, hear)
        emulation.run()
    return EmulatedRun(job, events, emulation.weights(), emulation)


def emulate_keeping(case: Case, folder: Path, **options: Any) -> EmulatedRun:
    return emulate_job(keeping(make_job(case, folder), **options))


def losses_from(run: EmulatedRun, first: int) -> dict[int, float]:
    """Every microbatch's loss from one on, each told once."""
    told = [pair for event in run.events if event["kind"] == "losses" for pair in event["losses"]]
    assert len(told) == len(dict(told))
    return {number: loss for number, loss in told if number >= first}


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return set(first) == set(second) and all(first[name].equal(second[name]) for name in first)
