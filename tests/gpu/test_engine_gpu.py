"""An engine on a GPU: alone as on the CPU, and over ranks that share the card as in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stagewright import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run on a machine with a GPU"),
]
STAGES = {"placement": "0:0-1.0:2", "cut": "3", "mode": "stale", "staleness": 1, "microbatches": 4}


def make_parts() -> tuple[nn.Module, TensorDataset]:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(1)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
        model = nn.Sequential(*layers, nn.Linear(8 * 64, 10))
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(64, 3, 12, 12, generator=generator)
    return model, TensorDataset(images, torch.randint(10, (64,), generator=generator))


def train(folder: Path, **options: Any) -> list[float]:
    model, data = make_parts()
    with Engine(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        runs=folder,
        **options,
    ) as engine:
        losses = [step.loss for _ in range(2) for step in engine.epoch(data, batch=16)]
        losses.append(engine.evaluate(data, metrics={"right": right}).metrics["right"])
        assert {parameter.device.type for parameter in model.parameters()} == {
            "cpu" if engine.plan.cuts else options["device"]
        }
    return losses


def right(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(1) == target).float().mean()


def test_alone_it_trains_as_on_the_cpu(tmp_path: Path) -> None:
    found = train(tmp_path, device="cuda", precision="ieee")
    assert found == pytest.approx(train(tmp_path, device="cpu"), rel=1e-3)


def test_options_of_speed_train_nearly_the_same(tmp_path: Path) -> None:
    plain = train(tmp_path, device="cuda", precision="ieee")
    for options in ({"precision": "bf16"}, {"precision": "bf16", "compile": True}, {"precision": "fp16"}):
        assert train(tmp_path, device="cuda", **options)[:8] == pytest.approx(plain[:8], rel=0.1)


SCRIPT = """
import json, sys
from pathlib import Path
from tests.gpu.test_engine_gpu import train

losses = train(Path(sys.argv[1]), device="cuda", precision="ieee", deterministic=True, **json.loads(sys.argv[2]))
Path(sys.argv[1], "losses.json").write_text(json.dumps(losses))
"""


def test_ranks_that_share_the_card_train_as_emulated_ones(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = []
    for options in ({"emulate": True}, {"share_gpu": True}):
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), json.dumps(STAGES | options)]
        here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, check=True, timeout=300, env=here)
        found.append(json.loads((tmp_path / "losses.json").read_text()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
