"""What a user would run instead on one GPU: `python -m benchmarks.peers.plain_loop MODEL BATCH PRECISION STEPS`.

The usual loop with torch.compile, of the mode that may follow, channels last and fused SGD, on one batch that stays on
the card. It prints a line after its first steps, and images per second at the end. It imports nothing but what such a
script needs.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from statistics import median

import torch
from torch import nn
from torch.nn import functional

_FIRST = 10  # steps, which do not count
_PARTS = 5  # whose median counts


def main(name: str, batch: int, precision: str, steps: int, mode: str = "default") -> None:
    """Train a model."""
    torch.backends.cudnn.benchmark = True
    layout = torch.contiguous_format if name.startswith("vit") else torch.channels_last
    model = _model(name).cuda().train().to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, fused=True)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=layout)
    labels = torch.randint(1000, (batch,), device="cuda")
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=half is torch.float16)
    forward = torch.compile(model, mode=mode)

    def train(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast("cuda", half) if half else nullcontext():
                loss = functional.cross_entropy(forward(images), labels)  # type: ignore[no-untyped-call]
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        torch.cuda.synchronize()
        return count * batch / (time.perf_counter() - began)

    train(_FIRST)
    print(json.dumps(f"step {_FIRST}/{steps}"), flush=True)
    print(json.dumps(median(train((steps - _FIRST) // _PARTS) for _ in range(_PARTS))))


def _model(name: str) -> nn.Module:
    """As a user's script has it."""
    try:
        from torchvision import models
    except ImportError:
        sys.exit("the plain script has its models from torchvision, which is not installed; pip install torchvision")
    made: nn.Module = getattr(models, name)()
    return made


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
