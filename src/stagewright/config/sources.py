"""The kinds of data that `--data` names: the one place where each stands, and the options by which it is opened.

A new kind is an entry here, the module that opens it below `data`, and its row in docs/data.md. The errors and the help
of `--data`, what each option of data needs (`rules`) and what a run takes as its defaults follow from these entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagewright.errors import UserError

_IMAGES = (
    *("--crop", "--jitter", "--cutout", "--normalize", "--decode"),
    *("--loader-threads", "--workers", "--ahead", "--max-bad"),
)
_NAMED = (*_IMAGES, "--class-names")
_MADE = ("--samples", "--learnable")


@dataclass(frozen=True, slots=True)
class DataKind:
    """One kind of data."""

    name: str  # before the colon
    rest: str  # what follows it; empty where nothing does
    opened_by: str  # the function below `data` that makes a Source of the text and a SourceOptions
    options: tuple[str, ...] = ()  # that change something for this kind, and not for all
    is_encoded: bool = False  # images, which loaders decode
    has_labels: bool = False  # one class per sample, which need not be looked at to be known
    knows_classes: bool = True  # how many there are, and not only of the samples looked at
    is_path: bool = True  # `rest` is one file or folder

    @property
    def shown(self) -> str:
        return f"{self.name}:{self.rest}" if self.rest else self.name


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options that say how data become samples; samples, classes, seed and channels are of synthetic images."""

    image: int = 32
    cropping: str = "auto"
    normalize: str = "imagenet"
    jitter: float = 0.0
    cutout: int = 0
    class_names: str | None = None
    limit: int | None = None
    context: int = 256  # tokens of a sample, of token files only
    ignore_index: int | None = None  # a label that counts nowhere, of tensors and datasets
    samples: int = 1
    classes: int = 1
    seed: int = 0
    is_learnable: bool = True
    channels: int = 3


KINDS: dict[str, DataKind] = {
    kind.name: kind
    for kind in (
        DataKind("synthetic", "", "synthetic:open_synthetic", _MADE, knows_classes=False, is_path=False),
        DataKind("folder", "DIR", "sources:open_images", _NAMED, is_encoded=True, has_labels=True),
        DataKind("tar", "GLOB", "sources:open_images", _NAMED, is_encoded=True, has_labels=True, is_path=False),
        DataKind("ofrecord", "DIR", "sources:open_images", _NAMED, is_encoded=True, has_labels=True),
        DataKind("segmentation", "DIR", "sources:open_images", _NAMED, is_encoded=True),
        DataKind("table", "FILE", "sources:open_images", _IMAGES, is_encoded=True),
        DataKind("tensors", "FILE", "formats.tensors:open_tensors"),
        DataKind("tokens", "FILE", "formats.tokens:open_tokens", ("--context",), knows_classes=False),
        DataKind("python", "MODULE:DATASET", "own:open_own", ("--workers",), knows_classes=False, is_path=False),
    )
}
OPTIONS_OF_KINDS = tuple(dict.fromkeys(flag for kind in KINDS.values() for flag in kind.options))


def find_kind(text: str) -> DataKind:
    """The kind of data that a text names."""
    name, _, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None or bool(kind.rest) != bool(rest) or kind.rest.count(":") > rest.count(":"):
        raise UserError(f"data '{text}' is not one of {', '.join(kind.shown for kind in KINDS.values())}")
    return kind


def kind_of(text: str | None) -> DataKind | None:
    """The kind of data that a text begins as; None for no kind of ours."""
    return KINDS.get((text or "").partition(":")[0])


def knows_classes(text: str) -> bool:
    """Whether `--data` names data that knows all its classes."""
    kind = kind_of(text)
    return kind is not None and kind.knows_classes


def names_images(text: str) -> bool:
    """Whether `--data` names encoded images."""
    kind = kind_of(text)
    return kind is not None and kind.is_encoded
