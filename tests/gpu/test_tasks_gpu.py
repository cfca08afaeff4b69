"""Samples of several fields, losses that count, and ties on a GPU: equal to the CPU, in half precision, compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stagewright.config.toml import make_config
from stagewright.run import train
from tests.tasks import TASKS, Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run on a machine with a GPU"),
]

_DRAWING = ("language",)  # random numbers differ between devices
_SAME = [task for task in TASKS if task.name not in _DRAWING]
_FEW = [task for task in TASKS if task.name in ("segmentation", "masked", "tied")]


def trained(task: Task, folder: Path, mode: str = "sync", **run: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and the losses of three steps in two stages."""
    folder = folder / "-".join(f"{key}={value}" for key, value in run.items())
    folder.mkdir()
    save_file(task.data(), folder / "data.safetensors")
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": f"tests.tasks:{task.name}"},
        "data": {"source": f"tensors:{folder / 'data.safetensors'}", "shuffle": False},
        "loss": {"name": task.option, **(task.options or {})},
        "plan": {"placement": "0:0-1.0:2", "mode": mode, "cut": task.cut[1], "batch": 12, "microbatches": 4},
        "optimizer": {"lr": 0.05, "clip": 1.0},
        "run": {"steps": 3, "emulate": True, "runs": str(folder), "export": str(folder / "w.safetensors")} | run,
    }
    result = train.run(make_config(tables, given=()))
    return load_file(folder / "w.safetensors"), [step.loss for step in result.steps]


@pytest.mark.parametrize("task", _SAME, ids=str)
def test_a_task_trains_on_a_gpu_as_on_the_cpu(task: Task, tmp_path: Path) -> None:
    on_cpu, plain = trained(task, tmp_path, "stale", device="cpu", precision="fp32")
    on_gpu, losses = trained(task, tmp_path, "stale", device="cuda", precision="ieee")
    assert losses == pytest.approx(plain, rel=1e-4)
    assert on_cpu.keys() == on_gpu.keys()
    for name, expected in on_cpu.items():
        torch.testing.assert_close(on_gpu[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("task", _FEW, ids=str)
def test_a_task_trains_in_half_precision(task: Task, precision: str, tmp_path: Path) -> None:
    _, plain = trained(task, tmp_path, device="cuda", precision="fp32")
    _, half = trained(task, tmp_path, device="cuda", precision=precision, loss_scale=64.0)
    assert half == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize("task", _FEW, ids=str)
def test_a_task_trains_compiled_and_replayed(task: Task, graph: str, tmp_path: Path) -> None:
    _, plain = trained(task, tmp_path, device="cuda", precision="ieee")
    _, other = trained(
        task, tmp_path, device="cuda", precision="ieee", compile=graph == "off", cuda_graph=graph, steps=3
    )
    assert other == pytest.approx(plain, rel=1e-4)


def test_real_ranks_on_one_gpu_train_a_tied_model_as_emulated_ones(tmp_path: Path) -> None:
    (task,) = (task for task in TASKS if task.name == "tied")
    emulated, _ = trained(task, tmp_path, "stale", device="cuda", precision="ieee", deterministic=True)
    real, _ = trained(
        task, tmp_path, "stale", device="cuda", precision="ieee", emulate=False, share_gpu=True, backend="gloo"
    )
    for name, expected in emulated.items():
        torch.testing.assert_close(real[name], expected, rtol=1e-4, atol=1e-5)
