"""torch.distributed.pipelining on the same models, cut before the same modules, to stand beside the table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from stagewright.errors import first_line

_LONGEST = 160
_SEED = 11


def stock_pipeline(model: nn.Module, inputs: Tensor, starts: Sequence[str | None]) -> str:
    """What it makes of a model: its largest difference in outputs and gradients, or the error that it raises."""
    splits = {name: SplitPoint.BEGINNING for name in starts if name is not None}
    if len(splits) < len(starts):
        return "not tried: no module begins at the cut"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _outcome(model, inputs, model)
            pipe = pipeline(model, (inputs,), split_spec=splits)
            if pipe.num_stages < len(splits) + 1:
                return f"made {pipe.num_stages} stages of {len(splits) + 1}"
            found = _outcome(pipe.split_gm, inputs, fx.Interpreter(pipe.split_gm).run)
        except Exception as error:  # whatever it meets in the model's code
            return f"{type(error).__name__}: {first_line(error, _LONGEST)}"
    gap = 0.0
    for name, tensor in expected.items():
        if name not in found:
            return f"no gradient of '{name}'"
        scale = max(float(tensor.abs().max()), 1e-12)
        gap = max(gap, float((found[name] - tensor).abs().max()) / scale)
    return f"works ({gap:.0e})"


def _outcome(model: nn.Module, inputs: Tensor, forward: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    """The output of a forward in training, and the gradients of its sum of squares."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(_SEED)
    output = forward(inputs.clone())
    if isinstance(output, tuple | list):
        (output,) = output
    torch.autograd.backward(output.square().sum())
    made = {
        _plain_name(name): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return made | {"the output": output.detach()}


def _plain_name(name: str) -> str:
    """A parameter's name without the stage that holds it."""
    first, _, rest = name.partition(".")
    return rest if first.startswith("submod_pp_") else name
