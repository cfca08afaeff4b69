"""What a rank holds, by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

import numpy as np

from stagewright.plan.cost import GRADIENT_BYTES, Number


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, by what they are for; they add up over the stages it carries."""

    weights: float = 0.0  # master and versions
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0  # saved for backward, of every microbatch in flight
    buffers: float = 0.0  # messages, and gradients of activations
    workspace: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def largest(self) -> str:
        """The part that dominates."""
        return max(asdict(self).items(), key=lambda item: item[1])[0]

    @staticmethod
    def sum(parts: Iterable[Memory]) -> Memory:
        """Several stages on one rank: everything adds up but the workspace and the context, which they share."""
        parts = list(parts)
        totals = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Memory)}
        totals["workspace"] = max(part.workspace for part in parts)
        totals["context"] = max(part.context for part in parts)
        return Memory(**totals)


def weight_copies(versions: Number) -> Number:
    """The master, and a slot a version where there is more than one."""
    return 1 + versions * (versions > 1)


def gradient_copies(versions: Number, replicas: Number) -> Number:
    """Two buffers where backward of the next round need not wait for this round's reduce."""
    return 1 + ((versions > 1) & (replicas > 1))


def state_bytes(parameters: Number, versions: Number, replicas: Number, moments: float) -> Number:
    """Weights, gradients and optimizer state of a stage; `moments` are the optimizer's buffers."""
    copies = weight_copies(versions) + gradient_copies(versions, replicas) + moments
    return parameters * GRADIENT_BYTES * copies


def microbatches_held(depth: Number, versions: Number, rounds: Number, replicas: Number) -> Number:
    """Microbatches of which a replica keeps activations: its depth, but no more than its versions let in."""
    return np.minimum(depth, versions * -(-rounds // replicas))
