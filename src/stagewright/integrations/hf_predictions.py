"""`compute_metrics` of transformers' Trainer, which takes all predictions at once, as a metric of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from stagewright.errors import UserError
from stagewright.model.networks.libraries import import_library

PREFIX = "eval_"  # of the names of metrics, so that none has a meaning of its own, as `perplexity` does
_POSITION = "sample_position"  # the field of a sample's number in an evaluation


class Predictions(Dataset[tuple[int, Any]]):
    """A dataset with numbered samples, and what compute_metrics makes of all predictions on it.

    It is a metric as an evaluation takes them, of totals and counts: those of all microbatches but the last are empty.
    """

    def __init__(
        self, data: Any, trainer: Any, collate: Callable[[Any], dict[str, Tensor]], ignored: Sequence[str] | None
    ) -> None:
        self._data, self._collate, self._labels = data, collate, trainer.label_names
        self._compute, self._preprocess = trainer.compute_metrics, trainer.preprocess_logits_for_metrics
        if ignored is None:
            ignored = getattr(getattr(trainer.model, "config", None), "keys_to_ignore_at_inference", None) or ()
        self._ignored = {"loss", *ignored}
        self._pieces: list[tuple[list[int], tuple[Tensor, ...], tuple[Tensor, ...]]] = []

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._data[index]

    def collated(self, samples: Sequence[tuple[int, Any]]) -> dict[str, Tensor]:
        stacked = self._collate([sample for _, sample in samples])
        return {**stacked, _POSITION: torch.tensor([number for number, _ in samples])}

    def __call__(self, outputs: Any, sample: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """Keep the predictions of a microbatch; with the last of them, the metrics of all."""
        numbers: list[int] = sample[_POSITION].tolist()
        if 0 in numbers:  # the first of an evaluation
            self._pieces.clear()
        labels = tuple(_on_host(sample[name]) for name in self._labels if name in sample)
        self._pieces.append((numbers, self._predictions(outputs, labels), labels))
        order = [number for piece in self._pieces for number in piece[0]]
        if len(order) < len(self):
            return {}
        places, (_, *kinds) = torch.tensor(order).argsort(), zip(*self._pieces, strict=True)
        predictions, label_ids = (
            tuple(torch.cat(parts)[places].numpy() for parts in zip(*kind, strict=True)) for kind in kinds
        )
        self._pieces.clear()
        kind = import_library("transformers").EvalPrediction
        measured = self._compute(kind(_single(predictions), _single(label_ids) if label_ids else None))
        return {f"{PREFIX}{name.removeprefix(PREFIX)}": (float(value), 1.0) for name, value in measured.items()}

    def _predictions(self, outputs: Any, labels: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if isinstance(outputs, Mapping):
            kept = [value for name, value in outputs.items() if name not in self._ignored and value is not None]
        else:
            kept = [outputs] if isinstance(outputs, Tensor) else [value for value in outputs if value is not None]
        kept = [value for value in kept if not isinstance(value, Tensor) or value.dim()]  # a loss is one number
        if not all(isinstance(value, Tensor) for value in kept):
            raise UserError("compute_metrics gets tensors; name the model's other outputs in ignore_keys")
        if self._preprocess is not None:
            made = self._preprocess(_single(kept), _single(labels) if labels else None)
            kept = list(made) if isinstance(made, tuple) else [made]
        return tuple(_on_host(value) for value in kept)


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _single(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
