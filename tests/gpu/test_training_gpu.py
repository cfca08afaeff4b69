"""Training on a GPU equals the CPU, one process, stock loss scaling, and stages that are not captured."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import HashStore
from torch.nn.functional import cross_entropy

from stagewright.api.training import train
from stagewright.config.sections import Config, RunConfig
from stagewright.data.order import Order
from stagewright.data.synthetic import SyntheticSource
from stagewright.errors import RunFailed
from stagewright.model.load import build_model
from stagewright.run.train import Result
from stagewright.runtime.comm.device import Gpu
from stagewright.runtime.comm.nccl import NcclCollective, NcclNetwork
from stagewright.runtime.comm.transport import Place, Solo
from stagewright.runtime.precision import make_precision
from stagewright.runtime.process.torch_flags import preserved_state, set_flags
from stagewright.runtime.stage.compute import ComputeOptions, make_compute
from stagewright.runtime.stage.replica import seed_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run on a machine with a GPU"),
]

_PLANS = {
    "2+1 stale": {"placement": "0:0-1.0:2", "mode": "stale"},
    "2-1 sync": {"placement": "0:0-1.0:2", "mode": "sync"},
    "3 dp": {"placement": "0:0-2", "mode": "dp"},
}


def run(folder: Path, model: str = "resnet8", **settings: Any) -> Result:
    defaults: dict[str, Any] = {
        "samples": 240,
        "batch": 48,
        "microbatches": 6,
        "steps": 6,
        "lr": 0.05,
        "placement": "0:0",
        "precision": "ieee",
        "device": "cuda",
        "share_gpu": not settings.get("emulate"),
        "runs": str(folder),
        "export": str(folder / f"{len(list(folder.iterdir()))}.safetensors"),
    }
    return train(model, **{name: value for name, value in {**defaults, **settings}.items() if value is not None})


def distance(some: Result, others: Result) -> float:
    """The distance between two runs' weights, relative to how far the first run moved them."""
    left, right = some.weights(), others.weights()
    config = tomllib.loads((some.folder / "config.toml").read_text())
    initial = build_model(config["model"]["name"], 0, 10).state_dict()
    names = [name for name in left if left[name].is_floating_point()]
    difference = sum(float((left[name].double() - right[name].double()).square().sum()) for name in names)
    moved = sum(float((left[name].double() - initial[name].double()).square().sum()) for name in names)
    return float((difference / moved) ** 0.5)


def is_same(some: Result, others: Result) -> bool:
    left, right = some.weights(), others.weights()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("plan", _PLANS)
def test_a_gpu_run_equals_a_cpu_run(plan: str, tmp_path: Path) -> None:
    options = {**_PLANS[plan], "emulate": True, "steps": 3, "lr": 0.01}
    on_cpu = run(tmp_path, device="cpu", **options)
    assert distance(on_cpu, run(tmp_path, **options)) < 1e-2


_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "groups": {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1, "no_decay": True, "group": ["fc.*:lr=5e-3"]},
    "own": {"optimizer": "torch.optim:NAdam", "lr": None},
    "rmsprop": {"optimizer": "rmsprop", "lr": 1e-3, "beta2": 0.9, "eps": 0.1},
    "lars": {"optimizer": "lars", "lr": 1.0, "weight_decay": 1e-4},
}


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_groups_and_a_users_optimizer_on_a_gpu_equal_those_on_a_cpu(optimizer: str, tmp_path: Path) -> None:
    """The CPU's equal plain PyTorch; a checkpoint keeps the state of a GPU's bit for bit."""
    options = {**_PLANS["2+1 stale"], "emulate": True, "steps": 4, **_OPTIMIZERS[optimizer]}
    assert distance(run(tmp_path, device="cpu", **options), run(tmp_path, **options)) < 3e-2
    options |= {"deterministic": True}
    whole = run(tmp_path, **options)
    begun = run(tmp_path, checkpoint_every=2, **(options | {"steps": 2}))
    assert is_same(whole, train(resume=str(begun.folder), steps=4, export=str(tmp_path / "resumed.safetensors")))


def test_ranks_that_share_a_gpu_equal_one_process(tmp_path: Path) -> None:
    options = {**_PLANS["2+1 stale"], "deterministic": True}
    emulated = run(tmp_path, "vgg-small", emulate=True, **options)
    real = run(tmp_path, "vgg-small", **options)
    assert distance(emulated, real) < 1e-3
    assert is_same(real, run(tmp_path, "vgg-small", **options))
    assert distance(real, run(tmp_path, "vgg-small", dynamic=True, **options)) < 1e-6


def test_captured_stages_equal_eager_ones(tmp_path: Path) -> None:
    options = {**_PLANS["2+1 stale"], "emulate": True, "deterministic": True}
    eager = run(tmp_path, "vgg-small", **options)
    assert distance(eager, run(tmp_path, "vgg-small", cuda_graph="on", **options)) < 1e-6


@pytest.mark.parametrize("changed", [{"cuda_graph": "on"}, {"precision": "fp16"}], ids=str)
def test_a_stage_without_trained_parameters_trains_on_a_gpu(changed: dict[str, Any], tmp_path: Path) -> None:
    options = {**_PLANS["2+1 stale"], "cut": "fc", "freeze": "!fc", "emulate": True, "deterministic": True}
    plain, other = run(tmp_path, **options), run(tmp_path, **options | changed)
    assert distance(plain, other) < (1e-6 if "cuda_graph" in changed else 1e-2)
    first = build_model("resnet8", 0, 10).state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in other.weights().items() if "fc" not in name)


def test_compiled_stages_equal_eager_ones_and_compile_once(tmp_path: Path) -> None:
    options = {"placement": "0:0.0:1", "mode": "stale", "emulate": True, "steps": 3, "lr": 0.01}
    eager = run(tmp_path, **options)
    torch._dynamo.reset()
    counters.clear()
    assert distance(eager, run(tmp_path, compile=True, **options)) < 1e-2
    assert counters["stats"]["unique_graphs"] == 3  # one per stage, however many versions, and one makes the images


@pytest.mark.parametrize(("graph", "precision"), [("on", "bf16"), ("auto", "fp16")])
def test_compiled_stages_are_replayed_and_not_compiled_again(
    graph: str, precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever auto decides, its numbers are those of a run without CUDA graphs."""
    options = {"emulate": True, "deterministic": True, "compile": True, "precision": precision, "microbatches": 2}
    torch._dynamo.reset()
    plain = run(tmp_path, cuda_graph="off", **options)
    torch._dynamo.reset()
    counters.clear()
    with caplog.at_level("INFO"):
        replayed = run(tmp_path, cuda_graph=graph, **options)
    assert distance(plain, replayed) < 1e-6
    assert counters["stats"]["unique_graphs"] == 2  # one makes the images
    (line,) = (message for message in caplog.messages if "CUDA graphs" in message)
    assert graph == "auto" or line.startswith("stage 0: CUDA graphs, ")


class Masked(nn.Module):
    """Has to wait for the GPU, to know how many rows are left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows)[rows.sum(1) > 0]


def test_auto_does_not_capture_what_waits_for_the_gpu(caplog: pytest.LogCaptureFixture) -> None:
    options = ComputeOptions(graph="auto")
    with (
        preserved_state([0]),
        mock.patch("stagewright.runtime.stage.compute.BUSY", float("inf")),
        caplog.at_level("INFO"),
    ):
        module = Masked().cuda()
        found = make_compute("stage 0", module, make_precision("fp32", "cuda"), Gpu(0), options)
        for _ in range(6):
            rows = torch.randn(16, 8, device="cuda")
            made, release = found.forward(0, [rows])
            assert torch.equal(made, module(rows))
            made.sum().backward()
            release()
    (line,) = caplog.messages
    assert "can't be captured" in line and not found.overwrites
    assert torch.cuda.get_sync_debug_mode() == 0 and torch.cuda.current_stream() == torch.cuda.default_stream()


def gradscaler(steps: int, scale: float, interval: int) -> tuple[dict[str, Tensor], list[float]]:
    """A loop as in torch's documentation: gradient accumulation, GradScaler, SGD."""
    model = build_model("resnet8", 0, 10).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=scale, growth_interval=interval)
    source = SyntheticSource(240, 10, 32, 0)
    order = Order(240, 48, 0, True)
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        scales.append(float(scaler.get_scale()))
        for microbatch in range(6):
            inputs, labels = source.batch(order.microbatch(step * 6 + microbatch, 6)).values()
            with torch.autocast("cuda", torch.float16):
                logits = model(inputs.cuda().contiguous(memory_format=torch.channels_last))
            scaler.scale(cross_entropy(logits.float(), labels.cuda()) / 6).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.state_dict(), scales


@pytest.mark.parametrize("placement", ["0:0", "0:0.0:1"])
def test_fp16_equals_gradscaler(placement: str, tmp_path: Path) -> None:
    scale = 2.0**24  # overflows at first
    options = {"placement": placement, "mode": "sync", "precision": "fp16", "deterministic": True, "steps": 12}
    result = run(tmp_path, emulate=True, loss_scale=scale, growth_interval=3, **options)
    with preserved_state([0]):
        set_flags(Config(run=RunConfig(device="cuda", precision="fp16", deterministic=True)))
        weights, scales = gradscaler(12, scale, 3)
    assert [step.loss_scale for step in result.steps] == scales
    assert min(scales) < scale and len(set(scales)) > 3
    skipped = sum(later < earlier for earlier, later in pairwise(scales))
    assert result.summary["skipped_updates"] == [skipped] * len(result.plan.stages)
    ours = result.weights()
    assert max(float((ours[name] - weights[name].cpu()).abs().max()) for name in ours) < 2e-3


_RATE = {"alexnet": 2e-4, "vgg16": 1e-4, "resnet50": 1e-3}
_STEPS = {"alexnet": 80, "vgg16": 110, "resnet50": 30}
_PRECISIONS = ("ieee", "fp32", "tf32", "bf16", "fp16")


def first_gradient(model: str, name: str) -> Tensor:
    """The flat gradient of the first batch in a plain loop."""
    precision = make_precision(name, "cuda")
    precision.set_flags()
    module = build_model(model, 0, None).cuda().to(memory_format=torch.channels_last).train()
    inputs, labels = SyntheticSource(64, 10, 224, 0).batch(Order(64, 32, 0, True).microbatch(0, 1)).values()
    torch.cuda.manual_seed(seed_of(0, 0, 0))
    with precision.forward_context():
        logits = module(inputs.cuda().contiguous(memory_format=torch.channels_last))
    (cross_entropy(logits.float(), labels.cuda()) * 1024.0).backward()
    return torch.cat([p.grad.flatten().cpu() / 1024.0 for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("model", _RATE)
def test_the_first_gradient_of_every_precision_is_near_fp32(model: str, tmp_path: Path) -> None:
    """The distance from fp32 depends on the model, so a plain loop sets the tolerance."""
    factory = f"tests.models:still_{model}"
    options: dict[str, Any] = {"batch": 32, "mode": "dp", "placement": "0:0", "microbatches": 1}
    options |= {
        "emulate": True,
        "samples": 64,
        "image": 224,
        "steps": 1,
        "lr": 1.0,
        "momentum": 0.0,
    }
    initial = build_model(factory, 0, None)
    weights_before = initial.state_dict()
    names = [name for name, _ in initial.named_parameters()]
    with preserved_state([0]):
        gradients = {precision: first_gradient(factory, precision) for precision in _PRECISIONS}
    exact = gradients["ieee"]
    for precision in _PRECISIONS:
        scale = {"loss_scale": 1024.0} if precision == "fp16" else {}
        weights = run(tmp_path, factory, precision=precision, **scale, **options).weights()
        ours = torch.cat([(weights_before[name] - weights[name]).flatten() for name in names])
        gap, usual = (float((gradient - exact).norm() / exact.norm()) for gradient in (ours, gradients[precision]))
        print(f"{model} {precision}: first gradient {gap:.1e} from ieee, in a plain loop {usual:.1e}")
        assert gap <= 1.5 * usual + 1e-3, (precision, gap, usual)


@pytest.mark.parametrize("model", _RATE)
def test_every_precision_learns(model: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 32, "mode": "sync", "placement": "0:0.0:0", "microbatches": 2, "classes": 10}
    options |= {"emulate": True, "samples": 64, "image": 128 if model == "alexnet" else 64}
    options |= {"steps": _STEPS[model], "optimizer": "adamw", "lr": _RATE[model], "warmup": 5}
    for precision in _PRECISIONS:
        losses = [step.loss for step in run(tmp_path, model, precision=precision, **options).steps]
        assert sum(losses[-8:]) < 0.7 * sum(losses[:8]), (precision, losses)


def test_a_sum_over_one_rank_of_nccl_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # which the network would set for good
    network = NcclNetwork(HashStore(), 0, Place(), 60, Gpu(0))
    collective = NcclCollective(network.group("all", (0,)), Solo())
    values = torch.arange(8.0, device="cuda")
    collective.sum(values).wait()
    assert values.tolist() == list(range(8))


def test_out_of_memory_is_a_one_line_error(tmp_path: Path) -> None:
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(0, free - 3 * 2**30), dtype=torch.uint8, device="cuda")
    message = r"stage 0 replica 0 \(rank 0.*out of GPU memory.*more needed.*free.*largest microbatch"
    with pytest.raises(RunFailed, match=message):
        run(tmp_path, "vgg16", batch=256, microbatches=1, placement="0:0", mode="dp", steps=1, image=224, samples=256)
    del held
