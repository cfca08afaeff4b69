"""Replicas of a stage begin equal, whatever their factory draws, and a difference later is a fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stagewright.config.toml import make_config
from stagewright.errors import RunFailed
from stagewright.run.prepare import prepare
from stagewright.runtime.process.emulate import Emulation
from stagewright.runtime.stage import worker
from stagewright.runtime.stage.equality import hash_of


def unseeded() -> nn.Module:
    """Every process builds another model: numpy's own generator has no seed."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    generator = np.random.default_rng()
    with torch.no_grad():
        for tensor in (*model.parameters(), model[1].running_mean):
            tensor.copy_(torch.from_numpy(generator.normal(size=tuple(tensor.shape))))
    return model


def train(folder: Path) -> Emulation:
    save_file({"images": torch.randn(8, 6), "labels": torch.arange(8) % 3}, folder / "data.safetensors")
    tables = {
        "model": {"name": f"{__name__}:unseeded"},
        "data": {"source": f"tensors:{folder / 'data.safetensors'}"},
        "plan": {"placement": "0:0-1", "mode": "dp", "batch": 8},
        "checkpoint": {"every": 1},
        "run": {"steps": 2, "precision": "fp64", "runs": str(folder / "runs")},
    }
    emulation = Emulation(prepare(make_config(tables, given=())).job, lambda event: None)
    emulation.run()
    return emulation


def test_replicas_of_a_factory_that_no_seed_fixes_begin_equal(tmp_path: Path) -> None:
    weights = train(tmp_path).weights()
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values() if tensor.is_floating_point())


def test_unequal_replicas_are_a_fault_that_names_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "begin_equal", lambda replica: iter(()))
    with pytest.raises(RunFailed) as error:
        train(tmp_path)
    assert "rank 1" in str(error.value) and "rank 0" in str(error.value) and "batch" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_one_bit_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 38).to(dtype)
    before = hash_of([tensor])
    assert torch.equal(before, hash_of([tensor.clone()]))
    for place in (0, 17, 36):
        other = tensor.clone()
        other.view(torch.uint8)[place * other.itemsize] ^= 1
        assert not torch.equal(before, hash_of([other]))


def test_swapped_values_and_zeros_of_either_sign_change_the_hash() -> None:
    assert not torch.equal(hash_of([torch.tensor([1.0, 2.0])]), hash_of([torch.tensor([2.0, 1.0])]))
    assert not torch.equal(hash_of([torch.tensor([0.0])]), hash_of([torch.tensor([-0.0])]))
    assert not torch.equal(hash_of([torch.ones(2), torch.zeros(2)]), hash_of([torch.zeros(2), torch.ones(2)]))
