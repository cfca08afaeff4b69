"""Traits of hooks on models, modules, tensors and parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.traits.trait import OR_REFUSED, Stack, trait


@trait("forward hooks on blocks")
def forward_hooks() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: 0.9 * output + 0.05)
    return model


@trait("forward pre-hooks on blocks")
def forward_pre_hooks() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] - 0.1,))
    return model


@trait("hooks on layers of torch")
def layer_hooks() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.linear.register_forward_hook(lambda module, args, output: output.sin())  # type: ignore[union-attr]
    return model


@trait("hooks with keyword arguments")
def keyword_hooks() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    return model


@trait("forward hook on the model")
def model_hook() -> nn.Module:
    model = Stack()
    model.register_forward_hook(lambda module, args, output: 3 * output)
    return model


@trait("forward pre-hook on the model")
def model_pre_hook() -> nn.Module:
    model = Stack()
    model.register_forward_pre_hook(lambda module, args: (args[0].clamp(-0.5, 0.5),))
    return model


@trait("full backward hooks on blocks")
def backward_hooks() -> nn.Module:
    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return None if inputs[0] is None else (0.5 * inputs[0],)

    model = Stack()
    for block in model.blocks:
        block.register_full_backward_hook(halve)
    return model


@trait("backward hook on the model", expected=OR_REFUSED)
def model_backward_hook() -> nn.Module:
    model = Stack()
    model.register_full_backward_pre_hook(lambda module, outputs: (0.5 * outputs[0],))
    return model


@trait("hook on a tensor")
class TensorHook(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: 0.5 * gradient)
        return self.head(x)


@trait("hooks on parameters", expected=OR_REFUSED)
def parameter_hooks() -> nn.Module:
    model = Stack()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    return model


@trait("hook that removes itself", expected=OR_REFUSED)
def once_hook() -> nn.Module:
    """As data-dependent initialization does: the first forward sets a weight."""
    model = Stack()

    def first(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        module.linear.bias.data -= args[0].mean(0)  # type: ignore[union-attr, operator]
        handle.remove()

    handle = model.blocks[1].register_forward_pre_hook(first)
    return model


@trait("hook that watches")
def watching_hook() -> nn.Module:
    model = Stack()
    seen: list[float] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(float(output.detach().mean())))
    return model
