"""Devices that are not there, and what goes with them: one line with both numbers and the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.cluster.placement import parse_placement
from stagewright.config.toml import make_config
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.planning.build import make_plan_for
from stagewright.run.prepare import memory_advice, require_device_kind, require_devices
from stagewright.runtime.comm.device import gpu_of
from stagewright.runtime.comm.nccl import uses_nccl
from stagewright.runtime.stage.precision import make_precision

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
def test_what_the_machine_lacks_is_one_line(run: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        require_device_kind(make_config({"run": run}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("fp16", "fp16 needs a GPU, but the device is cpu"), ("tf32", "tf32 needs a GPU"), ("fp8", "unknown precision")],
)
def test_precisions_that_a_cpu_lacks(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_precision(name, "cpu")


def _check(placement: str, gpus: int, monkeypatch: pytest.MonkeyPatch, **run: Any) -> list[str]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = make_config({"run": {"device": "cuda", **run}})
    warnings: list[str] = []
    plan = make_plan(parse_placement(placement), batch=64, mode=Mode.STALE)
    require_devices(config, plan, warnings.append)
    return warnings


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"device 0:4 but this machine has 4 GPUs \(0-3\); use --share-gpu"):
        _check("0:0-3.0:4", 4, monkeypatch)
    assert _check("0:0-3", 4, monkeypatch) == []


def test_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"mode": "pipedream", "placement": "0:0.0:1"}, "fp16 goes with sync, stale and dp, but the mode is pipedream"),
        ({"placement": "0:0-3.0:4", "microbatches": 2}, "a microbatch for each of the 4 replicas, but a batch has 2"),
    ],
)
def test_plans_that_fp16_can_not_have(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan_for(make_config({"plan": plan, "run": {"precision": "fp16"}}), None)


def test_what_stages_tell_each_other_in_fp16() -> None:
    def told(mode: str, placement: str) -> tuple[bool, bool]:
        tables = {"plan": {"mode": mode, "placement": placement}, "run": {"precision": "fp16"}}
        plan = make_plan_for(make_config(tables), None)
        return plan.agree, plan.flags

    assert told("sync", "0:0.0:1") == (True, False)
    assert told("stale", "0:0.0:1") == (False, True)
    assert told("dp", "0:0-1") == (False, False)


def test_advice_for_a_full_gpu() -> None:
    config = make_config({"model": {"name": "vgg16"}, "data": {"image": 224}})
    plan = make_plan(parse_placement("0:0"), batch=256, microbatches=1, mode=Mode.DP)
    fits = {room: memory_advice(config, plan, 0, room * 2**30) for room in (1, 4, 16)}
    assert fits[1].startswith("no microbatch should fit")
    sizes = [int(fits[room].partition(":")[0].rpartition(" ")[2]) for room in (4, 16)]
    assert sizes[0] < sizes[1] <= 128
    assert fits[4].endswith(f"--microbatches {256 // sizes[0]}")
