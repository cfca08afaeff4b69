"""Trains a small GPT on a text file, byte by byte; its output layer and its token embedding are one parameter.

A group without weight decay, warm-up and cosine decay step by step, and gradient clipping are as in scripts for GPT-2.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, Subset

import stagewright
from stagewright.model.networks import zoo

HELD_BACK = 10  # each tenth piece of the text is for evaluation


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text that do not overlap: `context` bytes, and the byte that follows each of them."""

    def __init__(self, file: Path, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.bytes[index * self.context : (index + 1) * self.context + 1]
        return piece[:-1], piece[1:]


def loss(outputs: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), target.flatten())


def make_optimizer(named_parameters: Sequence[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices alone."""
    groups = [
        {"params": [p for _, p in named_parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named_parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95))


def make_scheduler(optimizer: torch.optim.Optimizer, warmup: int, steps: int) -> LambdaLR:
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))

    return LambdaLR(optimizer, factor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="gpt-mini", choices=["gpt-mini", "gpt-micro"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--precision", default="fp32", choices=["fp64", "fp32", "bf16", "fp16"])
    parser.add_argument("--weights", default="gpt.safetensors", help="file for the trained weights")
    parser.add_argument("--plan", help="a plan file, or auto: the fastest plan for this machine")
    args = parser.parse_args()

    torch.manual_seed(0)
    pieces = Bytes(args.text, zoo.ZOO[args.model].tokens or 1)
    train_set = Subset(pieces, [n for n in range(len(pieces)) if n % HELD_BACK])
    val_set = Subset(pieces, [n for n in range(len(pieces)) if n % HELD_BACK == 0])
    steps = len(train_set) // args.batch * args.epochs
    engine = stagewright.Engine(
        zoo.build(args.model),
        loss=loss,
        optimizer=partial(make_optimizer, lr=args.lr),
        scheduler=partial(make_scheduler, warmup=args.warmup, steps=steps),
        clip=1.0,
        precision=args.precision,
        plan=args.plan,
    )
    for epoch in range(args.epochs):
        for step in engine.epoch(train_set, args.batch):
            if engine.is_main and step.batch % 10 == 0:
                print(f"step {step.batch}: loss {step.loss:.3f}, rate {step.lr:.2g}")
        found = engine.evaluate(val_set, {"bits": lambda outputs, target: loss(outputs, target) / math.log(2)})
        if engine.is_main:
            print(f"epoch {epoch}: {found.metrics['bits']:.3f} bits per byte")
    engine.save(args.weights)


if __name__ == "__main__":
    main()
