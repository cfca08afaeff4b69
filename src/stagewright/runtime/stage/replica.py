"""One rank's replica of one stage: its weights, and the microbatches it has in flight."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagewright.model.call import call
from stagewright.model.loss import Loss, LossError, Measured
from stagewright.model.pieces import Piece
from stagewright.model.standin import unchanged_state
from stagewright.plan.plan import Stage
from stagewright.runtime.comm.boundary import Activations, Exchange, FormatOptions, Gradients
from stagewright.runtime.comm.device import Device, Reading
from stagewright.runtime.precision import Precision
from stagewright.runtime.stage.batch_norm import Statistics
from stagewright.runtime.stage.compute import ComputeOptions, make_compute
from stagewright.runtime.stage.gradients import GradientBuffers
from stagewright.runtime.stage.optimizer import Optimizer
from stagewright.runtime.stage.versions import Average, VersionRing
from stagewright.torch_internals import backward


@dataclass(slots=True)
class InFlight:
    """What one microbatch keeps between its forward and its backward."""

    roots: list[Tensor]  # where backward begins
    leaves: list[Tensor]  # the inputs whose gradients the previous stage needs
    releases: list[Callable[[], None]]
    figures: Tensor | None = None  # that travel with its gradient


def seed_of(seed: int, microbatch: int, stage: int) -> int:
    """The seed of a stage's random numbers for one microbatch: the same on any rank, at any time."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{microbatch}/{stage}".encode()).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How a stage computes; the same for all its replicas."""

    seed: int
    precision: Precision
    loss: Loss | None  # of the last stage
    divisor: int | None  # targets of a microbatch by shape, where the loss is a total and its count
    format: FormatOptions
    compute: ComputeOptions
    draws: frozenset[str] = frozenset()  # generators, beside torch's, that the model's forward draws from


class Replica:
    """Runs one stage's forwards, backwards and updates."""

    def __init__(
        self,
        stage: Stage,
        piece: Piece,
        ring: VersionRing,
        gradients: GradientBuffers,
        optimizer: Optimizer,
        statistics: Statistics,
        exchange: Exchange,
        options: StageOptions,
        device: Device,
        average: Average | None = None,
    ) -> None:
        self.stage = stage
        self.piece = piece
        self.ring = ring
        self.gradients = gradients
        self.optimizer = optimizer
        self.statistics = statistics
        self.exchange = exchange
        self.options = options
        self.device = device
        self.average = average or Average()
        self.compute = make_compute(
            f"stage {stage.index}", piece.training, options.precision, device, options.compute, piece.names
        )
        self.in_flight: dict[int, InFlight] = {}
        self.losses: dict[int, Reading] = {}
        self.reported: dict[int, Reading] = {}  # the figures of updates, until somebody takes them
        share = torch.ones((), dtype=options.precision.weights) / stage.round
        self._channels_last = options.format.channels_last
        self._share = share.to(device.device)  # of a microbatch in the loss of its round

    def forward(self, microbatch: int, version: int) -> None:
        """Run forward with one version of the weights, and keep what backward needs."""
        inputs = self.exchange.inputs.pop(microbatch)
        update = self.stage.update_of(microbatch)
        assert self.ring.use(update).version == version, f"no slot has version {version} for microbatch {microbatch}"
        arguments, leaves = self._arguments(inputs)
        self._seed(seed_of(self.options.seed, microbatch, self.stage.index))
        output, release = self.compute.forward(self.ring.slot_of(update), arguments)
        self.statistics.count += 1
        figures: Tensor | None = None
        if self.stage.is_last:
            loss = self._measure(output, inputs.fields)
            roots, figures = [loss.total], self._figures(loss)
            if loss.count is None:
                self.losses[microbatch] = self.device.read(loss.total.detach())
            else:
                assert self.options.divisor is not None
                roots = [loss.total / self.options.divisor]
                self.losses[microbatch] = self.device.read(torch.stack([loss.total.detach().double(), loss.count]))
        else:
            after = self.exchange.after
            assert after is not None
            roots = [output[index] for index in after.differentiable]
            tensors = [output[index].detach() for index in after.tensors]
            self.exchange.outputs[microbatch] = Activations(tensors, inputs.fields)
        self.in_flight[microbatch] = InFlight(roots, leaves, [inputs.release, release], figures)

    def _figures(self, loss: Measured) -> Tensor | None:
        """The figures of a microbatch that travel with its gradient."""
        count = [] if loss.count is None else [loss.count.reshape(())]
        reported = [loss.total.detach().double()] if self.options.format.reported else []
        return torch.stack([*count, *reported]) if count or reported else None

    def _measure(self, output: Any, fields: Mapping[str, Tensor]) -> Measured:
        """The loss of one microbatch; it counts if and only if it did before training."""
        assert self.options.loss is not None
        found = self.options.loss(output, fields)
        if (found.count is None) != (self.options.divisor is None):
            raise LossError(f"{self.options.loss.option} returns a mean for some samples and a count for others")
        return found

    def backward(self, microbatch: int, version: int, overlap: bool, scale: float | None = None) -> None:
        """Add a microbatch's gradient to that of its update; with `overlap`, its all-reduce starts meanwhile.

        The last stage multiplies its loss by `scale`, where one is given.
        """
        kept = self.in_flight.pop(microbatch)
        is_last = self.stage.is_last
        incoming = (
            self._initial_gradient(scale, kept.figures) if is_last else self.exchange.output_gradients.pop(microbatch)
        )
        update = self.stage.update_of(microbatch)
        slot = self.ring.use(update)
        assert slot.version == version, f"version {version} was overwritten before microbatch {microbatch} was done"
        accumulating = self.gradients.accumulating(
            update,
            slot.leaves,
            overlap=overlap,
            loss_scale=incoming.scale,
            figures=incoming.figures,
            row=microbatch - update * self.stage.round,
        )
        with accumulating:
            pairs = [(root, g) for root, g in zip(kept.roots, incoming.tensors, strict=True) if root.requires_grad]
            if pairs:  # what this microbatch did not compute from a parameter has no gradient
                backward(*zip(*pairs, strict=True))
        if not self.stage.is_first:
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.leaves]
            if self.compute.overwrites:
                gradients = [gradient.clone() for gradient in gradients]
            figures = None if incoming.figures is None else incoming.figures.clone()  # its message will be overwritten
            scale_of_update = self.gradients.loss_scale(update)
            self.exchange.input_gradients[microbatch] = Gradients(gradients, scale_of_update, figures)
        incoming.release()
        for release in kept.releases:
            release()

    def update(
        self,
        update: int,
        norm: Tensor | None,
        found_inf: Tensor | None = None,
        tied_norms: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Make version update+1 from the whole gradient, clipped by `norm` or its own; a copy if `found_inf` is 1.

        `tied_norms` are of all homes of each tied parameter (`GradientBuffers.finish`).
        """
        unreached = self.gradients.unreached(update)
        self.optimizer.step(update, self.gradients.finish(update, norm, tied_norms), found_inf, unreached)
        self.average.add(found_inf)
        self.advance(update)

    def advance(self, update: int) -> None:
        """Make version update+1 from the present weights, which a skipped update has left as they were."""
        if self.options.format.reported:
            self.reported[update] = self.device.read(self.gradients.figures(update))
        self.gradients.release(update)
        self._refill(update + 1, update + self.stage.versions)

    def restart_versions(self) -> None:
        """Fill every slot from the present weights and momentum, with which this plan starts."""
        origin = self.stage.origin
        for update in range(origin, origin + self.stage.versions):
            self._refill(origin, update)

    def resume_versions(self, update: int) -> None:
        """Set the slots' version numbers as they are when an update begins; their weights are already restored."""
        for number in range(update, update + self.stage.versions):
            self.ring.slots[self.ring.slot_of(number)].version = self.stage.version_for(number)

    def _refill(self, version: int, update: int) -> None:
        """Fill the slot of a future update from the present weights, which are at `version`."""
        lag = update - version
        extrapolate = partial(self.optimizer.extrapolate, version=version, updates=lag)
        self.ring.refill(update, version, extrapolate if lag and self.optimizer.extrapolates else None)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use the newest weights, or their average, and modules in evaluation mode, while the context is open."""
        self.ring.use_master()
        with self.average.in_use(), unchanged_state((self.piece.training, self.piece.evaluation)):
            self.piece.train(False)
            try:
                yield
            finally:
                self.piece.train(True)

    def evaluate(self, microbatch: int, score: Callable[[Any, Mapping[str, Tensor]], None]) -> None:
        """Run forward with the newest weights, keeping nothing for backward."""
        inputs = self.exchange.inputs.pop(microbatch)
        with torch.no_grad(), self.options.precision.forward_context():
            output = call(self.piece.evaluation, self._values(inputs), self.piece.names)
        if self.stage.is_last:
            with torch.no_grad():
                score(output, inputs.fields)
        else:
            after = self.exchange.after
            assert after is not None
            self.exchange.outputs[microbatch] = Activations([output[index] for index in after.tensors], inputs.fields)
        inputs.release()

    def _seed(self, seed: int) -> None:
        """Seed torch's generator, and Python's and numpy's where the model draws from them."""
        self.device.seed(seed)
        if "random" in self.options.draws:
            random.seed(seed)
        if "numpy" in self.options.draws:
            np.random.seed(seed % 2**32)

    def state(self) -> Mapping[str, Tensor]:
        """The stage's newest weights and buffers, by their names in the whole model."""
        self.ring.use_master()
        return {name: tensor.detach() for name, tensor in self.piece.training.state_dict().items()}

    def _values(self, inputs: Activations) -> list[object]:
        """The stage's arguments: the received tensors, and the constants between them."""
        before = self.exchange.before
        if before is None:
            return [self._laid_out(tensor) for tensor in inputs.tensors]
        tensors = iter(inputs.tensors)
        return [value.constant if value.dtype is None else next(tensors) for value in before.values]

    def _laid_out(self, field: Tensor) -> Tensor:
        """An input in the memory layout of the run."""
        is_image = field.dim() == 4 and field.is_floating_point()
        return field.contiguous(memory_format=torch.channels_last) if self._channels_last and is_image else field

    def _arguments(self, inputs: Activations) -> tuple[list[object], list[Tensor]]:
        """The stage's arguments for training, and the leaves that get a gradient."""
        arguments = self._values(inputs)
        leaves: list[Tensor] = []
        if (before := self.exchange.before) is not None:
            for index in before.differentiable:
                leaf = arguments[index]
                assert isinstance(leaf, Tensor)
                leaf = leaf.detach().requires_grad_()
                leaves.append(leaf)
                arguments[index] = leaf.clone() if before.values[index].changed else leaf
            for index in set(before.tensors) - set(before.differentiable):
                tensor = arguments[index]
                if before.values[index].changed and isinstance(tensor, Tensor):
                    arguments[index] = tensor.clone()
        return arguments, leaves

    def _initial_gradient(self, scale: float | None, figures: Tensor | None) -> Gradients:
        """The gradient with which the last stage's backward begins: its share of the round, times the loss scale."""
        if scale is None:
            return Gradients([self._share], figures=figures)
        factor = torch.full((1,), scale, device=self.device.device)
        return Gradients([self._share * factor[0]], factor, figures)
