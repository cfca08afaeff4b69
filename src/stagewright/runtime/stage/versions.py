"""A stage's weights as flat buffers: one master, K version slots, and the gradient buffers behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_ALIGNMENT = 16  # elements; keeps every parameter on a cache line of its own


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where one trainable parameter lies in every flat buffer, and where modules hold it."""

    names: tuple[str, ...]  # tied parameters have several
    sites: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, self.offset)

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


class Slot:
    """One version of the weights: a flat buffer, and leaves that are views of it."""

    def __init__(self, flat: Tensor, parameters: Sequence[Parameter]) -> None:
        self.flat = flat
        self.version = 0
        self.leaves = [parameter.view(flat).requires_grad_() for parameter in parameters]


class VersionRing:
    """Keeps the K versions of one stage's weights and swaps them into its modules.

    Update p uses slot (p+1) mod K, which holds version p+1-K: what it was filled with when update p-K was done. Before
    that all slots hold the weights of the start. With K = 1 the one slot is the master itself, trained in place.
    """

    def __init__(self, roots: Sequence[nn.Module], trainable: Collection[str], versions: int, buffers: int) -> None:
        self.parameters = _collect(roots, trainable)
        size = self.parameters[-1].end if self.parameters else 0
        dtype, device = _common(roots, trainable)
        self.master = torch.zeros(size, dtype=dtype, device=device)
        for parameter in self.parameters:
            module, name = parameter.sites[0]
            parameter.view(self.master).copy_(module._parameters[name].detach())  # type: ignore[union-attr]
        slots = [self.master] if versions == 1 else [self.master.clone() for _ in range(versions)]
        self.slots = [Slot(flat, self.parameters) for flat in slots]
        self._master_slot = self.slots[0] if versions == 1 else Slot(self.master, self.parameters)
        self.gradients = [torch.zeros_like(self.master) for _ in range(buffers)]
        self._gradient_views = [[p.view(gradient) for p in self.parameters] for gradient in self.gradients]
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

    @contextmanager
    def gathering(self, slot: Slot, update: int, *, is_first: bool, at_once: bool) -> Iterator[None]:
        """Let a backward through a slot's leaves, within the context, add to the gradient buffer of an update.

        The first of an update makes its gradients anew, which is cheaper than zeros and a sum; they come into the
        buffer one by one where something waits for them, otherwise together.
        """
        if not is_first:  # its leaves' gradients are in the buffer already
            yield
            return
        hooks = self._gather_first(slot, update, at_once=at_once)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._gather_rest(slot, update)

    def _gather_first(self, slot: Slot, update: int, *, at_once: bool) -> list[RemovableHandle]:
        """Have the next backward make gradients anew, and move each into the buffer at once where that is asked."""

        def fill(leaf: Tensor, view: Tensor) -> None:
            assert leaf.grad is not None
            view.copy_(leaf.grad)
            leaf.grad = view

        hooks = []
        for leaf, view in zip(slot.leaves, self._views_of(update), strict=True):
            leaf.grad = None
            if at_once:
                hooks.append(leaf.register_post_accumulate_grad_hook(partial(fill, view=view)))  # type: ignore[no-untyped-call]
        return hooks

    def _gather_rest(self, slot: Slot, update: int) -> None:
        """After the first backward, move what it made into the buffer, in few kernels; zeros where it made nothing."""
        made: list[Tensor] = []
        places: list[Tensor] = []
        for leaf, view in zip(slot.leaves, self._views_of(update), strict=True):
            if leaf.grad is None:
                view.zero_()
            elif leaf.grad is not view:
                made.append(leaf.grad)
                places.append(view)
            leaf.grad = view
        if made:
            torch._foreach_copy_(places, made)

    def gradient_of(self, update: int) -> Tensor:
        return self.gradients[update % len(self.gradients)]

    def _views_of(self, update: int) -> list[Tensor]:
        """The gradient buffer of an update, a view for each leaf."""
        return self._gradient_views[update % len(self.gradients)]

    def refill(self, update: int, version: int, fill: Callable[[Tensor], None]) -> None:
        """Fill the slot of an update with a version; its last backward is over."""
        slot = self.slots[self.slot_of(update)]
        slot.version = version
        if len(self.slots) > 1:
            with torch.no_grad():
                fill(slot.flat)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat buffer by the parameter names of the whole model."""
        return {name: parameter.view(flat) for parameter in self.parameters for name in parameter.names}

    def _swap_in(self, slot: Slot) -> Slot:
        if slot is not self._current:
            self._current = slot
            for parameter, leaf in zip(self.parameters, slot.leaves, strict=True):
                for module, name in parameter.sites:
                    module._parameters[name] = leaf  # type: ignore[assignment]
        return slot


def _sites(roots: Sequence[nn.Module], trainable: Collection[str]) -> dict[int, dict[str, list[tuple[nn.Module, str]]]]:
    """For each distinct trainable tensor: its names in the model, and all the modules that hold it."""
    found: dict[int, dict[str, list[tuple[nn.Module, str]]]] = {}
    for root in roots:
        for prefix, module in root.named_modules(remove_duplicate=False):
            for name, tensor in module._parameters.items():
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
        tensor = sites[0][0]._parameters[sites[0][1]]
        assert tensor is not None
        stride = torch.empty_like(tensor, device="meta").stride()  # its own, made dense
        parameters.append(Parameter(tuple(by_name), tuple(sites), tensor.shape, stride, offset))
        offset = -(-parameters[-1].end // _ALIGNMENT) * _ALIGNMENT
    return parameters


def _common(roots: Sequence[nn.Module], trainable: Collection[str]) -> tuple[torch.dtype, torch.device]:
    kinds = {
        (tensor.dtype, tensor.device) for root in roots for name, tensor in root.named_parameters() if name in trainable
    }
    if len(kinds) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype, _ in kinds))
        raise ValueError(f"a stage's trainable parameters have several types ({names}); give them one")
    return next(iter(kinds), (torch.float32, torch.device("cpu")))
