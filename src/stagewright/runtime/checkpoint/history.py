"""What a script's loop has seen before a start: a resumed script runs from its first line and sees it again.

So its schedulers, its averages and its best scores are what they were, although nothing is trained twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from stagewright.errors import UserError
from stagewright.events import Evaluated, Step, read_records
from stagewright.files import read_regular
from stagewright.runtime.job import Job

_MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class History:
    """The losses of all batches before a start, and the evaluations, in their order."""

    losses: tuple[float, ...] = ()
    evaluations: tuple[Evaluated, ...] = ()


def read_history(job: Job) -> History:
    """What the run that a job continues has recorded."""
    if job.resume is None:
        return History()
    path = Path(job.resume).parent.parent / "metrics.jsonl"
    try:
        records = [record for _, record in read_records(read_regular(path, _MOST_BYTES).splitlines())]
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; a script resumes with the losses that its run has recorded"
        ) from error
    losses = {record.batch: record.loss for record in records if isinstance(record, Step)}
    missing = next((batch for batch in range(job.start) if batch not in losses), None)
    if missing is not None:
        raise UserError(
            f"{path} has no loss of batch {missing}, and the script resumes at batch {job.start}; resume from an "
            "earlier checkpoint, or start a new run"
        )
    evaluations = (record for record in records if isinstance(record, Evaluated) and record.batch <= job.start)
    return History(tuple(losses[batch] for batch in range(job.start)), tuple(evaluations))


def history_of(job: Job) -> str:
    """The history of a job as ranks of other machines get it."""
    return TypeAdapter(History).dump_json(read_history(job)).decode()


def parse_history(text: str | bytes) -> History:
    return TypeAdapter(History).validate_json(text)
