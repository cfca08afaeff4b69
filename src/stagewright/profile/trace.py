"""Finds the shapes of a model's units (`shapes`) in one run of the model on tensors without storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.flop_counter import FlopCounterMode

from stagewright.model.call import Form, Inputs
from stagewright.model.chain import Chain
from stagewright.model.walk import Visit, Walk, require_output
from stagewright.profile.shapes import Convolution, Kind, Shape
from stagewright.torch_internals import memory_of

_PROBE_SAMPLES = 4
_ELEMENT = 4  # bytes of an element in fp32
_VIEWS = {
    *("flatten", "view", "reshape", "permute", "transpose", "contiguous", "squeeze", "unsqueeze", "expand", "chunk"),
    *("size", "getattr", "getitem"),
}


@dataclass(frozen=True, slots=True)
class RunUnit:
    """What one unit left behind when it ran."""

    visit: Visit
    output: Any
    parameters: int  # trainable elements
    saved: int  # bytes that autograd keeps for backward
    live: tuple[Tensor, ...]  # what crosses a cut after it
    frozen: int = 0  # elements of parameters that are not trained


_KINDS: tuple[tuple[tuple[type[nn.Module], ...], Kind], ...] = (
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d), Kind.CONVOLUTION),
    ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Kind.CONVOLUTION),
    ((nn.Linear,), Kind.LINEAR),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), Kind.NORM),
    ((nn.LayerNorm, nn.GroupNorm), Kind.LAYER_NORM),
    ((nn.MultiheadAttention,), Kind.ATTENTION),
    ((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), Kind.POOL),
    ((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), Kind.POOL),
    ((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), Kind.POOL),
    ((nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh), Kind.POINTWISE),
    ((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), Kind.POINTWISE),
    ((nn.AlphaDropout, nn.FeatureAlphaDropout), Kind.POINTWISE),
    ((nn.Flatten, nn.Identity), Kind.VIEW),
)


_FUNCTIONS = {
    "layer_norm": Kind.LAYER_NORM,
    "linear": Kind.LINEAR,
    "scaled_dot_product_attention": Kind.ATTENTION,
    **dict.fromkeys(_VIEWS, Kind.VIEW),
}


def trace_shapes(chain: Chain) -> tuple[Shape, ...]:
    """The shape of every unit for one sample like those that the chain was traced with."""
    was_training = chain.model.training
    chain.model.train()
    try:
        with torch.enable_grad():
            return tuple(_shapes(chain, meta_example(chain.example.form)))
    finally:
        chain.model.train(was_training)


def meta_example(form: Form) -> Inputs:
    """A few samples without storage."""
    return form.zeros(_PROBE_SAMPLES, "meta")


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose tensors have no storage."""
    with torch.device("meta"):
        return build()


def to_meta(model: nn.Module) -> nn.Module:
    """The model with tensors without storage; `Module.to` alone would make two parameters of a tied one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model = model.to("meta")
    for first, *others in names.values():
        for owner, _, leaf in (name.rpartition(".") for name in others):
            model.get_submodule(owner).register_parameter(leaf, model.get_parameter(first))
    return model


def _shapes(chain: Chain, example: Inputs) -> Iterator[Shape]:
    walk, before = Walk(chain, example), 0
    with FlopCounterMode(display=False) as counter:
        for unit in run_units(chain, walk):
            operations = counter.get_total_flops()
            yield _shape(unit, operations - before, begins=unit.visit.name not in chain.impossible)
            before = operations
    require_output(walk.output)


def _shape(unit: RunUnit, operations: int, *, begins: bool) -> Shape:
    visit, live = unit.visit, unit.live
    return Shape(
        name=visit.name,
        kind=kind_of(visit),
        operations=operations / _PROBE_SAMPLES,
        inputs=sum(map(_elements, visit.inputs)) // _PROBE_SAMPLES,
        outputs=_elements(unit.output) // _PROBE_SAMPLES,
        parameters=unit.parameters,
        saved=unit.saved / _ELEMENT / _PROBE_SAMPLES,
        live=sum(map(_elements, live)) // _PROBE_SAMPLES,
        live_gradient=sum(_elements(value) for value in live if value.requires_grad) // _PROBE_SAMPLES,
        input_gradient=any(tensor.requires_grad for value in visit.inputs for tensor in _tensors(value)),
        convolution=_convolution(visit.module),
        begins=begins,
        frozen=unit.frozen,
    )


def run_units(chain: Chain, walk: Walk) -> Iterator[RunUnit]:
    """Run every unit of a walk; parameters and saved tensors that several units share count for the first of them."""
    owned = {memory_of(tensor) for tensor in (*chain.model.parameters(), *chain.model.buffers())}
    kept: dict[int, UntypedStorage] = {}
    counted: set[int] = set()
    for visit in walk:
        with _saving(kept, owned) as saved:
            output = visit.call()
        new = [p for p in visit.parameters if id(p) not in counted]
        counted |= {id(parameter) for parameter in new}
        trained, frozen = (sum(p.numel() for p in new if p.requires_grad is kind) for kind in (True, False))
        live = {id(tensor): tensor for value in walk.live_after(output) for tensor in _tensors(value)}
        yield RunUnit(visit, output, trained, sum(saved), tuple(live.values()), frozen)


@contextmanager
def _saving(kept: dict[int, UntypedStorage], owned: set[int]) -> Iterator[list[int]]:
    """Collect the bytes of tensors that autograd saves for backward: each storage once, without those in `owned`."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        memory = memory_of(tensor)
        if memory not in owned and memory not in kept:
            kept[memory] = tensor.untyped_storage()  # kept alive, so that no other storage gets its address
            sizes.append(kept[memory].nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def _elements(value: Any) -> int:
    return sum(tensor.numel() for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of what a unit returns, such as those of the tuple that attention returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def kind_of(visit: Visit) -> Kind:
    """The kind of a unit, from its module or function."""
    if visit.module is not None:
        return next((kind for types, kind in _KINDS if isinstance(visit.module, types)), Kind.OTHER)
    return _FUNCTIONS.get(visit.target, Kind.POINTWISE)


def _convolution(module: nn.Module | None) -> Convolution | None:
    if not isinstance(module, nn.Conv2d):
        return None
    height, width = module.kernel_size
    return Convolution(height * width, module.stride[0], module.groups, module.in_channels, module.out_channels)
