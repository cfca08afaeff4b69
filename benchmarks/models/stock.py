"""torch.distributed.pipelining on the same models, cut before the same modules, to stand beside the table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from stagewright.errors import first_line
from stagewright.model.call import Inputs, leaves_of
from stagewright.model.loss import logits_of

_LONGEST = 160
_SEED = 11


def stock_pipeline(model: nn.Module, inputs: Inputs, starts: Sequence[str | None]) -> str:
    """What it makes of a model: its largest difference in outputs and gradients, or the error that it raises."""
    splits = {name: SplitPoint.BEGINNING for name in starts if name is not None}
    if len(splits) < len(starts):
        return "not tried: no module begins at the cut"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, place = _outcome(model, partial(inputs.map(torch.clone).call, model))
            by_position, by_name = inputs.call(lambda *args, **kwargs: (args, kwargs))
            pipe = pipeline(model, by_position, by_name, split_spec=splits)
            if pipe.num_stages < len(splits) + 1:
                return f"made {pipe.num_stages} stages of {len(splits) + 1}"
            found, _ = _outcome(pipe.split_gm, partial(_interpreted, pipe.split_gm, inputs), place)
        except Exception as error:  # whatever it meets in the model's code
            return f"{type(error).__name__}: {first_line(error, _LONGEST)}"
    gap = 0.0
    for name, tensor in expected.items():
        if name not in found:
            return f"no gradient of '{name}'"
        if found[name].shape != tensor.shape:
            return f"another shape of {name}: {list(found[name].shape)}, not {list(tensor.shape)}"
        scale = max(float(tensor.abs().max()), 1e-12)
        gap = max(gap, float((found[name] - tensor).abs().max()) / scale)
    return f"works ({gap:.0e})"


def _interpreted(graph: fx.GraphModule, inputs: Inputs) -> Any:
    """Run a graph on inputs, which it may take in another order."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = list(inputs.tensors)
    if inputs.names:
        named = dict(zip(inputs.names, tensors[-len(inputs.names) :], strict=True))
        tensors = [named[name] for name in names]
    return fx.Interpreter(graph).run(*(tensor.clone() for tensor in tensors))


def _outcome(model: nn.Module, forward: Callable[[], Any], place: int | None = None) -> tuple[dict[str, Tensor], int]:
    """The logits of a forward in training, the gradients of their sum of squares, and their place in the outputs.

    A pipeline returns tensors without names, so those are its tensor at a known place.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(_SEED)
    made = forward()
    leaves = leaves_of(made)
    if place is None:
        place = next(index for index, leaf in enumerate(leaves) if leaf is logits_of(made))
    output = leaves[place]
    torch.autograd.backward(output.square().sum())
    gradients = {
        _plain_name(name): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return gradients | {"the output": output.detach()}, place


def _plain_name(name: str) -> str:
    """A parameter's name without the stage that holds it."""
    first, _, rest = name.partition(".")
    return rest if first.startswith("submod_pp_") else name
