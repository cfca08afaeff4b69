"""The memory of a rank, by part, and the formulas of its parts; numbers or arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

import numpy as np

from stagewright.plan.cost import GRADIENT_BYTES, Number
from stagewright.plan.plan import gradient_buffers


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, by purpose."""

    weights: float = 0.0  # master and versions
    gradients: float = 0.0
    optimizer: float = 0.0  # its state, and the average of the weights
    activations: float = 0.0  # saved for backward, of every microbatch in flight
    buffers: float = 0.0  # messages, and gradients of activations
    workspace: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        return max(asdict(self).items(), key=lambda item: item[1])[0]

    @staticmethod
    def sum(parts: Iterable[Memory]) -> Memory:
        """The memory of several stages on one rank: a sum, except for the workspace and context that they share."""
        parts = list(parts)
        totals = {field.name: sum(getattr(part, field.name) for part in parts) for field in fields(Memory)}
        totals["workspace"] = max(part.workspace for part in parts)
        totals["context"] = max(part.context for part in parts)
        return Memory(**totals)


def weight_copies(versions: Number) -> Number:
    """The master weights, and one slot per version if there is more than one."""
    return 1 + versions * (versions > 1)


def state_bytes(parameters: Number, versions: Number, replicas: Number, moments: float) -> Number:
    """Weights, gradients and optimizer state of a stage; `moments` are the optimizer's buffers, and the average."""
    copies = weight_copies(versions) + gradient_buffers(versions, replicas) + moments
    return parameters * GRADIENT_BYTES * copies


def microbatches_held(depth: Number, versions: Number, rounds: Number, replicas: Number) -> Number:
    """Microbatches of which a replica keeps activations: its depth, but no more than its versions allow."""
    return np.minimum(depth, versions * -(-rounds // replicas))
