"""One rank's replica of one stage: its weights, and the microbatches it has in flight."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from stagewright.model.cut import Piece
from stagewright.plan.plan import Stage
from stagewright.runtime.comm.boundary import Arrival, Exchange, Form, Returned
from stagewright.runtime.comm.device import Device, Reading
from stagewright.runtime.stage.batch_norm import Statistics
from stagewright.runtime.stage.compute import Computing, make_compute
from stagewright.runtime.stage.gradients import Reducer
from stagewright.runtime.stage.optimizer import Optimizer
from stagewright.runtime.stage.precision import Precision
from stagewright.runtime.stage.versions import VersionRing


@dataclass(slots=True)
class Flight:
    """One microbatch between its forward and its backward."""

    roots: list[Tensor]  # where backward begins
    leaves: list[Tensor]  # what the stage before wants gradients of
    releases: list[Callable[[], None]]


def seed_of(seed: int, microbatch: int, stage: int) -> int:
    """The seed of a stage's random numbers for one microbatch: the same on any rank, at any time."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{microbatch}/{stage}".encode()).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class Rules:
    """What a replica computes besides its module, the same on all ranks."""

    seed: int
    precision: Precision
    label_smoothing: float
    gradient_scale: float  # of this stage's gradient, which the last stage has divided by its own round
    form: Form
    computing: Computing


class Replica:
    """Runs one stage's forwards, backwards and updates."""

    def __init__(
        self,
        stage: Stage,
        piece: Piece,
        ring: VersionRing,
        reducer: Reducer,
        optimizer: Optimizer,
        exchange: Exchange,
        rules: Rules,
        device: Device,
    ) -> None:
        self.stage = stage
        self.piece = piece
        self.ring = ring
        self.reducer = reducer
        self.optimizer = optimizer
        self.exchange = exchange
        self.rules = rules
        self.device = device
        self.statistics = Statistics(piece.training)
        self.compute = make_compute(piece.training, rules.precision, device, rules.computing)
        self.flights: dict[int, Flight] = {}
        self.losses: dict[int, Reading] = {}
        share = torch.ones((), dtype=rules.precision.weights) / stage.round  # of a microbatch in its round's loss
        self._share = share.to(device.device)
        self._scales: dict[int, Tensor] = {}  # of the gradients of each update
        self._begun: set[int] = set()  # updates whose gradient buffer is in use

    def forward(self, microbatch: int, version: int) -> None:
        """Run forward with one version of the weights; keep what backward needs."""
        arrival = self.exchange.arrivals.pop(microbatch)
        update = self.stage.update_of(microbatch)
        assert self.ring.use(update).version == version, f"microbatch {microbatch} came without version {version}"
        arguments, leaves = self._arguments(arrival)
        self.device.seed(seed_of(self.rules.seed, microbatch, self.stage.index))
        made, release = self.compute.forward(self.ring.slot_of(update), arguments)
        self.statistics.count += 1
        if self.stage.is_last:
            loss = self._loss(made, arrival.labels, microbatch)
            roots = [loss]
        else:
            behind = self.exchange.behind
            assert behind is not None
            roots = [made[index] for index in behind.differentiable]
            tensors = [made[index].detach() for index in behind.travelling]
            self.exchange.outputs[microbatch] = Arrival(tensors, arrival.labels)
        self.flights[microbatch] = Flight(roots, leaves, [arrival.release, release])

    def backward(self, microbatch: int, version: int, overlap: bool, scale: float | None = None) -> None:
        """Add a microbatch's gradient to its update's; `overlap` lets the reduce begin before it is all there.

        The last stage multiplies the loss with `scale`, where one is given.
        """
        flight = self.flights.pop(microbatch)
        returned = self._seeded(scale) if self.stage.is_last else self.exchange.returned.pop(microbatch)
        update = self.stage.update_of(microbatch)
        if returned.scale is not None and update not in self._scales:
            self._scales[update] = returned.scale.clone()
        slot = self.ring.use(update)
        assert slot.version == version, f"microbatch {microbatch} is back after version {version} was lost"
        is_first = update not in self._begun
        self._begun.add(update)
        gradient = self.ring.gradient_of(update)
        with (
            self.ring.gathering(slot, update, is_first=is_first, at_once=overlap),
            self.reducer.watching(slot, update, gradient) if overlap else nullcontext(),
        ):
            if flight.roots:
                torch.autograd.backward(flight.roots, returned.tensors)
        returned.release()
        if not self.stage.is_first:
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in flight.leaves]
            if self.compute.overwrites:
                gradients = [gradient.clone() for gradient in gradients]
            self.exchange.gradients[microbatch] = Returned(gradients, self._scales.get(update))
        for release in flight.releases:
            release()

    def reduce(self, update: int) -> None:
        self._begin_gathering(update)  # a replica without a microbatch of this round joins with zeros
        self.reducer.start(update, self.ring.gradient_of(update))

    def unscale(self, update: int) -> Tensor:
        """Divide the whole gradient by its scale; 1 if it is not finite, otherwise 0."""
        gradient = self.ring.gradient_of(update)
        gradient.mul_(self._scales.pop(update).reciprocal())
        largest: Tensor = torch.linalg.vector_norm(gradient, torch.inf)
        return largest.isfinite().logical_not().float()

    def update(self, update: int, clip: Callable[[Tensor], Tensor] | None, found_inf: Tensor | None = None) -> None:
        """Make version update+1 from the whole gradient, times what `clip` makes of it; not if `found_inf` is 1."""
        gradient = self.ring.gradient_of(update)
        if self.rules.gradient_scale != 1.0:
            gradient.mul_(self.rules.gradient_scale)
        if clip is not None:
            gradient.mul_(clip(gradient))
        self.optimizer.step(update, gradient, found_inf)
        self._advance(update)

    def skip(self, update: int) -> None:
        """Make version update+1 the same as the one before."""
        self._advance(update)

    def _advance(self, update: int) -> None:
        self.reducer.forget(update)
        self._begun.discard(update)
        self._refill(update + 1, update + self.stage.versions)

    def start_over(self) -> None:
        """Have every slot follow from the weights and momentum of now, where the plan began with them."""
        origin = self.stage.origin
        for update in range(origin, origin + self.stage.versions):
            self._refill(origin, update)

    def go_on(self, update: int) -> None:
        """Have the slots hold what they hold when an update begins; their weights are there."""
        for number in range(update, update + self.stage.versions):
            self.ring.refill(number, self.stage.version_for(number), lambda weights: None)

    def _refill(self, version: int, update: int) -> None:
        """Have the slot of an update to come follow from the weights of now, which are that version."""
        self.ring.refill(update, version, lambda weights: self.optimizer.foresee(weights, version, update - version))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Have the newest weights in place, and modules in evaluation mode, while the context is open."""
        self.ring.use_master()
        self.piece.evaluation.eval()
        try:
            yield
        finally:
            self.piece.training.train()
            self.piece.evaluation.train()

    def evaluate(self, microbatch: int, score: Callable[[Tensor, Tensor], None]) -> None:
        """Forward on the master weights, without a trace for backward."""
        arrival = self.exchange.arrivals.pop(microbatch)
        with torch.no_grad(), self.rules.precision.forward_context():
            made = self.piece.evaluation(*self._values(arrival))
        if self.stage.is_last:
            score(made, arrival.labels)
        else:
            behind = self.exchange.behind
            assert behind is not None
            self.exchange.outputs[microbatch] = Arrival([made[index] for index in behind.travelling], arrival.labels)
        arrival.release()

    def state(self) -> Mapping[str, Tensor]:
        """The stage's newest weights and buffers by the names of the whole model."""
        self.ring.use_master()
        return {name: tensor.detach() for name, tensor in self.piece.training.state_dict().items()}

    def _values(self, arrival: Arrival) -> list[object]:
        """The stage's arguments: what travelled, with the constants between."""
        before = self.exchange.before
        if before is None:
            return [self._laid_out(tensor) for tensor in arrival.tensors]
        tensors = iter(arrival.tensors)
        return [value.constant if value.dtype is None else next(tensors) for value in before.values]

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if self.rules.form.channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _arguments(self, arrival: Arrival) -> tuple[list[object], list[Tensor]]:
        """The stage's arguments for training, and the leaves among them."""
        arguments = self._values(arrival)
        leaves: list[Tensor] = []
        if (before := self.exchange.before) is not None:
            for index in before.differentiable:
                leaf = arguments[index]
                assert isinstance(leaf, Tensor)
                leaf = leaf.detach().requires_grad_()
                leaves.append(leaf)
                arguments[index] = leaf.clone() if before.values[index].changed else leaf
            for index in set(before.travelling) - set(before.differentiable):
                tensor = arguments[index]
                if before.values[index].changed and isinstance(tensor, Tensor):
                    arguments[index] = tensor.clone()
        return arguments, leaves

    def _loss(self, logits: Tensor, labels: Tensor, microbatch: int) -> Tensor:
        loss = functional.cross_entropy(widened(logits), labels, label_smoothing=self.rules.label_smoothing)
        self.losses[microbatch] = self.device.read(loss.detach())
        return loss

    def _seeded(self, scale: float | None) -> Returned:
        """Where the last stage's backward begins."""
        if scale is None:
            return Returned([self._share])
        factor = torch.full((1,), scale, device=self.device.device)
        return Returned([self._share * factor[0]], factor)

    def _begin_gathering(self, update: int) -> None:
        if update not in self._begun:
            self._begun.add(update)
            self.ring.gradient_of(update).zero_()


def widened(logits: Tensor) -> Tensor:
    """Half-precision logits as fp32, where a loss is computed."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
