"""Builds the model that a user names: of the zoo, of an installed package, or by package.module:factory."""

from __future__ import annotations

import copy
import inspect
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.nn.parameter import UninitializedParameter

from stagewright.errors import UserError, first_line
from stagewright.model.networks.configured import Configured
from stagewright.model.networks.libraries import Package, package_of, timm_entry, torchvision_entry
from stagewright.model.networks.weights import Start, check_loaded, freeze, load_weights, noting_frozen
from stagewright.model.networks.zoo import ZOO, Entry, build
from stagewright.model.standin import untouched_generators
from stagewright.objects import load_object


def find_entry(name: str, image: int | None = None) -> Entry | None:
    """What is known of a model by its name, built for images of that side; None of a model of the user's own."""
    package, rest = package_of(name), name.partition(":")[2]
    if package is Package.TIMM:
        return timm_entry(rest, image)
    if package is Package.TORCHVISION:
        return torchvision_entry(rest, image)
    if package is Package.TRANSFORMERS:
        return Configured(name).entry(image)
    return ZOO.get(name)


def is_ours(name: str) -> bool:
    """Whether a model is of the zoo: its code does the same for every batch, which other people's may not."""
    return name in ZOO


def build_model(
    name: str,
    seed: int,
    classes: int | None = None,
    weights: torch.dtype = torch.float32,
    *,
    image: int | None = None,
    init: str | None = None,
    frozen: str | None = None,
) -> nn.Module:
    """The model on the CPU, made in fp32 and converted; seeded, so the same on every rank.

    Its first weights are new or those of `init` (`weights.load_weights`); `frozen` are patterns (`weights.freeze`).
    """
    return start_model(name, seed, classes, weights, image=image, init=init, frozen=frozen)[0]


def start_model(
    name: str,
    seed: int,
    classes: int | None = None,
    weights: torch.dtype = torch.float32,
    *,
    image: int | None = None,
    init: str | None = None,
    frozen: str | None = None,
) -> tuple[nn.Module, Start | None]:
    """The same, and where its first weights came from, if they are not new."""
    with untouched_generators():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)  # else torch would seed them when they are first used, maybe much later
        model, start = _started(name, classes, image, init)
    if frozen is not None:
        freeze(model, frozen)
        start = start and noting_frozen(start, model)
    return convert(model, weights), start


def _started(name: str, classes: int | None, image: int | None, init: str | None) -> tuple[nn.Module, Start | None]:
    if init is not None and package_of(name) is Package.TRANSFORMERS and Configured.is_saved(init):
        model, absent, unused = Configured(name).load(init, classes, image)
        return model, check_loaded(model, absent, unused, init)
    model = construct(name, classes, image)
    return model, None if init is None else load_weights(model, init)


def construct(name: str, classes: int | None = None, image: int | None = None) -> nn.Module:
    """The model with new weights, drawn from torch's generator."""
    if ":" not in name:
        return build(name, classes)
    entry = find_entry(name, image)
    return _from_factory(name, classes) if entry is None else entry.build(classes or entry.classes)


def convert(model: nn.Module, weights: torch.dtype) -> nn.Module:
    """Convert the tensors of single precision; an author's other types stay what they are, but complex ones widen."""
    if weights == torch.float32:
        return model
    widened = {torch.float32: weights, torch.complex64: torch.complex128 if weights == torch.float64 else None}

    for parameter in model.parameters():
        parameter.data = parameter.data.to(widened.get(parameter.dtype) or parameter.dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(widened.get(buffer.dtype) or buffer.dtype))
    return model


def _from_factory(name: str, classes: int | None) -> nn.Module:
    factory = load_object(name, "model")
    if isinstance(factory, nn.Module):  # an object of a script, which stays as it is
        return _copied(name, factory)
    if not callable(factory):
        raise UserError(f"model '{name}' is of type {type(factory).__name__}; name a factory, or a module")
    wants_classes = classes is not None and "classes" in inspect.signature(factory).parameters
    try:
        made = factory(classes=classes) if wants_classes else factory()
        model = made if isinstance(made, nn.Module) else nn.Sequential(*made)  # a list of modules is a chain
    except (Exception, SystemExit) as error:  # the user's code: report whatever it raises
        raise UserError(f"model '{name}': the factory raised {type(error).__name__}: {first_line(error)}") from error
    return _require_shapes(name, model)


def _copied(name: str, model: nn.Module) -> nn.Module:
    """A copy of a script's own model, on the CPU."""
    _require_shapes(name, model)
    try:
        return copy.deepcopy(model).cpu()
    except Exception as error:  # an attribute that can't be copied, such as a lock
        raise UserError(
            f"model '{name}' can't be copied ({type(error).__name__}: {first_line(error, 120)}); give a function that "
            "makes it instead"
        ) from error


def _require_shapes(name: str, model: nn.Module) -> nn.Module:
    lazy = [path for path, tensor in model.named_parameters() if isinstance(tensor, UninitializedParameter)]
    if lazy:
        raise UserError(
            f"model '{name}': parameter '{lazy[0]}' of a lazy module has no shape yet; run one sample through "
            "the model in the factory"
        )
    return model


def make_deterministic(model: nn.Module) -> nn.Module:
    """Replace the poolings whose backward is not deterministic on a GPU; torch reports other such operations itself."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.AdaptiveAvgPool2d:
                setattr(module, name, DeterministicPool(child.output_size))
    return model


class DeterministicPool(nn.AdaptiveAvgPool2d):
    """Adaptive pooling as plain pooling where the output size divides the input; its backward repeats bit for bit."""

    def forward(self, features: Tensor) -> Tensor:
        grid = self.output_size if isinstance(self.output_size, tuple) else (self.output_size,) * 2
        sides = [(side, cells or side) for side, cells in zip(features.shape[2:], grid, strict=True)]
        if any(side % cells for side, cells in sides):
            return super().forward(features)
        return avg_pool2d(features, [side // cells for side, cells in sides])
