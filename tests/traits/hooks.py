"""Traits of hooks on models, modules, tensors and parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.traits.trait import OR_REFUSED, Stack, on_blocks, on_model, step, trait

on_blocks("forward hooks on blocks")(
    lambda block: block.register_forward_hook(lambda module, args, output: 0.9 * output + 0.05)
)
on_blocks("forward pre-hooks on blocks")(
    lambda block: block.register_forward_pre_hook(lambda module, args: (args[0] - 0.1,))
)
on_blocks("hooks on layers of torch")(
    lambda block: block.linear.register_forward_hook(lambda module, args, output: output.sin())
)
on_blocks("hooks with keyword arguments")(
    lambda block: block.register_forward_pre_hook(
        lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True
    )
)


on_model("forward hook on the model")(
    lambda model: model.register_forward_hook(lambda module, args, output: 3 * output)
)
on_model("forward pre-hook on the model")(
    lambda model: model.register_forward_pre_hook(lambda module, args: (args[0].clamp(-0.5, 0.5),))
)


@trait("full backward hooks on blocks")
def backward_hooks() -> nn.Module:
    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return None if inputs[0] is None else (0.5 * inputs[0],)

    model = Stack()
    for block in model.blocks:
        block.register_full_backward_hook(halve)
    return model


on_model("backward hook on the model", expected=OR_REFUSED)(
    lambda model: model.register_full_backward_pre_hook(lambda module, outputs: (0.5 * outputs[0],))
)


@step("hook on a tensor")
def tensor_hook(self, block, x):
    x = block(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: 0.5 * gradient)
    return x


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
