"""The losses of models that take samples of several fields, in plain PyTorch, each beside the `--loss` that it is.

`contrastive` is a user's own loss as well: `--loss benchmarks.models.objectives:contrastive`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.models.plain import Fields, Objective

CONTRASTIVE = f"{__name__}:contrastive"


def of_model(outputs: Any, fields: Fields) -> Any:
    """The loss that the model returns."""
    return outputs.loss


def classes(outputs: Any, fields: Fields) -> Any:
    """One label for each sample."""
    return cross_entropy(outputs.logits, fields["labels"])


def words(outputs: Any, fields: Fields) -> Any:
    """The total over all next words that count, and how many they are; `targets`, or the words shifted."""
    logits, targets = outputs.logits, fields.get("targets")
    if targets is None:
        logits, targets = logits[:, :-1], fields["labels"][:, 1:]
    total = cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def contrastive(outputs: Any, fields: Fields) -> Any:
    """CLIP's: each text belongs to one image of the microbatch, and each image to one text."""
    each = torch.arange(len(outputs.logits_per_text), device=outputs.logits_per_text.device)
    return (cross_entropy(outputs.logits_per_text, each) + cross_entropy(outputs.logits_per_image, each)) / 2


OBJECTIVES: dict[str, Objective] = {"auto": classes, "model": of_model, "next-token": words, CONTRASTIVE: contrastive}
