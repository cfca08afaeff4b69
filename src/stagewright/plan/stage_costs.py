"""What runs of units cost on blocks of devices: seconds a batch, and bytes a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagewright.plan import cost
from stagewright.plan.estimate import Setting
from stagewright.plan.memory import microbatches_held, state_bytes
from stagewright.plan.plan import Mode
from stagewright.plan.search_space import Blocks, Kinds, Runs

Array = Any  # a numpy array


@dataclass(frozen=True)
class Rules:
    """How a mode turns a run of units on a block into seconds a batch."""

    mode: Mode
    microbatches: int
    staleness: int | None = None
    update_second_bytes: float = 0.0  # seconds the optimizer takes a byte of weights
    overhead: float = 0.0
    copies: float = 0.0  # seconds a byte of message that computes wait for
    handover: float = float("inf")  # bytes a second of the fastest message

    @property
    def is_even(self) -> bool:
        """Whether replicas take turns over batches, so that a share of a microbatch counts as one."""
        return self.mode in (Mode.STALE, Mode.PIPEDREAM)

    def seconds(self, runs: Runs, blocks: Kinds, pairs: Any = slice(None)) -> Array:
        """Seconds a batch of every run on every kind of block: kinds x pairs."""
        inner, of = blocks.borderless()
        busy, reduction = self._inside(runs, inner, pairs)
        link = self._crossing(runs, blocks, pairs)
        link *= self._own(blocks)
        link += reduction[of]
        return np.maximum(busy[of], link, out=link)

    def _own(self, blocks: Kinds) -> Array:
        """Microbatches of a batch that a replica runs."""
        size = blocks.size[:, None]
        return self.microbatches / size if self.is_even else np.ceil(self.microbatches / size)

    def _inside(self, runs: Runs, blocks: Kinds, pairs: Any) -> tuple[Array, Array]:
        """Seconds a batch that a block computes and waits for its sums, and those of the sums by themselves."""
        size = blocks.size[:, None]
        rounds = self.microbatches / size if self.mode is Mode.PIPEDREAM else 1.0
        entering, leaving = runs.entering[pairs], runs.leaving[pairs]
        compute = runs.compute[blocks.device][:, pairs] + 2 * self.overhead + (entering + leaving) * self.copies
        weights = runs.parameters[pairs] * cost.GRADIENT_BYTES
        reduction = cost.allreduce_seconds(weights, size, blocks.bandwidth[:, None], blocks.latency[:, None])
        backward = np.where(blocks.staged[:, None], 0.0, runs.backward[blocks.device][:, pairs])
        exposed = cost.exposed_seconds(reduction, backward, cost.tail_share(weights))
        lags = self.is_even & (runs.last[pairs] < runs.units) & (self.staleness != 0)
        waits = np.where(lags & ~blocks.staged[:, None], 0.0, exposed)
        update = weights * self.update_second_bytes
        return self._own(blocks) * compute + rounds * (waits + update), rounds * reduction

    def _crossing(self, runs: Runs, blocks: Kinds, pairs: Any) -> Array:
        """Seconds a microbatch over the slower border; before the first stage and behind the last there is none."""
        volume = np.maximum(runs.entering[pairs], runs.leaving[pairs])
        seconds = volume / np.minimum(np.minimum(blocks.front, blocks.back), self.handover)[:, None]
        for is_end, other in ((runs.first[pairs] == 0, blocks.back), (runs.last[pairs] == runs.units, blocks.front)):
            seconds[:, is_end] = volume[is_end] / np.minimum(other, self.handover)[:, None]
        return seconds


@dataclass(frozen=True)
class Limits:
    """What fits: bytes of a device, and what a stage of some versions and depth takes of them."""

    memory: float
    moments: float
    staleness: int | None
    microbatches: int
    mode: Mode

    def versions(self, stages: int, behind: Array, size: Array) -> Array:
        """Versions of a stage with so many stages from it to the end, and devices behind it."""
        if self.mode is Mode.PIPEDREAM:
            return -(-(behind + size) // size)
        if self.mode is not Mode.STALE:
            return np.ones_like(behind + size)
        return np.full_like(behind + size, min(stages, (stages if self.staleness is None else self.staleness) + 1))

    def most_behind(self, runs: Runs, blocks: Blocks, stages: int) -> Array:
        """The most devices behind a stage with which it still fits: blocks x pairs, below 0 where it never does."""
        size = np.broadcast_to(blocks.size[:, None], (len(blocks.size), len(runs.first)))
        rounds = np.zeros_like(size)  # multiples of its own size that may stand behind it
        step = 1 << len(blocks.devices).bit_length()
        while step:
            fits = self.needs(runs, slice(None), stages, (rounds + step - 1) * size, size) <= self.memory
            rounds = np.where(fits, rounds + step, rounds)
            step //= 2
        return (rounds - 1) * size

    def needs(self, runs: Runs, pairs: Any, stages: int, behind: Array, size: Array) -> Array:
        """Bytes of a rank of each run on each block."""
        versions = self.versions(stages, behind, size)
        rounds = size if self.mode is Mode.PIPEDREAM else self.microbatches
        depth = microbatches_held(-(-(behind + size) // size) + stages - 1, versions, rounds, size)
        if stages == 1:
            depth = np.ones_like(depth)
        state = state_bytes(runs.parameters[pairs], versions, size, self.moments)
        return state + runs.saved[pairs] * depth + runs.transient[pairs]


def make_rules(setting: Setting, mode: Mode, microbatches: int, kind: str, staleness: int | None = None) -> Rules:
    software = setting.software
    host = software.handover.bandwidth if software.handover else float("inf")
    return Rules(
        mode,
        microbatches,
        staleness,
        setting.update_seconds(1.0, kind) / cost.GRADIENT_BYTES,
        setting.overhead,
        1 / host if software.blocking else 0.0,
        float("inf") if software.blocking else host,
    )


def make_limits(setting: Setting, mode: Mode, microbatches: int, kinds: Sequence[str], staleness: int | None) -> Limits:
    software = setting.software
    smallest = min(setting.devices(kind).memory for kind in kinds)
    return Limits(
        smallest - software.context,
        setting.moments + software.temporaries,
        staleness,
        microbatches,
        mode,
    )


def pipedream_seconds(runs: Runs, blocks: Kinds, bandwidth: float) -> Array:
    """PipeDream's own formula on a flat network, for comparison with its plans: seconds a minibatch."""
    size = blocks.size[:, None]
    weights = runs.parameters * cost.GRADIENT_BYTES
    busy = (runs.compute[0] + 4 * (size - 1) * weights / (bandwidth * size)) / size
    entering = 2 * runs.before / (bandwidth * size)
    leaving = np.where(runs.first > 0, 2 * runs.behind / (bandwidth * size), 0.0)
    return np.maximum(busy, np.maximum(entering, leaving))
