"""Small models trained by plain PyTorch in one process, for the self-test to hold real ranks against.

It follows the rules of docs/design.md for one or two stages: with lag, the first stage computes each batch by the
weights before the last update; microbatches go to the replicas of a stage in turns, each has buffers of its own, and
at the end their statistics are averaged and their counts added. It imports nothing of the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stagewright.model.networks.zoo import build

SEED, CLASSES, RATE, MOMENTUM = 5, 10, 0.05, 0.9
PER_MICROBATCH = 4


@dataclass(frozen=True, slots=True)
class Task:
    """One batch of random samples, on which a model is trained some steps."""

    network: str
    microbatches: int
    steps: int
    replicas: int  # of the only stage; 1 where there are two
    lagging: str | None = None  # the module that the second stage begins with, where the first one lags
    device: str = "cpu"

    @property
    def samples(self) -> int:
        return PER_MICROBATCH * self.microbatches

    def data(self) -> dict[str, Tensor]:
        """Images or tokens, and labels."""
        generator = torch.Generator().manual_seed(1)
        if self.network.startswith("bert"):
            images = torch.randint(0, 256, (self.samples, 16), generator=generator)
        else:
            images = torch.randn(self.samples, 3, 32, 32, generator=generator)
        return {"images": images, "labels": torch.arange(self.samples) % CLASSES}


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss of every batch, and the weights at the end."""

    losses: Sequence[float]
    state: Mapping[str, Tensor]

    def difference(self, other: Trained) -> tuple[float, str]:
        """The largest relative difference, and where it is."""
        gaps = {"losses": _gap(torch.tensor(self.losses).double(), torch.tensor(other.losses).double())}
        for name, tensor in self.state.items():
            gaps[name] = _gap(tensor, other.state[name].to(tensor.device)) if name in other.state else float("inf")
        where = max(gaps, key=lambda name: gaps[name])
        return gaps[where], where


def _gap(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    distance = float(torch.linalg.vector_norm((one - other).double()))
    return distance / max(float(torch.linalg.vector_norm(one.double())), 1e-3) if distance == distance else float("inf")


def train_plain(task: Task) -> Trained:
    """Train in this process; on CPU in double precision, elsewhere in single."""
    dtype = torch.float64 if task.device == "cpu" else torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build(task.network, CLASSES).to(task.device, dtype).train()
    data = {name: tensor.to(task.device) for name, tensor in task.data().items()}
    images = data["images"].to(dtype) if data["images"].is_floating_point() else data["images"]
    weights = dict(model.named_parameters())
    lagging = _names_before(model, task.lagging, images[:PER_MICROBATCH]) if task.lagging else set()
    newest = {name: weight.detach().clone() for name, weight in weights.items()}
    before, velocity = newest, dict.fromkeys(weights, torch.zeros(()))
    buffers = [_buffers(model) for _ in range(task.replicas)]
    counts = torch.zeros(task.replicas, dtype=dtype, device=task.device)
    losses = []
    for step in range(task.steps):
        for name, weight in weights.items():
            weight.data.copy_((before if name in lagging else newest)[name])
            weight.grad = None
        total = 0.0
        for part in range(task.microbatches):
            samples = slice(part * PER_MICROBATCH, (part + 1) * PER_MICROBATCH)
            replica = (step * task.microbatches + part) % task.replicas
            model.load_state_dict(buffers[replica], strict=False)
            loss = cross_entropy(model(images[samples]), data["labels"][samples])
            (loss / task.microbatches).backward()  # type: ignore[no-untyped-call]
            buffers[replica] = _buffers(model)
            counts[replica] += 1
            total += loss.item()
        losses.append(total / task.microbatches)
        velocity = {name: MOMENTUM * velocity[name] + _gradient(weight) for name, weight in weights.items()}
        before, newest = newest, {name: newest[name] - RATE * velocity[name] for name in weights}
    together = {name: torch.stack([own[name] for own in buffers]) for name in buffers[0]}
    state = {name: _joined(name, tensors, counts) for name, tensors in together.items()}
    return Trained(losses, newest | state)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _joined(name: str, replicas: Tensor, counts: Tensor) -> Tensor:
    """A buffer of all replicas, by the microbatches that each has run."""
    if name.endswith("num_batches_tracked"):
        return replicas.sum(0)
    if name.endswith(("running_mean", "running_var")):
        mean: Tensor = torch.tensordot(counts, replicas, 1) / counts.sum()
        return mean
    return replicas[0]


def _names_before(model: nn.Module, module: str, images: Tensor) -> set[str]:
    """The weights of modules that have been called when one is called first."""
    called: list[str] = []
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, part in model.named_modules()
    ]
    buffers = _buffers(model)
    model(images)
    model.load_state_dict(buffers, strict=False)
    for hook in hooks:
        hook.remove()
    first = set(called[: called.index(module)])
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in first}
