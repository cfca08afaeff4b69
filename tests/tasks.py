"""Tasks beyond the classification of images, small: models, samples with several fields, and losses.

Each model is a chain of modules named as its stages are cut; each loss is written out in plain PyTorch here, beside the
option that makes Stagewright compute it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.model.networks.language import BERT, GPT

Fields = dict[str, Tensor]
SAMPLES = 26  # two batches of 12, and two samples that are dropped
_WORDS = 11
_LENGTH = 5
_WIDTH = 8


@dataclass(frozen=True)
class Task:
    """A model of this module, its samples, and its loss: as an option, and in plain PyTorch."""

    name: str
    cut: tuple[str, ...]  # the modules that later stages begin with
    inputs: tuple[str, ...]
    loss: Callable[[Any, Fields], Any]
    option: str = "auto"
    names: tuple[str, ...] = ()  # forward's parameters that get the last inputs
    asked: str | None = None  # --inputs
    options: Mapping[str, Any] | None = None  # of [loss]
    tie: str | None = None  # the first name of a parameter that the first and the last stage use

    def __str__(self) -> str:
        return self.name

    def model(self) -> nn.Module:
        made = globals()[self.name]()
        assert isinstance(made, nn.Module)
        return made

    def data(self) -> Fields:
        generator = torch.Generator().manual_seed(7)
        return _DATA[self.name](generator)


class Words(nn.Module):
    """Reads each position's word and, by a running mean, the words before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        seen = attention_mask.cumsum(1).clamp(min=1).unsqueeze(-1)
        mixed = torch.tanh(self.mix(words.cumsum(1) / seen))
        mixed = self.norm(self.drop(mixed) + words)
        made: Tensor = self.head(mixed * attention_mask.unsqueeze(-1))
        return made


class Translator(nn.Module):
    """Reads a sentence, and beside it the translation so far."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(_WORDS, _WIDTH)
        self.encoder = nn.Linear(_WIDTH, _WIDTH)
        self.target = nn.Embedding(_WORDS, _WIDTH)
        self.decoder = nn.Linear(2 * _WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> dict[str, Tensor]:
        meaning = torch.tanh(self.encoder(self.source(source_ids))).mean(1, keepdim=True)
        so_far = self.target(target_ids)
        both = torch.cat([so_far, meaning.expand_as(so_far)], 2)
        return {"logits": self.head(torch.tanh(self.decoder(both))), "meaning": meaning}


class Segmenter(nn.Module):
    """Classifies every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Conv2d(6, 4, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.norm(self.first(image)))
        return {"out": self.head(torch.relu(self.second(features)))}


class Perceptron(nn.Module):
    """Numbers in, numbers out."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, _WIDTH)
        self.second = nn.Linear(_WIDTH, _WIDTH)
        self.third = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, outputs)

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(numbers))))
        made: Tensor = self.head(torch.tanh(self.third(hidden)))
        return made


class TwoHeaded(nn.Module):
    """A classifier with a second head half-way, whose loss helps the first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, _WIDTH)
        self.aside = nn.Linear(_WIDTH, 3)
        self.second = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 3)

    def forward(self, numbers: Tensor) -> tuple[Tensor, tuple[Tensor, None]]:
        hidden = torch.tanh(self.first(numbers))
        aside = self.aside(hidden)
        return self.head(torch.tanh(self.second(hidden))), (aside, None)


class Scored(nn.Module):
    """Computes its own loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Perceptron(3)

    def forward(self, numbers: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(numbers)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Adapted(nn.Module):
    """A frozen layer, and beside it a trained product of two thin ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False)
        self.up = nn.Linear(2, outputs, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        made: Tensor = self.base(values) + self.up(self.down(values))
        return made


def language() -> nn.Module:
    return Words()


def translation() -> nn.Module:
    return Translator()


def segmentation() -> nn.Module:
    return Segmenter()


def multilabel() -> nn.Module:
    return Perceptron(5)


def regression() -> nn.Module:
    return Perceptron(1)


def auxiliary() -> nn.Module:
    return TwoHeaded()


def own_loss() -> nn.Module:
    return Scored()


def masked() -> nn.Module:
    return BERT(_WORDS, _LENGTH, 3, 2, _WIDTH, 3)


def lora() -> nn.Module:
    return nn.Sequential(Adapted(6, _WIDTH), nn.Tanh(), Adapted(_WIDTH, _WIDTH), nn.Tanh(), Adapted(_WIDTH, 3))


def tied() -> nn.Module:
    return GPT(_LENGTH, 3, 2, _WIDTH, _WORDS)


# Losses.


def per_word(outputs: Any, fields: Fields) -> Any:
    logits = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    targets = fields["targets"]
    total = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def masked_words(outputs: Any, fields: Any) -> Any:
    """Also Stagewright's: a loss that reads an input of the model."""
    mask, targets = fields["attention_mask"], fields["targets"].clamp(min=0)
    each = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return (each * mask).sum(), mask.sum()


def per_pixel(outputs: Any, fields: Fields) -> Any:
    total = functional.cross_entropy(outputs["out"], fields["label"], ignore_index=-100, reduction="sum")
    return total, (fields["label"] != -100).sum()


def weighted(outputs: Any, fields: Fields) -> Any:
    weights = torch.tensor([1.0, 3.0, 0.5], dtype=outputs.dtype)
    total = functional.cross_entropy(outputs, fields["label"], weights, reduction="sum")
    return total, weights[fields["label"]].sum()


def yes_or_no(outputs: Any, fields: Fields) -> Any:
    return functional.binary_cross_entropy_with_logits(outputs, fields["target"].to(outputs.dtype))


def squared(outputs: Any, fields: Fields) -> Any:
    return ((outputs[:, 0] - fields["target"]) ** 2).mean()


def both_heads(outputs: Any, fields: Any) -> Any:
    """Also Stagewright's: a user's own loss."""
    made, (aside, _) = outputs
    label = fields["label"]
    return functional.cross_entropy(made, label) + 0.3 * functional.cross_entropy(aside, label)


def returned(outputs: Any, fields: Fields) -> Any:
    return outputs["loss"]


def classified(outputs: Any, fields: Fields) -> Any:
    return functional.cross_entropy(outputs, fields["label"])


# Samples.


def _words(generator: torch.Generator) -> Tensor:
    return torch.randint(_WORDS, (SAMPLES, _LENGTH), generator=generator)


def _mask(generator: torch.Generator) -> Tensor:
    """Texts of 1 to 5 words; the first three samples all have one."""
    lengths = torch.randint(1, _LENGTH + 1, (SAMPLES, 1), generator=generator)
    lengths[:3] = 1
    return (torch.arange(_LENGTH) < lengths).long()


def _language(generator: torch.Generator) -> Fields:
    mask = _mask(generator)
    targets = _words(generator).masked_fill(mask == 0, -100)
    return {"input_ids": _words(generator), "attention_mask": mask, "targets": targets}


def _translation(generator: torch.Generator) -> Fields:
    targets = _words(generator).masked_fill(_mask(generator) == 0, -100)
    return {"source_ids": _words(generator), "target_ids": _words(generator)[:, :_LENGTH], "targets": targets}


def _segmentation(generator: torch.Generator) -> Fields:
    label = torch.randint(4, (SAMPLES, 6, 6), generator=generator)
    label[torch.rand(label.shape, generator=generator) < 0.3] = -100
    label[:12] = -100  # a batch in which nothing counts
    label[12:15] = -100  # and a microbatch
    return {"image": torch.randn(SAMPLES, 3, 6, 6, generator=generator), "label": label}


def _numbers(target: str) -> Callable[[torch.Generator], Fields]:
    def make(generator: torch.Generator) -> Fields:
        numbers = torch.randn(SAMPLES, 6, generator=generator)
        targets = {
            "label": {"label": torch.randint(3, (SAMPLES,), generator=generator)},
            "labels": {"labels": torch.randint(3, (SAMPLES,), generator=generator)},
            "several": {"target": (torch.rand(SAMPLES, 5, generator=generator) < 0.4).long()},
            "number": {"target": torch.randn(SAMPLES, generator=generator)},
        }
        return {"numbers": numbers, **targets[target]}

    return make


def _masked(generator: torch.Generator) -> Fields:
    label = torch.randint(3, (SAMPLES,), generator=generator)
    return {"input_ids": _words(generator), "attention_mask": _mask(generator), "label": label}


def _tied(generator: torch.Generator) -> Fields:
    targets = _words(generator).masked_fill(_mask(generator) == 0, -100)
    return {"input_ids": _words(generator), "targets": targets}


_DATA: dict[str, Callable[[torch.Generator], Fields]] = {
    "language": _language,
    "translation": _translation,
    "segmentation": _segmentation,
    "multilabel": _numbers("several"),
    "regression": _numbers("number"),
    "auxiliary": _numbers("label"),
    "own_loss": _numbers("labels"),
    "masked": _masked,
    "lora": _numbers("label"),
    "tied": _tied,
}
_BOTH = ("input_ids", "attention_mask")
TASKS = (
    Task("language", ("mix", "norm", "head"), _BOTH, per_word, "next-token", _BOTH),
    Task(
        "translation",
        ("encoder", "decoder", "head"),
        ("source_ids", "target_ids"),
        per_word,
        "next-token",
        ("source_ids", "target_ids"),
    ),
    Task("segmentation", ("norm", "second", "head"), ("image",), per_pixel),
    Task("multilabel", ("second", "third", "head"), ("numbers",), yes_or_no, "binary"),
    Task("regression", ("second", "third", "head"), ("numbers",), squared, "mse"),
    Task("auxiliary", ("aside", "second", "head"), ("numbers",), both_heads, "tests.tasks:both_heads"),
    Task(
        "own_loss",
        ("inner.second", "inner.third", "inner.head"),
        ("numbers", "labels"),
        returned,
        "model",
        ("numbers", "labels"),
    ),
    Task("masked", ("h.0", "h.1", "h.2"), _BOTH, classified, "auto", _BOTH),
    Task("lora", ("1", "2", "4"), ("numbers",), weighted, "cross-entropy", options={"class_weights": "1,3,0.5"}),
    Task("tied", ("h.0", "h.1", "ln_f"), ("input_ids",), per_word, "next-token", tie="wte.weight"),
)
