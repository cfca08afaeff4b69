"""Checks before a run: devices, precisions, memory and evaluations, each error one line with both numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import ANYWHERE
from stagewright.config.toml import make_config
from stagewright.errors import UserError, within_memory
from stagewright.hardware.devices import require_cuda
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.planning.traced import chain_of
from stagewright.profile.profile import Profile, Table, Unit
from stagewright.run.defaults import resolve_model
from stagewright.run.prepare import memory_advice, prepare, require_devices
from stagewright.runtime.comm.device import gpu_of
from stagewright.runtime.comm.nccl import uses_nccl
from stagewright.runtime.precision import make_precision
from stagewright.runtime.process.assemble import image_workers
from stagewright.voice import Voice
from tests.commands import fails
from tests.pictures import make_ofrecord

_CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@_CPU_ONLY
def test_a_machine_without_gpus_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"--device cuda .* but torch .* sees no GPU; use") as caught:
        require_cuda()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cores", "placement", "data", "expected"),
    [
        (16, "0:0", {}, 15),
        (64, "0:0", {}, 16),
        (16, "0:0-2.0:3", {}, 4),  # three ranks load
        (16, "0:0-4", {}, 0),  # three cores each
        (16, "0:0-1.0:2", {"workers": 2}, 2),
        (16, "0:0", {"workers": 0}, 0),
        (16, "0:0", {"loader_threads": 4}, 0),
        (16, "0:0", {"image": 63}, 0),
        (16, "0:0", {"decode": "once"}, 0),
        (16, "0:0.1:0-7", {}, 15),
        (16, "0:0,1:0-7.1:8", {}, 15),  # one of nine ranks that load is on this machine
    ],
)
def test_processes_that_decode_share_the_cores_of_their_machine(
    cores: int, placement: str, data: dict[str, Any], expected: int
) -> None:
    config = make_config({"data": {"source": "folder:a", "image": 224, **data}})
    plan = make_plan(parse_placement(placement, ANYWHERE), batch=720, mode=Mode.STALE)
    assert image_workers(config, plan, 0, cores) == expected


def test_says_how_many_processes_decode_where_that_was_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    data = {"source": f"ofrecord:{make_ofrecord(tmp_path / 'data', 8, side=64)}", "image": 64}
    tables = {"model": {"name": "resnet8"}, "plan": {"placement": "0:0", "batch": 4}, "run": {"runs": str(tmp_path)}}
    said: list[str] = []
    for given in ({}, {"workers": 1}):
        prepare(make_config({**tables, "data": {**data, **given}}), Voice(note=said.append))
    assert [line for line in said if "--workers" in line] == [
        "each rank that loads images decodes them in 5 processes (--workers 0: in threads)"
    ]


def test_refuses_an_unknown_precision() -> None:
    with pytest.raises(ValueError, match="unknown precision"):
        make_precision("fp8", "cpu")


def _check(placement: str, gpus: int, monkeypatch: pytest.MonkeyPatch, **run: Any) -> list[str]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = make_config({"run": {"device": "cuda", **run}})
    warnings: list[str] = []
    plan = make_plan(parse_placement(placement), batch=64, mode=Mode.STALE)
    require_devices(config, plan, Voice(warnings.append))
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


def test_every_machine_of_nodes_needs_a_stage() -> None:
    tables = {"plan": {"placement": "0:0.0:1"}, "nodes": {"list": "10.0.0.1,10.0.0.2"}}
    with pytest.raises(UserError, match=r"machine 1 but placement 0:0\.0:1"):
        prepare(make_config(tables))


def test_a_run_with_a_profile_is_predicted_once(tmp_path: Path) -> None:
    chain = chain_of("resnet8", 10, 16)
    units = tuple(Unit(name, "linear", 1.0, 2.0, 9, 9, 9, 9, 9) for name in chain.units)
    table = Table("fp32", 2, units)
    Profile("resnet8", "cpu", "stagewright", (3, 16, 16), 1, None, (table,)).write(tmp_path / "p.json")
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": "resnet8"},
        "data": {"image": 16, "samples": 8},
        "plan": {"placement": "0:0", "batch": 8, "microbatches": 4, "profile": str(tmp_path / "p.json")},
        "run": {"steps": 1, "emulate": True, "runs": str(tmp_path)},
    }
    prepared = prepare(make_config(tables))
    assert prepared.prediction is not None and prepared.prediction.plan == prepared.job.plan
    assert prepared.prediction.images_per_second == pytest.approx(8 / (4 * 3 * len(units)), rel=0.01)
    tables["plan"]["profile"] = None
    assert prepare(make_config(tables)).prediction is None


def test_classes_are_only_assumed_for_a_loss_of_classes(tmp_path: Path) -> None:
    save_file({"images": torch.zeros(6, 3, 8, 8), "labels": torch.arange(6) % 3}, tmp_path / "data.safetensors")
    said = {}
    for loss in ("auto", "cross-entropy", "mse", "model"):
        assumed: list[str] = []
        tables = {"model": {"name": "tests.models:plain"}, "data": {"source": f"tensors:{tmp_path}/data.safetensors"}}
        config = make_config({**tables, "loss": {"name": loss}}, given=())
        said[loss] = (resolve_model(config, Voice(note=assumed.append)).model.classes, assumed)
    assert said["auto"] == said["cross-entropy"] == (3, ["3 classes"])
    assert said["mse"] == said["model"] == (10, [])
