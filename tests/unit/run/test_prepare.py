"""Checks before a run: devices, precisions, memory and evaluations, each error one line with both numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.cluster.placement import parse_placement
from stagewright.config.toml import make_config
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.run.prepare import memory_advice, require_device_kind, require_devices, within_memory
from stagewright.runtime.comm.device import gpu_of
from stagewright.runtime.comm.nccl import uses_nccl
from stagewright.runtime.stage.precision import make_precision
from tests.commands import fails

_CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        pytest.param({"device": "cuda"}, r"--device cuda .* but torch .* sees no GPU; use", marks=_CPU_ONLY),
        ({"share_gpu": True}, "--share-gpu needs --device cuda, but the device is cpu"),
        ({"cuda_graph": "on"}, "--cuda-graph on needs --device cuda"),
        ({"compile": True, "cuda_graph": "on"}, "both --compile and --cuda-graph on were given"),
        ({"backend": "nccl"}, "--backend nccl needs --device cuda, but the device is cpu; use gloo"),
        ({"loss_scale": 0.5}, "--loss-scale is 0.5; give at least 1"),
        ({"growth_interval": 0}, "--growth-interval is 0; give at least 1"),
    ],
)
def test_options_that_the_machine_lacks_are_one_line(run: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        require_device_kind(make_config({"run": run}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("fp16", "fp16 needs a GPU, but the device is cpu"), ("tf32", "tf32 needs a GPU"), ("fp8", "unknown precision")],
)
def test_refuses_precisions_that_a_cpu_lacks(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_precision(name, "cpu")


def _check(placement: str, gpus: int, monkeypatch: pytest.MonkeyPatch, **run: Any) -> list[str]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = make_config({"run": {"device": "cuda", **run}})
    warnings: list[str] = []
    plan = make_plan(parse_placement(placement), batch=64, mode=Mode.STALE)
    require_devices(config, plan, warnings.append)
    return warnings


def test_refuses_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"device 0:4 but this machine has 4 GPUs \(0-3\); use --share-gpu"):
        _check("0:0-3.0:4", 4, monkeypatch)
    assert _check("0:0-3", 4, monkeypatch) == []


def test_warns_about_ranks_that_share_a_gpu_without_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (warning,) = _check("0:0-6.0:7", 1, monkeypatch, share_gpu=True)
    assert "8 ranks share GPU 0 and CUDA MPS is not running" in warning and "slower" in warning
    (tmp_path / "control").touch()
    assert _check("0:0-6.0:7", 1, monkeypatch, share_gpu=True) == []
    with pytest.raises(ValueError, match="nccl needs a GPU for each rank, but 8 ranks share GPU 0; use gloo"):
        _check("0:0-6.0:7", 1, monkeypatch, share_gpu=True, backend="nccl")
    assert [gpu_of(device, 3, share=True) for device in range(5)] == [0, 1, 2, 0, 1]


def test_nccl_is_for_ranks_with_a_gpu_each() -> None:
    def uses(**run: Any) -> bool:
        return uses_nccl(make_config({"run": run}))

    assert uses(device="cuda") and uses(device="cuda", backend="nccl")
    assert not (uses() or uses(device="cuda", share_gpu=True) or uses(device="cuda", backend="gloo"))


def test_advises_microbatches_that_fit_a_full_gpu() -> None:
    config = make_config({"model": {"name": "vgg16"}, "data": {"image": 224}})
    plan = make_plan(parse_placement("0:0"), batch=256, microbatches=1, mode=Mode.DP)
    fits = {gib: memory_advice(config, plan, 0, gib * 2**30) for gib in (1, 4, 16)}
    assert fits[1].startswith("no microbatch should fit")
    sizes = [int(fits[gib].partition(":")[0].rpartition(" ")[2]) for gib in (4, 16)]
    assert sizes[0] < sizes[1] <= 128
    assert fits[4].endswith(f"--microbatches {256 // sizes[0]}")


def test_running_out_of_memory_is_one_line() -> None:
    with (
        pytest.raises(ValueError, match=r"--image 65536, --batch 8; reduce the largest"),
        within_memory(image=65536, batch=8),
    ):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="another"), within_memory(image=1):
        raise RuntimeError("another")


def test_too_many_evaluations_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--model", "resnet8", "--emulate", "--batch", "8", "--samples", "16", "--eval-every", "1")
    assert "give at least 1000" in fails(capsys, "train", *common, "--steps", "1000000000")
