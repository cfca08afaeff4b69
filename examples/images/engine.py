"""Trains a ResNet to tell drawn shapes apart: `plain.py`, over stages."""

import argparse
import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

import stagewright

CLASSES = 4


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noisy images of stars with one to four points."""

    def __init__(self, samples: int, size: int, seed: int) -> None:
        self.samples, self.size, self.seed = samples, size, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * self.samples + index)
        label = index % CLASSES
        turn = 2 * math.pi * float(torch.rand((), generator=generator))
        y, x = torch.meshgrid(*[torch.linspace(-1, 1, self.size)] * 2, indexing="ij")
        edge = 0.55 + 0.25 * torch.cos((label + 1) * torch.atan2(y, x) + turn)
        shape = (torch.hypot(x, y) < edge).float().expand(3, -1, -1)
        return shape + 0.3 * torch.randn(3, self.size, self.size, generator=generator), label


class Block(nn.Module):
    """Two convolutions beside a shortcut, at half the resolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(inner + self.shortcut(x))


def make_model(width: int) -> nn.Module:
    blocks = [Block(3, width), Block(width, 2 * width), Block(2 * width, 4 * width)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


def top1(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--size", type=int, default=64, help="pixels")
    parser.add_argument("--width", type=int, default=32, help="channels of the first block")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--weights", default="best.safetensors", help="file for the best weights")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_set, val_set = Shapes(args.samples, args.size, 1), Shapes(args.samples // 4, args.size, 2)
    model = make_model(args.width)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    sgd = partial(torch.optim.SGD, lr=args.lr, momentum=0.9, weight_decay=5e-4)
    engine = stagewright.Engine(model, loss=criterion, optimizer=sgd)
    scheduler = CosineAnnealingLR(engine.optimizer, args.epochs)

    best = 0.0
    for epoch in range(args.epochs):
        for step in engine.epoch(train_set, args.batch):
            loss = step.loss
        scheduler.step()
        accuracy = engine.evaluate(val_set, {"top1": top1}).metrics["top1"]
        if engine.is_main:
            print(f"epoch {epoch}: loss {loss:.3f}, top1 {accuracy:.1%}")
        if accuracy > best:
            best = accuracy
            engine.save(args.weights)


if __name__ == "__main__":
    main()
