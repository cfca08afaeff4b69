"""Costs of every segment of units on every block of devices: seconds per batch, and bytes per rank.

The formulas are those of `cost` and `memory`, over arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stagewright.cluster.specs import Software
from stagewright.plan import cost
from stagewright.plan.estimate import Setting
from stagewright.plan.memory import microbatches_held, state_bytes
from stagewright.plan.plan import Mode
from stagewright.plan.search_space import BlockKinds, Blocks, Segments

Array = Any  # a numpy array


@dataclass(frozen=True)
class TimeModel:
    """Seconds per batch of a stage, as a function of its segment, its block and the mode."""

    mode: Mode
    microbatches: int
    staleness: int | None = None
    update_second_bytes: float = 0.0  # seconds of the optimizer per byte of weights
    overhead: float = 0.0  # seconds per compute beside its units
    copies: float = 0.0  # seconds per byte of message that computes wait for
    handover: float = float("inf")  # bytes per second of the fastest message
    software: Software = field(default_factory=lambda: Software("", "", 1.0))
    precision: str = "fp32"

    @property
    def is_even(self) -> bool:
        """Whether replicas take turns across batches, so that a fraction of a microbatch per batch makes sense."""
        return self.mode.preset.has_lag

    def seconds(self, segments: Segments, blocks: BlockKinds) -> Array:
        """Seconds per batch of every segment on every kind of block: kinds x pairs."""
        inner, of = blocks.borderless()
        busy, reduction = self._inside(segments, inner)
        link = self._crossing(segments, blocks)
        link *= self._own(blocks)
        link += reduction[of]
        return np.maximum(busy[of], link, out=link)

    def _own(self, blocks: BlockKinds) -> Array:
        """Microbatches per batch that one replica runs."""
        size = blocks.size[:, None]
        return self.microbatches / size if self.is_even else np.ceil(self.microbatches / size)

    def _inside(self, segments: Segments, blocks: BlockKinds) -> tuple[Array, Array]:
        """Seconds per batch that a block computes and waits for its all-reduce, and those of the all-reduce alone."""
        size = blocks.size[:, None]
        rounds = 1.0 if self.mode.preset.is_per_batch else self.microbatches / size
        copied = (segments.entering + segments.leaving) * self.copies
        factor = cost.scaling_factor(size, blocks.machines[:, None], self.software, self.precision)
        is_whole = (segments.first == 0) & (segments.last == segments.units)
        factor = factor / np.where(is_whole, self.software.parallel_efficiency, 1.0)
        compute = segments.compute[blocks.device] * factor + 2 * self.overhead + copied
        weights = segments.parameters * cost.GRADIENT_BYTES
        reduction = cost.allreduce_seconds(weights, size, blocks.bandwidth[:, None], blocks.latency[:, None])
        backward = np.where(blocks.staged[:, None], 0.0, segments.backward[blocks.device] * factor)
        exposed = cost.exposed_seconds(reduction, backward, cost.tail_share(weights))
        lags = self.is_even & (segments.last < segments.units) & (self.staleness != 0)
        waits = np.where(lags & ~blocks.staged[:, None], 0.0, exposed)
        update = weights * self.update_second_bytes + self.software.overhead
        return self._own(blocks) * compute + rounds * (waits + update), rounds * reduction

    def _crossing(self, segments: Segments, blocks: BlockKinds) -> Array:
        """Seconds per microbatch over the slower border; the first and the last stage have one border only."""
        volume = np.maximum(segments.entering, segments.leaving)
        seconds = volume / np.minimum(np.minimum(blocks.front, blocks.back), self.handover)[:, None]
        for is_end, other in ((segments.first == 0, blocks.back), (segments.last == segments.units, blocks.front)):
            seconds[:, is_end] = volume[is_end] / np.minimum(other, self.handover)[:, None]
        return seconds


@dataclass(frozen=True)
class MemoryLimits:
    """Which segments fit the devices of a block, by how much a stage needs with its versions and depth."""

    context: float  # bytes of a device that no stage gets
    moments: float
    staleness: int | None
    microbatches: int
    mode: Mode

    def versions(self, stages: int, behind: Array, size: Array) -> Array:
        """Versions of a stage that is the first of the last `stages` stages and has `behind` devices behind it."""
        return self.mode.preset.versions(stages, behind + 0 * size, size, self.staleness)

    def most_behind(self, segments: Segments, blocks: Blocks, stages: int) -> Array:
        """The most devices behind a stage with which it still fits: blocks x pairs, negative where it never fits."""
        size = np.broadcast_to(blocks.size[:, None], (len(blocks.size), len(segments.first)))
        memory = blocks.kinds.memory[blocks.signature][:, None] - self.context
        rounds = np.zeros_like(size)  # how many times its own size may be behind it, plus one
        step = 1 << len(blocks.devices).bit_length()
        while step:
            fits = self.needs(segments, slice(None), stages, (rounds + step - 1) * size, size) <= memory
            rounds = np.where(fits, rounds + step, rounds)
            step //= 2
        return (rounds - 1) * size

    def needs(self, segments: Segments, pairs: Any, stages: int, behind: Array, size: Array) -> Array:
        """Bytes per rank of each segment on each block."""
        versions = self.versions(stages, behind, size)
        rounds = self.microbatches if self.mode.preset.is_per_batch else size
        depth = microbatches_held(-(-(behind + size) // size) + stages - 1, versions, rounds, size)
        if stages == 1:
            depth = np.ones_like(depth)
        state = state_bytes(segments.parameters[pairs], versions, size, self.moments)
        return state + segments.saved[pairs] * depth + segments.other[pairs]


def make_time_model(
    setting: Setting, mode: Mode, microbatches: int, kind: str, staleness: int | None = None
) -> TimeModel:
    """The time model of a setting's software, with the optimizer of one kind of device."""
    software = setting.software
    host = software.handover.bandwidth if software.handover else float("inf")
    return TimeModel(
        mode,
        microbatches,
        staleness,
        setting.update_seconds(1.0, kind) / cost.GRADIENT_BYTES,
        setting.overhead,
        1 / host if software.blocking else 0.0,
        float("inf") if software.blocking else host,
        software,
        setting.precision,
    )


def make_memory_limits(setting: Setting, mode: Mode, microbatches: int, staleness: int | None) -> MemoryLimits:
    software = setting.software
    return MemoryLimits(software.context, setting.moments + software.temporaries, staleness, microbatches, mode)
