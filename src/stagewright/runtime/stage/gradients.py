"""The gradients of a replica's updates: accumulated by backward, summed over replicas, scaled and clipped.

`GradientBuffers` owns them from the first backward of a round to its update. `Norms` exchanges the norms of all stages,
where a plan clips by the norm of the whole model: all K = 1. With lag, each stage clips by its own norm, but for tied
parameters (`ties`), whose gradients are summed over the ranks of all homes instead of with a bucket of the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from stagewright.runtime.comm.transport import AllOf, Collective, Pending
from stagewright.runtime.stage.versions import Parameter
from stagewright.torch_internals import copy_each

KEPT_NORMS = 4  # updates; no stage has as many open


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """What a stage does with its gradients, beside summing them."""

    bucket_bytes: int
    factor: float = 1.0  # by which to multiply them, since the last stage has divided by its own round
    clip: float | None = None  # the largest norm
    divisor: float | None = None  # of a loss that is a total: what the last stage has divided by, instead of its count
    round: int = 1  # microbatches
    figures: int = 0  # of each microbatch, that travel with its gradient: the count, with a divisor; then the loss
    is_conditional: bool = False  # a backward may reach some parameters in one batch and others in the next


@dataclass(slots=True)
class _Gradient:
    """The gradient of one update."""

    flat: Tensor
    views: Sequence[Tensor]  # one per parameter
    sums: list[Pending] = field(default_factory=list)  # the all-reduces that have started, in the order of buckets
    loss_scale: Tensor | None = None
    figures: Tensor | None = None  # of each microbatch of the round, as far as they are here; else zeros
    is_divided: bool = False  # by the counts
    missing: set[int] = field(default_factory=set)  # parameters that no backward of this replica has reached
    flags: Tensor | None = None  # of each parameter, on how many replicas a backward reached it
    ties: list[Pending] = field(default_factory=list)  # the sums of tied parameters, which are in no bucket
    tied_flags: dict[int, Tensor] = field(default_factory=dict)  # the same as `flags`, over all ranks of all homes


class GradientBuffers:
    """The gradients of one replica's updates, each in a flat buffer until its update is done.

    Update p has buffer p mod N and goes through these steps, in this order:

        accumulating   around each backward of the round; the first overwrites the buffer, the others add to it
        reduce         start to sum over the replicas; a replica without a microbatch in the round joins with zeros
        pending        is complete once the buffer holds the sum, the same on every replica
        divide         by the count of the targets, where the loss is a total; the steps below do it first
        unscale        divide by the loss scale, in fp16
        finish         multiply by the stage's factor and clip; the result is what the optimizer takes
        release        free the buffer for update p+N

    An update has its buffer alone: update p+N begins after the release of update p, as the schedule says. Every bucket
    is summed once, in the order in which backward fills them, whether it starts during backward or in `reduce`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        master: Tensor,
        buffers: int,
        collective: Collective,
        options: GradientOptions,
        tied: Mapping[int, bool] | None = None,
    ) -> None:
        """`tied`: the parameters that have other homes, and of each whether this is the first one."""
        flats = [torch.zeros_like(master) for _ in range(buffers)]
        self._buffers = [(flat, [parameter.view(flat) for parameter in parameters]) for flat in flats]
        self._collective = collective
        self._options = options
        self._tied = dict(tied or {})
        self._parameters = parameters
        self._buckets = make_buckets(parameters, master.itemsize, options.bucket_bytes, self._tied)
        self._ranges = [(parameters[bucket[-1]].offset, parameters[bucket[0]].end) for bucket in self._buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._names = [parameter.names[0] for parameter in parameters]
        self._device = master.device
        self._size = len(master)
        self._open: dict[int, _Gradient] = {}

    @property
    def factor(self) -> float:
        """By what `finish` multiplies a gradient, before it clips."""
        return 1.0 if self._options.divisor is not None else self._options.factor  # a count is of the stage's round

    @contextmanager
    def accumulating(
        self,
        update: int,
        leaves: Sequence[Tensor],
        *,
        overlap: bool,
        loss_scale: Tensor | None = None,
        figures: Tensor | None = None,
        row: int = 0,
    ) -> Iterator[None]:
        """While the context is open, a backward through these leaves adds to the gradient of an update.

        `figures` are of the microbatch, which is in place `row` of the round.

        The first backward of an update creates new gradients, which is cheaper than adding to zeros. They move into the
        buffer together, or with `overlap` one by one: each bucket's all-reduce starts as soon as it is full, and so are
        all before it.
        """
        is_first = update not in self._open
        gradient = self._begin(update) if is_first else self._open[update]
        if is_first:
            gradient.loss_scale = None if loss_scale is None else loss_scale.clone()  # its message will be overwritten
            for leaf in leaves:
                leaf.grad = None
        if figures is not None:
            self._figures_of(gradient)[row] = figures
        awaited = [len(bucket) for bucket in self._buckets]

        def arrived(leaf: Tensor, index: int) -> None:
            if leaf.grad is not gradient.views[index]:
                assert leaf.grad is not None
                gradient.views[index].copy_(_dense(leaf.grad))
                leaf.grad = gradient.views[index]
                gradient.missing.discard(index)
            if index in self._tied:
                return
            awaited[self._bucket_of[index]] -= 1
            while len(gradient.sums) < len(awaited) and awaited[len(gradient.sums)] == 0:
                self._sum_next(gradient)

        hooks = [
            leaf.register_post_accumulate_grad_hook(partial(arrived, index=index))  # type: ignore[no-untyped-call]
            for index, leaf in enumerate(leaves if overlap else ())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if gradient.missing:
            self._move_into(gradient, leaves)

    def loss_scale(self, update: int) -> Tensor | None:
        """The loss scale that is in an update's gradient."""
        return self._open[update].loss_scale

    def reduce(self, update: int) -> None:
        """Start the all-reduce of every bucket that has not started yet."""
        gradient = self._joined(update)
        while len(gradient.sums) < len(self._buckets):
            self._sum_next(gradient)
        if self._options.is_conditional and gradient.flags is None:
            gradient.flags = torch.ones(len(self._names), device=self._device)
            if gradient.missing:
                gradient.flags[list(gradient.missing)] = 0.0
            gradient.sums.append(self._collective.sum(gradient.flags))
        if self._options.figures:
            gradient.sums.append(self._collective.sum(self._figures_of(gradient)))

    def figures(self, update: int) -> Tensor:
        """The figures of every microbatch of an update; the same bits on every rank, once the sums are complete."""
        return self._figures_of(self._open[update])

    def _figures_of(self, gradient: _Gradient) -> Tensor:
        """A row for each microbatch, not their sum: adding zeros is exact, so that all stages get the same numbers."""
        if gradient.figures is None:
            shape = (self._options.round, self._options.figures)
            gradient.figures = torch.zeros(shape, dtype=torch.float64, device=self._device)
        return gradient.figures

    def _joined(self, update: int) -> _Gradient:
        """The gradient of an update; zeros on a replica that had no microbatch of its round."""
        if update not in self._open:
            self._begin(update).flat.zero_()
        return self._open[update]

    def tied_part(self, update: int, index: int) -> tuple[Tensor, bool]:
        """A tied parameter's part of the gradient of an update, and whether a backward of this replica reached it."""
        gradient, parameter = self._joined(update), self._parameters[index]
        return gradient.flat[parameter.offset : parameter.end], index not in gradient.missing

    def add_tie(self, update: int, pending: Pending, flags: Mapping[int, Tensor]) -> None:
        """Count the sum of tied parameters, which has started, to what completes the gradient of an update.

        `flags` are those of tied parameters, by index.
        """
        gradient = self._joined(update)
        gradient.ties.append(pending)
        gradient.tied_flags |= flags

    def unreached(self, update: int) -> list[int]:
        """The parameters that no replica's backward reached in an update, which leaves them alone."""
        gradient = self._open[update]
        if not gradient.missing:
            return []  # a parameter that this replica reached is trained
        own, tied = gradient.missing - self._tied.keys(), gradient.missing & self._tied.keys()
        alone = [index for index in sorted(tied) if index in gradient.tied_flags and not gradient.tied_flags[index]]
        return sorted([*self._unreached_here(gradient, update, own), *alone]) if own else alone

    def _unreached_here(self, gradient: _Gradient, update: int, missing: set[int]) -> list[int]:
        """The same of the parameters of this stage alone, of which this replica's backward has reached some not."""
        if not self._options.is_conditional:
            if len(gradient.missing) == len(self._names):
                return []  # this replica had no microbatch of the round
            name = self._names[min(missing)]
            raise RuntimeError(f"no gradient reached parameter '{name}' in update {update}, as one did before training")
        if gradient.flags is None:
            return sorted(missing)  # the only replica
        unreached: list[int] = torch.nonzero(gradient.flags == 0).flatten().tolist()
        return [index for index in unreached if index not in self._tied]

    def pending(self, update: int) -> Pending:
        """The all-reduces of an update; once they are complete, its gradient is the sum."""
        return AllOf([*self._open[update].sums, *self._open[update].ties])

    def unscale(self, update: int) -> Tensor:
        """Divide the whole gradient by its loss scale; returns 1 if it is not finite, otherwise 0."""
        gradient = self._divided(update)
        assert gradient.loss_scale is not None, f"the gradient of update {update} has no loss scale to divide by"
        gradient.flat.mul_(gradient.loss_scale.reciprocal())
        gradient.loss_scale = None
        if not self._size:  # all parameters of the stage are frozen
            return torch.zeros((), device=self._device)
        largest: Tensor = torch.linalg.vector_norm(gradient.flat, torch.inf)
        return largest.isfinite().logical_not().float()

    def norm(self, update: int, *, once: bool = False) -> Tensor:
        """The norm of the whole gradient; `once`: without the tied parameters of which this is not the first home."""
        flat = self._divided(update).flat
        elsewhere = [index for index, is_first in self._tied.items() if once and not is_first]
        parts = [flat[first:last] for first, last in self._around(elsewhere)]
        norms: list[Tensor] = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _around(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """The ranges of a flat buffer between some parameters."""
        left_out = [(self._parameters[index].offset, self._parameters[index].end) for index in sorted(indices)]
        begins, ends = [0, *(end for _, end in left_out)], [*(offset for offset, _ in left_out), self._size]
        return list(zip(begins, ends, strict=True))

    def finish(self, update: int, norm: Tensor | None = None, tied_norms: Mapping[int, Tensor] | None = None) -> Tensor:
        """The whole gradient as the optimizer takes it; clipped by `norm`, that of the whole model, or by its own.

        `tied_norms` are the norms of all homes of each tied parameter, where homes clip apart: it is clipped by the
        smallest factor, the same in each. Every number is multiplied once, so that homes have the same bits.
        """
        flat, options = self._divided(update).flat, self._options
        if self.factor != 1.0:
            flat.mul_(self.factor)
        if options.clip is None:
            return flat
        factor = clip_factor(self.norm(update) if norm is None else norm, options.clip)
        if tied_norms is None:
            return flat.mul_(factor)
        for first, last in self._around(self._tied):
            flat[first:last].mul_(factor)
        for index, norms in tied_norms.items():
            flat[self._parameters[index].offset : self._parameters[index].end].mul_(
                clip_factor(norms, options.clip).min()
            )
        return flat

    def _divided(self, update: int) -> _Gradient:
        """The whole gradient, divided by what its loss counts in place of the constant; zero where nothing counts."""
        gradient, divisor = self._open[update], self._options.divisor
        if divisor is not None and not gradient.is_divided:
            count = self._figures_of(gradient)[:, 0].sum()
            gradient.flat.mul_(torch.where(count > 0, divisor / count, 0.0))
            gradient.is_divided = True
        return gradient

    def release(self, update: int) -> None:
        """Free an update's buffer."""
        del self._open[update]

    def _begin(self, update: int) -> _Gradient:
        number = update % len(self._buffers)
        taken = [other for other in self._open if other % len(self._buffers) == number]
        assert not taken, f"update {update} would overwrite the gradient of update {taken[0]}"
        flat, views = self._buffers[number]
        return self._open.setdefault(update, _Gradient(flat, views, missing=set(range(len(views)))))

    def _move_into(self, gradient: _Gradient, leaves: Sequence[Tensor]) -> None:
        """Move the leaves' new gradients into the buffer, in few kernels; zeros where backward has made none yet."""
        made: list[Tensor] = []
        places: list[Tensor] = []
        for index in sorted(gradient.missing):
            leaf, view = leaves[index], gradient.views[index]
            if leaf.grad is None:
                view.zero_()
                continue
            gradient.missing.discard(index)
            if leaf.grad is not view:
                made.append(_dense(leaf.grad))
                places.append(view)
            leaf.grad = view
        if made:
            copy_each(places, made)

    def _sum_next(self, gradient: _Gradient) -> None:
        first, last = self._ranges[len(gradient.sums)]
        gradient.sums.append(self._collective.sum(gradient.flat[first:last]))


def make_buckets(
    parameters: Sequence[Parameter], itemsize: int, bucket_bytes: int, left_out: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Indices of parameters in the order in which backward reaches them, in runs of about `bucket_bytes`.

    A bucket is contiguous, so it ends at a parameter that is left out.
    """
    buckets: list[list[int]] = [[]]
    size = 0
    for index in reversed(range(len(parameters))):
        if size >= bucket_bytes or index in left_out:
            buckets.append([])
            size = 0
        if index in left_out:
            continue
        buckets[-1].append(index)
        size += (parameters[index].end - parameters[index].offset) * itemsize
    return [tuple(bucket) for bucket in buckets if bucket]


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor that limits a gradient's norm to `limit`, as in torch's clip_grad_norm_."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


class Norms:
    """The squared norms of all stages' gradients of one update, each computed by its stage's first replica."""

    def __init__(self, stages: int, world: Collective) -> None:
        self._stages = stages
        self._world = world
        self._exchanged: dict[int, tuple[Tensor, Pending]] = {}  # by update; only the latest ones

    def exchange(self, norms: Mapping[int, Tensor], update: int) -> None:
        """Join the exchange for an update, with the norms, by stage, that this rank computes."""
        squares = torch.zeros(self._stages, dtype=torch.float64)
        for stage, norm in norms.items():
            squares[stage] = norm**2
        kept = {number: known for number, known in self._exchanged.items() if number > update - KEPT_NORMS}
        self._exchanged = kept | {update: (squares, self._world.sum(squares))}

    def pending(self, update: int) -> Pending:
        return self._exchanged[update][1]

    def squares(self, update: int) -> Tensor:
        """The squared norm of each stage; the exchange must be complete."""
        return self._exchanged[update][0]
