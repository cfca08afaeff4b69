"""Everything a rank is told: the configuration, the plan, and what crosses each cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stagewright.config import Config
from stagewright.model.probe import Probe
from stagewright.plan.plan import Plan


class RunFailed(RuntimeError):
    """A rank failed; the message names it and what it was doing."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How the evaluation data is cut into pieces: whole ones, and a short one at the end."""

    samples: int
    whole: Probe
    short: Probe | None


@dataclass(frozen=True, slots=True)
class Job:
    """One run, as every rank reads it."""

    config: Config
    plan: Plan
    batches: int  # to train
    pauses: tuple[int, ...]  # batch numbers after which the pipeline drains for an evaluation
    label_shape: tuple[int, ...]  # of one sample
    training: Probe
    evaluation: Evaluation | None
    folder: str
    fingerprint: str = ""  # of the training data

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for another: longer than the watchdog, which knows whom to blame."""
        return 2 * max(self.config.run.timeout, self.config.run.start_timeout)

    def save(self, path: Path) -> None:
        from pydantic import TypeAdapter

        path.write_bytes(TypeAdapter(Job).dump_json(self, indent=1))

    @staticmethod
    def load(path: Path) -> Job:
        from pydantic import TypeAdapter

        return TypeAdapter(Job).validate_json(path.read_bytes())
