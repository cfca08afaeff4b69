"""A parameter that no backward of a batch reached is left alone in it, as one without a gradient is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stagewright.config.toml import make_config
from stagewright.model.load import build_model
from stagewright.run.train import run as train

BATCH, STEPS = 8, 4


class Either(nn.Module):
    """The sign of the inputs decides which of two layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.positive(x) if float(x.sum()) > 0 else self.negative(x)))


def data() -> tuple[Tensor, Tensor]:
    """Batches of positive and of negative inputs in turns; a batch of both at the end."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(STEPS * BATCH, 6, generator=generator) + 0.1
    inputs[BATCH : 2 * BATCH] *= -1
    inputs[-BATCH // 2 :] *= -1
    return inputs, torch.randint(3, (len(inputs),), generator=generator)


def run(
    folder: Path, placement: str, optimizer: str, steps: int = STEPS, resume: str | None = None
) -> dict[str, Tensor]:
    inputs, labels = data()
    save_file({"images": inputs, "labels": labels}, folder / "data.safetensors")
    tables = {
        "model": {"name": f"{__name__}:Either"},
        "data": {"source": f"tensors:{folder / 'data.safetensors'}", "shuffle": False},
        "plan": {"placement": placement, "mode": "dp", "batch": BATCH, "microbatches": 4},
        "optimizer": {"name": optimizer, "lr": 0.05, "weight_decay": 0.1},
        "checkpoint": {"every": 2},
        "run": {
            "steps": steps,
            "seed": 3,
            "precision": "fp64",
            "runs": str(folder / "runs"),
            "resume": resume,
            "emulate": True,
            "export": str(folder / "weights.safetensors"),
        },
    }
    return load_file(train(make_config(tables)).exported or "")


def plain(optimizer: str) -> dict[str, Tensor]:
    model = build_model(f"{__name__}:Either", 3, None, torch.float64)
    rule: torch.optim.Optimizer
    if optimizer == "adamw":
        rule = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    else:
        rule = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1, momentum=0.9)
    inputs, labels = data()
    for batch in range(STEPS):
        rule.zero_grad(set_to_none=True)
        for part in range(4):
            rows = slice(batch * BATCH + 2 * part, batch * BATCH + 2 * part + 2)
            (cross_entropy(model(inputs[rows].double()), labels[rows]) / 4).backward()
        rule.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("placement", ["0:0", "0:0-1"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equals_an_optimizer_that_sees_no_gradient(optimizer: str, placement: str, tmp_path: Path) -> None:
    actual = run(tmp_path, placement, optimizer)
    for name, tensor in plain(optimizer).items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resumes_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", "0:0-1", optimizer)
    run(tmp_path / "parts", "0:0-1", optimizer, steps=2)
    (folder,) = (tmp_path / "parts" / "runs").iterdir()
    resumed = run(tmp_path / "parts", "0:0-1", optimizer, resume=str(folder))
    assert all(torch.equal(whole[name], tensor) for name, tensor in resumed.items())
