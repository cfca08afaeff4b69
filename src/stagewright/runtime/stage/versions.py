"""A stage's weights as flat buffers: one master and K version slots, and beside them the average of `--ema`.

Parameters are views of the buffers with their own strides, swapped into the modules; the optimizer sees the master. The
views share autograd's version counter with their buffer, so a backward through a slot that was overwritten raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagewright.errors import UserError
from stagewright.torch_internals import parameters_in

_ALIGNMENT = 16  # elements; no two parameters share a cache line


@dataclass(frozen=True, slots=True)
class Parameter:
    """One trainable parameter: its place in every flat buffer, and the modules that hold it."""

    names: tuple[str, ...]  # tied parameters have several
    sites: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_complex: bool = False  # a buffer holds its real and imaginary parts beside each other

    def view(self, flat: Tensor) -> Tensor:
        """The parameter in a flat buffer."""
        return torch.view_as_complex(self.real_view(flat)) if self.is_complex else self.real_view(flat)

    def real_view(self, flat: Tensor) -> Tensor:
        """The parameter as real numbers: a complex one has a last dimension of two."""
        if not self.is_complex:
            return flat.as_strided(self.shape, self.stride, self.offset)
        return flat.as_strided((*self.shape, 2), (*(2 * step for step in self.stride), 1), self.offset)

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * (2 if self.is_complex else 1)


class Slot:
    """One version of the weights: a flat buffer, and autograd leaves that are views of it."""

    def __init__(self, flat: Tensor, parameters: Sequence[Parameter]) -> None:
        self.flat = flat
        self.version = 0
        self.leaves = [parameter.view(flat).requires_grad_() for parameter in parameters]


class VersionRing:
    """Keeps the K versions of one stage's weights and swaps them into its modules.

    Update p uses slot (p+1) mod K, which holds version p+1-K: it was filled when update p-K was done. Before that, all
    slots hold the initial weights. With K = 1 the only slot is the master, trained in place. The author's own module,
    with K = 1, keeps its parameters as objects: they become views of the master, wherever the author's code holds them.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        trainable: Collection[str],
        versions: int,
        *,
        keeps_objects: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`device`: of the run; a stage without trained parameters has buffers of no elements there."""
        self.parameters = _collect(roots, trainable)
        size = self.parameters[-1].end if self.parameters else 0
        dtype, device = _common(roots, trainable) or (torch.float32, device or torch.device("cpu"))
        self.master = torch.zeros(size, dtype=dtype, device=device)
        for parameter in self.parameters:
            module, name = parameter.sites[0]
            parameter.view(self.master).copy_(parameters_in(module)[name].detach())
        slots = [self.master] if versions == 1 else [self.master.clone() for _ in range(versions)]
        self.slots = [Slot(flat, self.parameters) for flat in slots]
        if versions == 1 and keeps_objects:
            self.slots[0].leaves = [_as_view(parameter, self.master) for parameter in self.parameters]
        self._master_slot = self.slots[0] if versions == 1 else Slot(self.master, self.parameters)
        self._current: Slot | None = None
        self.use_master()

    def slot_of(self, update: int) -> int:
        """The slot whose weights an update's microbatches use."""
        return (update + 1) % len(self.slots)

    def use(self, update: int) -> Slot:
        """Put the weights of an update's microbatches into the modules."""
        return self._swap_in(self.slots[self.slot_of(update)])

    def use_master(self) -> Slot:
        """Put the newest weights into the modules, for evaluation and export."""
        return self._swap_in(self._master_slot)

    def refill(self, update: int, version: int, fill: Callable[[Tensor], None] | None = None) -> None:
        """Fill the slot of an update, once its last backward is done: by `fill`, or with a copy of the master."""
        slot = self.slots[self.slot_of(update)]
        slot.version = version
        if len(self.slots) > 1:
            with torch.no_grad():
                if fill is None:
                    slot.flat.copy_(self.master)
                else:
                    fill(slot.flat)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat buffer as tensors, by parameter names of the whole model."""
        return {name: parameter.view(flat) for parameter in self.parameters for name in parameter.names}

    def _swap_in(self, slot: Slot) -> Slot:
        if slot is not self._current:
            self._current = slot
            for parameter, leaf in zip(self.parameters, slot.leaves, strict=True):
                for module, name in parameter.sites:
                    parameters_in(module)[name] = leaf
        return slot


class Average:
    """The weights that evaluations and exports use; this default is the newest weights themselves."""

    flat: Tensor | None = None  # like the master, where there is one to save

    def restart(self) -> None:
        """Begin again, from the newest weights."""

    def add(self, skipping: Tensor | None = None) -> None:
        """Take in the newest weights after an update; if `skipping` is 1, that update was none."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The master holds these weights while the context is open; the pipeline is empty."""
        yield


class MovingAverage(Average):
    """An exponential moving average: with each update, decay*average + (1-decay)*weights.

    It is in single precision at least, as the small steps of a slow average vanish in half precision. Where parameters
    are tied it moves parameter by parameter, for the same bits in every home (`optimizer.Weights` says why).
    """

    flat: Tensor

    def __init__(self, ring: VersionRing, decay: float, *, is_tied: bool = False) -> None:
        self._master = ring.master
        self._step = 1 - decay
        self.flat = ring.master.to(torch.promote_types(ring.master.dtype, torch.float32), copy=True)
        parts = ring.parameters if is_tied else ()
        self._views = [part.real_view(self.flat) for part in parts] or [self.flat]
        self._weights = [part.real_view(self._master) for part in parts] or [self._master]

    def restart(self) -> None:
        self.flat.copy_(self._master)

    def add(self, skipping: Tensor | None = None) -> None:
        step = self._step if skipping is None else self._step * (1 - skipping).to(self.flat)
        for view, weights in zip(self._views, self._weights, strict=True):
            view.lerp_(weights.to(view.dtype), step)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        newest = self._master.clone()
        self._master.copy_(self.flat)
        try:
            yield
        finally:
            self._master.copy_(newest)


def _as_view(parameter: Parameter, flat: Tensor) -> Tensor:
    """The author's own parameter, its data a view of a flat buffer."""
    module, name = parameter.sites[0]
    own: nn.Parameter = parameters_in(module)[name]
    assert own is not None
    own.data = parameter.view(flat)
    return own


def _sites(roots: Sequence[nn.Module], trainable: Collection[str]) -> dict[int, dict[str, list[tuple[nn.Module, str]]]]:
    """Each distinct trainable tensor by id: its names in the model, and the modules that hold it under each."""
    found: dict[int, dict[str, list[tuple[nn.Module, str]]]] = {}
    for root in roots:
        for prefix, module in root.named_modules(remove_duplicate=False):
            for name, tensor in parameters_in(module).items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None and (full in trainable or id(tensor) in found):
                    sites = found.setdefault(id(tensor), {}).setdefault(full, [])
                    if (module, name) not in sites:
                        sites.append((module, name))
    return found


def _collect(roots: Sequence[nn.Module], trainable: Collection[str]) -> list[Parameter]:
    parameters: list[Parameter] = []
    offset = 0
    for by_name in _sites(roots, trainable).values():
        sites = list(dict.fromkeys(site for sites in by_name.values() for site in sites))
        tensor = parameters_in(sites[0][0])[sites[0][1]]
        assert tensor is not None
        stride = torch.empty_like(tensor, device="meta").stride()  # the tensor's own, made dense
        is_complex = tensor.is_complex()
        parameters.append(Parameter(tuple(by_name), tuple(sites), tensor.shape, stride, offset, is_complex))
        offset = -(-parameters[-1].end // _ALIGNMENT) * _ALIGNMENT
    return parameters


def _common(roots: Sequence[nn.Module], trainable: Collection[str]) -> tuple[torch.dtype, torch.device] | None:
    """The type and device of the real numbers that a stage's parameters consist of; None where it has none."""
    found: dict[tuple[torch.dtype, torch.device], str] = {}
    for root in roots:
        for name, tensor in root.named_parameters():
            if name in trainable:
                found.setdefault((tensor.dtype.to_real(), tensor.device), name)
    if len(found) > 1:
        (some, _), (other, _) = list(found)[:2]
        names = list(found.values())
        raise UserError(
            f"parameter '{names[0]}' is {str(some).removeprefix('torch.')} and '{names[1]}' of the same stage "
            f"{str(other).removeprefix('torch.')}; a stage trains one type: cut between them, or convert one"
        )
    return next(iter(found), None)
