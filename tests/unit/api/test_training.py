"""The Python API: the command line's options as keywords."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stagewright


def make_net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )


def test_train_takes_options_as_keywords_and_returns_the_result(tmp_path: Path) -> None:
    result = stagewright.train(
        make_net, image=8, samples=96, placement="0:0-1.0:2", mode="stale", batch=16, steps=12, eval_every=6,
        optimizer="adamw", lr=0.01, emulate=True, runs=str(tmp_path), export=str(tmp_path / "out.safetensors"),
    )  # fmt: skip
    assert len(result.steps) == 12 and [evaluated.batch for evaluated in result.evaluations] == [6, 12]
    assert result.steps[-1].loss < result.steps[0].loss
    assert result.summary["plan"]["versions"] == [2, 1] and result.folder.parent == tmp_path
    make_net().load_state_dict(result.weights())
    (process,) = result.summary["use"]["ranks"]  # an emulated run is one process
    assert process["rank"] == 0 and process["peak_memory"] > 10 << 20 and result.summary["use"]["moments"] >= 2


def test_an_unknown_keyword_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'bacth'; did you mean 'batch'"):
        stagewright.train("vgg-small", bacth=3)


def test_weights_need_an_export(tmp_path: Path) -> None:
    result = stagewright.train(make_net, image=8, samples=16, batch=16, steps=1, emulate=True, runs=str(tmp_path))
    with pytest.raises(ValueError, match="export="):
        result.weights()
