"""Runs that save checkpoints, for tests: how to make, read and resume them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from stagewright.config.sections import CheckpointConfig
from stagewright.events import BatchLosses, Event, Record, decode, encode
from stagewright.runtime.checkpoint.folder import Checkpoint, checkpoints_folder, open_checkpoint
from stagewright.runtime.job import Job
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.process.log import Ledger
from tests.parity import Case, EmulatedRun, make_job

KILLS = int(os.environ.get("STAGEWRIGHT_KILLS", "0"))  # per plan in the long tests; 0 for the short ones


def keeping(job: Job, **options: Any) -> Job:
    """The job with a [checkpoint] table."""
    return replace(job, config=replace(job.config, checkpoint=CheckpointConfig(**options)))


def resumed(job: Job, checkpoint: Checkpoint) -> Job:
    return replace(job, start=checkpoint.batch, resume=str(checkpoint.folder))


def saved_at(job: Job, batch: int) -> Checkpoint:
    return open_checkpoint(checkpoints_folder(Path(job.folder)) / str(batch))


def write_manifest(path: Path, fields: Any) -> None:
    """Write a manifest with the hash that it should have."""
    if isinstance(fields, dict):
        fields.pop("blake2b", None)
        text = json.dumps(fields, sort_keys=True).encode()
        fields["blake2b"] = hashlib.blake2b(text, digest_size=32).hexdigest()
    path.write_text(json.dumps(fields))


def emulate_job(job: Job, records: list[Record] | None = None) -> EmulatedRun:
    """Run a job with every rank in this process, and save its checkpoints."""
    events: list[Event] = []
    with Ledger(job, (records if records is not None else []).append) as ledger:

        def on_event(event: Event) -> None:
            events.append(decode(encode(event)))
            ledger.handle(event)

        emulation = Emulation(job, on_event, ledger.settled)
        emulation.run()
    return EmulatedRun(job, events, emulation.weights(), emulation)


def emulate_keeping(case: Case, folder: Path, **options: Any) -> EmulatedRun:
    return emulate_job(keeping(make_job(case, folder), **options))


def losses_from(run: EmulatedRun, first: int) -> dict[int, float]:
    """The loss of every microbatch from a number on, each reported once."""
    reported = [(number, loss) for e in run.events if isinstance(e, BatchLosses) for number, loss, _ in e.losses]
    assert len(reported) == len(dict(reported))
    return {number: loss for number, loss in reported if number >= first}


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return set(first) == set(second) and all(first[name].equal(second[name]) for name in first)
