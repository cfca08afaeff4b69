"""Models by name of packages that are installed beside this one: `timm:NAME` and `torchvision:NAME`; see `configured`.

An `Entry` is what a package knows of a model, and builds it with new weights. Nothing is downloaded.

The CPU build of torch can't load torchvision's compiled operators, and importing torchvision fails where one that it
describes is missing. Those are declared here first, without an implementation: no model needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright.errors import UserError, did_you_mean, first_line, is_out_of_memory
from stagewright.model.networks.zoo import Entry

USUAL_SIDE = 224
_USUAL_CLASSES = 1000
_DESCRIBED = dict.fromkeys(("nms", "qnms"), "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Package(StrEnum):
    """A package that models come from, by the word in front of a model's name."""

    TIMM = "timm"
    TORCHVISION = "torchvision"
    TRANSFORMERS = "hf"

    @property
    def module(self) -> str:
        """What it is imported and installed as."""
        return self.name.lower()

    @property
    def version(self) -> str:
        return str(import_library(self.module).__version__)

    def unknown(self, name: str, known: Iterable[str]) -> UserError:
        """The error about a name that the package does not have."""
        return UserError(
            f"model '{self}:{name}': {self.module} {self.version} has no model '{name}'; {did_you_mean(name, known)}"
        )


def package_of(name: str) -> Package | None:
    """The package that a model's name begins with; None for any other name."""
    prefix, colon, _ = name.partition(":")
    return Package(prefix) if colon and prefix in list(Package) else None


def is_installed(library: str) -> bool:
    """Whether a library can be imported here; an empty name stands for none."""
    return not library or find_spec(library) is not None


def import_library(name: str) -> Any:
    """Import a library or one of its modules; the others find torchvision usable, if it is installed."""
    library = name.partition(".")[0]
    if find_spec(library) is None:
        raise UserError(
            f"{library} is not installed; install it with pip install {library}, or everything that models come from "
            "with pip install 'stagewright[libraries]'"
        )
    _declare_missing_operators()
    return import_module(name)


def _declare_missing_operators() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError:  # built for another torch
            continue
    for name, schema in _DESCRIBED.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)


def built(model: str, build: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """What a package's function builds; whatever its code raises becomes one line about the named model."""
    try:
        return build(**options)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"model '{model}': its package raised {type(error).__name__}: {first_line(error, 200)}"
        ) from error


def normalization(mean: Iterable[float], std: Iterable[float]) -> str:
    """Mean and deviation as --normalize takes them, on a scale of 0 to 255."""
    return "/".join(",".join(repr(255 * float(share)) for share in shares) for shares in (mean, std))


def timm_entry(name: str, image: int | None = None) -> Entry:
    """A model of timm, which may have the tag of some weights behind a dot: those say which images they are for."""
    timm = import_library("timm")
    if not timm.is_model(name):
        raise Package.TIMM.unknown(name, timm.list_models())
    try:
        about = timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        architecture, _, tag = name.partition(".")
        tags = timm.list_models(f"{architecture}.*", pretrained=True)
        raise UserError(f"model 'timm:{name}': timm knows no weights '{tag}'; {did_you_mean(name, tags)}") from error
    channels, _, side = about.input_size
    options = {"img_size": image} if about.fixed_input_size and image not in (None, side) else {}
    return Entry(
        lambda classes: built(f"timm:{name}", timm.create_model, model_name=name, num_classes=classes, **options),
        image=image or side,
        classes=about.num_classes or _USUAL_CLASSES,
        channels=channels,
        normalize=normalization(about.mean, about.std),
    )


def torchvision_entry(name: str, image: int | None = None) -> Entry:
    """A model of torchvision that classifies images or pixels."""
    models = import_library("torchvision.models")
    of_pixels = models.list_models(module=models.segmentation)
    known = [*models.list_models(module=models), *of_pixels]
    if name not in known:
        if name in models.list_models():
            raise UserError(
                f"model 'torchvision:{name}' classifies neither images nor pixels; make it in a factory of your own "
                "(package.module:factory)"
            )
        raise Package.TORCHVISION.unknown(name, known)
    about = models.get_model_weights(name).DEFAULT
    preset = about.transforms()  # how its images were made
    side = image or (USUAL_SIDE if name in of_pixels else preset.crop_size[0])
    options: dict[str, Any] = {"weights_backbone": None} if name in of_pixels else {}
    if name.startswith("vit_"):
        options["image_size"] = side
    elif name.startswith("maxvit_"):
        options["input_size"] = (side, side)
    return Entry(
        lambda classes: built(
            f"torchvision:{name}", models.get_model, name=name, weights=None, num_classes=classes, **options
        ),
        image=side,
        classes=len(about.meta["categories"]),
        normalize=normalization(preset.mean, preset.std),
    )
