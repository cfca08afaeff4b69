"""How good logits are."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from stagewright.metrics import Score
from stagewright.runtime.replica import widened


def score_of(logits: Tensor, labels: Tensor) -> Score:
    """Samples, their losses, and the hits among the best one and five; a sample of many labels counts as one."""
    logits = widened(logits)
    best = (logits.topk(min(5, logits.shape[1]), 1).indices == labels.unsqueeze(1)).double()
    hits = best.flatten(2).mean(2) if best.dim() > 2 else best
    loss = float(functional.cross_entropy(logits, labels)) * len(labels)
    return Score(len(labels), loss, float(hits[:, 0].sum()), float(hits.sum()))
