"""Every contiguous run of a model's units, as arrays: what a stage could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.catalog.values import Software
from stagewright.plan.estimate import Sums

Array = Any  # a numpy array


@dataclass(frozen=True)
class Runs:
    """Every contiguous run of units, as arrays over pairs (first, last); runs that begin alike stand together.

    Runs begin and end at points, which are all units unless only some are looked at.
    """

    units: int  # pieces between points
    points: Array
    first: Array  # numbers of points
    last: Array
    compute: Array  # kinds of devices x pairs, seconds of a microbatch
    backward: Array
    parameters: Array
    saved: Array
    before: Array  # bytes of activations that enter
    behind: Array  # bytes of activations that leave
    entering: Array  # bytes that come in over both borders for a microbatch, forward and backward
    leaving: Array
    transient: Array  # bytes of message buffers, of gradients of activations, and of workspace

    @staticmethod
    def of(sums: Sequence[Sums], software: Software, points: Array | None = None) -> Runs:
        """From one table a kind of device."""
        points = np.arange(sums[0].count + 1) if points is None else points
        first, last = np.triu_indices(len(points), 1)
        begin, end = points[first], points[last]

        def between(prefix: Array) -> Array:
            return prefix[end] - prefix[begin]

        def largest(values: Array) -> Array:
            pieces = np.maximum.reduceat(values, points[:-1])
            return np.concatenate([np.maximum.accumulate(pieces[piece:]) for piece in range(len(pieces))])

        own = sums[0]
        borrowed = largest(own.workspaces)
        workspace = np.full_like(borrowed, float(software.workspace))
        if not software.keeps_workspace:
            workspace = np.minimum(borrowed, workspace)
        messages = 2 * (own.live[begin] + own.live[end])
        return Runs(
            len(points) - 1,
            points,
            first,
            last,
            np.array([between(kind.forward) + between(kind.backward) for kind in sums]),
            np.array([between(kind.backward) for kind in sums]),
            between(own.parameters),
            between(own.saved),
            own.live[begin],
            own.live[end],
            own.live[begin] + own.live_gradient[end],
            own.live[end] + own.live_gradient[begin],
            messages + 2 * largest(own.outputs) + workspace,
        )

    def beginning(self, unit: int) -> slice:
        """The runs that begin at a unit."""
        start = unit * self.units - unit * (unit - 1) // 2
        return slice(start, start + self.units - unit)


def narrow_points(sums: Sums) -> Array:
    """Where a chain is narrow: no more bytes are alive than at the points on either side. The ends are always there."""
    live = np.concatenate(([np.inf], sums.live[1:-1], [np.inf]))
    inner = [unit for unit in range(1, sums.count) if live[unit] <= live[unit - 1] and live[unit] < live[unit + 1]]
    return np.array([0, *inner, sums.count])
