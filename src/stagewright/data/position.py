"""Where a run is in its data: enough to go on from there, and to see that the data is still the same."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stagewright.data.order import Order


class DataChanged(ValueError):
    """The data set is not the one that a run began with."""


@dataclass(frozen=True, slots=True)
class Position:
    """The next batch of a run: its number within an epoch, and the data set it counts in."""

    seed: int
    epoch: int
    batch: int  # of the epoch
    fingerprint: str

    @staticmethod
    def at(order: Order, batch: int, fingerprint: str) -> Position:
        """The position before batch `batch` of the whole run."""
        epoch, within = divmod(batch, order.batches)
        return Position(order.seed, epoch, within, fingerprint)

    def counted_by(self, batch: int, order: Order) -> Position:
        """The same place in batches of another size; `batch` is the size it is counted in so far."""
        samples = self.batch * batch
        if samples % order.batch:
            raise DataChanged(
                f"the checkpoint is {samples} samples into its epoch, which --batch {order.batch} does not divide; "
                f"use --batch {batch}"
            )
        return replace(self, batch=samples // order.batch)

    def resume(self, order: Order, fingerprint: str) -> int:
        """The batch of the whole run to go on with; an error if the samples would be others."""
        if fingerprint != self.fingerprint:
            raise DataChanged(
                f"the data set changed: its fingerprint is {fingerprint}, but the checkpoint was made with "
                f"{self.fingerprint}; put the old data back, or start a new run"
            )
        if order.seed != self.seed:
            raise DataChanged(
                f"--seed is {order.seed} but the checkpoint was made with {self.seed}; use --seed {self.seed}"
            )
        if self.batch >= order.batches:
            raise DataChanged(
                f"the checkpoint is at batch {self.batch} of its epoch, but an epoch has {order.batches} batches of "
                f"{order.batch}; use the --batch of the checkpoint"
            )
        return self.epoch * order.batches + self.batch
