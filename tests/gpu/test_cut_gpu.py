"""Models that nobody here wrote, cut into stages on a GPU: equal to the CPU, in half precision, and compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stagewright.config.toml import make_config
from stagewright.run import train
from tests.traits import TRAITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run on a machine with a GPU"),
]

_EQUAL = (  # of each way of cutting, without draws: those differ between devices
    "no_grad in a block",
    "reentrant checkpoints behind a layer",
    "gradient reversal",
    "branch on a value inside blocks",
    "branch on a value between blocks",
    "try inside a block",
    "buffer copied into",
    "counter buffer",
    "full backward hooks on blocks",
    "weight_norm by hook",
)


def trained(name: str, folder: Path, **run: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and the losses of three steps in two stale stages."""
    trait = TRAITS[name]
    inputs, labels = trait.data(16)
    folder = folder / "-".join(f"{key}={value}" for key, value in run.items())
    folder.mkdir()
    save_file({"images": inputs.contiguous(), "labels": labels}, folder / "data.safetensors")
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": trait.model},
        "data": {"source": f"tensors:{folder / 'data.safetensors'}", "shuffle": False},
        "plan": {"placement": "0:0-1.0:2", "mode": "stale", "batch": 8, "microbatches": 4},
        "optimizer": {"lr": 0.05},
        "run": {"steps": 3, "emulate": True, "runs": str(folder), "export": str(folder / "w.safetensors")} | run,
    }
    result = train.run(make_config(tables, given=()))
    return load_file(folder / "w.safetensors"), [step.loss for step in result.steps]


@pytest.mark.parametrize("name", _EQUAL)
def test_a_cut_model_trains_on_a_gpu_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    on_cpu, _ = trained(name, tmp_path, device="cpu", precision="fp32")
    on_gpu, _ = trained(name, tmp_path, device="cuda", precision="ieee")
    assert on_cpu.keys() == on_gpu.keys()
    for key, expected in on_cpu.items():
        torch.testing.assert_close(on_gpu[key], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", _EQUAL[:4])
def test_a_cut_model_trains_in_half_precision(name: str, precision: str, tmp_path: Path) -> None:
    _, plain = trained(name, tmp_path, device="cuda", precision="fp32")
    _, half = trained(name, tmp_path, device="cuda", precision=precision)
    assert half == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("name", ["no_grad in a block", "branch on a value between blocks"])
def test_a_cut_model_trains_compiled(name: str, tmp_path: Path) -> None:
    _, plain = trained(name, tmp_path, device="cuda", precision="ieee")
    _, compiled = trained(name, tmp_path, device="cuda", precision="ieee", compile=True)
    assert compiled == pytest.approx(plain, rel=1e-4)
