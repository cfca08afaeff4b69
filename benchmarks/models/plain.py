"""A model trained as its author's own module in one process of plain PyTorch, to compare pipelines with.

It calls the module as it is: parameters keep their identity, and what is no registered parameter or buffer (a list of
tensors, a counter) does what it does in any script. It imports nothing of the runtime; the rules it follows (which
version a microbatch sees, what seeds a stage, whose buffers a replica moves, how tied parameters lag, how totals and
counts add up) are those of docs/design.md. It handles batches of one length and SGD with momentum alone.

Random numbers. A run seeds the generators before each stage, so this side seeds them too where a later stage begins: at
the first call of the module that the cut names or, cut between blocks, when the block before it has returned. A cut
that names no module leaves this side's draws unlike the run's; `Cut.starts` says None there, and a model that draws
behind it can't be compared.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

Fields = Mapping[str, Tensor]
Objective = Callable[[Any, Fields], Any]  # a mean over a microbatch, or a total and its count
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
_MOMENTUM = 0.9


@dataclass(frozen=True)
class Cut:
    """Where a model is cut: the unit each later stage begins with, and the module whose call that is, if it is one.

    Cut between blocks, a stage begins when the block before its first has returned; that is the one that `starts` has.
    """

    units: tuple[str, ...] = ()
    starts: tuple[str | None, ...] = ()
    is_between_blocks: bool = False

    @property
    def is_seeded(self) -> bool:
        """Whether the plain side can seed every stage as a run does."""
        return None not in self.starts


UNCUT = Cut()


def classified(outputs: Any, fields: Fields) -> Any:
    """The loss of a task that names none."""
    return cross_entropy(outputs, fields["labels"])


@dataclass(frozen=True)
class Task:
    """What is trained: a model that `--model` can name, its data, and how.

    Data is one tensor and its labels, or samples' fields by name; `takes` then has, for each of forward's parameters
    that gets one, its field. A single one goes by position. `loss` is `--loss`, and `objective` the same in plain
    PyTorch.
    """

    model: str
    factory: Callable[[], Any]
    inputs: Tensor | Fields
    labels: Tensor | None = None
    placement: str = "0:0.0:1.0:2.0:3"
    mode: str = "sync"
    batch: int = 8
    microbatches: int = 4
    steps: int = 3
    seed: int = 5
    precision: str = "fp64"
    lr: float = 0.05
    weight_decay: float = 0.0
    evaluates: bool = False
    takes: Mapping[str, str] = field(default_factory=dict)
    loss: str = "auto"
    objective: Objective = classified

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.precision]

    @property
    def data(self) -> dict[str, Tensor]:
        """The samples' fields."""
        if not isinstance(self.inputs, Tensor):
            return dict(self.inputs)
        return {"images": self.inputs} | ({} if self.labels is None else {"labels": self.labels})

    @property
    def fields(self) -> dict[str, Tensor]:
        """The samples' fields, in the run's precision."""
        return {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in self.data.items()}

    def call(self, model: nn.Module, fields: Fields) -> Any:
        """Call a model with copies of what it takes."""
        given = {parameter: fields[name].clone() for parameter, name in (self.takes or {"": "images"}).items()}
        return model(*given.values()) if len(given) == 1 else model(**given)

    @property
    def replicas(self) -> tuple[int, ...]:
        ranges = [stage.rpartition(":")[2].partition("-") for stage in self.placement.split(".")]
        return tuple(1 + int(last or first) - int(first) for first, _, last in ranges)

    @property
    def versions(self) -> tuple[int, ...]:
        """K of every stage: in stale mode with `--staleness 1`."""
        stages = len(self.replicas)
        return tuple(min(stages - s, 2) if self.mode == "stale" else 1 for s in range(stages))


@dataclass
class Outcome:
    """Losses of every batch, all tensors of the state, and the sum of the losses in evaluation."""

    losses: list[float]
    state: dict[str, Tensor]
    unmoved: frozenset[str] = frozenset()  # tensors that training left as they were
    score: float | None = None
    model: nn.Module | None = field(default=None, repr=False)  # the author's, to look at what is no tensor
    way: str = ""  # how a pipeline was cut


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def build(task: Task) -> nn.Module:
    """The author's model with its first weights, in the run's precision; only fp32 tensors are converted."""
    seed_all(task.seed)
    made = task.factory()
    model = made if isinstance(made, nn.Module) else nn.Sequential(*made)
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        with torch.no_grad():
            task.call(model, _some(task.data, slice(task.batch // task.microbatches)))
    dtype = task.dtype
    return model if dtype == torch.float32 else model.to(dtype)


def train(task: Task, cut: Cut = UNCUT) -> Outcome:
    """Train the author's module; stage s > 0 begins with the first call of `cut.starts[s - 1]`, or its end."""
    with kept_randomness():
        return _train(task, cut)


def _train(task: Task, cut: Cut) -> Outcome:
    size = task.batch // task.microbatches
    data = task.fields
    num_samples = len(next(iter(data.values())))
    homes = uses(build(task), partial(task.call, fields=_some(data, slice(size))), cut)
    model = build(task).train()
    first_state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    begin = _seed_stages(model, cut, task.seed)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    history = {name: [p.detach().clone()] for name, p in parameters.items()}
    velocities: dict[str, Tensor] = {}
    replicas = Replicas(model, homes, task.replicas)

    versions = list(task.versions)
    for name in [*parameters, *parameters]:  # stages that share a parameter have the largest K of theirs
        shared = homes.users.get(name, set())
        versions = [max(versions[s] for s in shared) if stage in shared else k for stage, k in enumerate(versions)]

    def lag(name: str) -> int:
        return versions[homes.tensors.get(name, 0)] - 1

    losses = []
    for p in range(task.steps):
        first = p * task.batch % (num_samples - num_samples % task.batch)
        total, count = 0.0, 0.0
        for m in range(task.microbatches):
            i = p * task.microbatches + m
            for name, parameter in parameters.items():
                if lag(name):
                    parameter.data.copy_(history[name][max(0, p - lag(name))])
            replicas.enter(i)
            fields = _some(data, slice(first + m * size, first + (m + 1) * size))
            begin(i)
            loss, targets = _measured(task.objective(task.call(model, fields), fields))
            (loss / task.microbatches if targets is None else loss).backward()
            replicas.leave(i)
            total += loss.item()
            count += 1.0 if targets is None else targets
        losses.append(total / count if count else 0.0)
        divisor = 1.0 if targets is None else count  # a mean is divided already
        for name, parameter in parameters.items():
            newest = history[name][-1] if lag(name) else parameter.detach().clone()  # which forward may have changed
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                gradient = gradient.detach() / divisor if divisor else torch.zeros_like(gradient)
                newest, velocities[name] = _sgd(task, newest, gradient, velocities.get(name))
            history[name].append(newest)
            parameter.data.copy_(newest)
            parameter.grad = None
    replicas.average()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    score = _score(task, model, data, size) if task.evaluates else None
    unmoved = frozenset(name for name, tensor in state.items() if torch.equal(tensor, first_state[name]))
    return Outcome(losses, state, unmoved, score, model)


def _some(fields: Fields, samples: slice) -> dict[str, Tensor]:
    return {name: tensor[samples] for name, tensor in fields.items()}


def _measured(made: Any) -> tuple[Any, float | None]:
    loss, count = made if isinstance(made, tuple) else (made, None)
    return loss, None if count is None else float(count)


def _score(task: Task, model: nn.Module, data: Fields, size: int) -> float:
    """The sum of the losses in evaluation."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        num_samples = len(next(iter(data.values())))
        for first in range(0, num_samples, size):
            fields = _some(data, slice(first, first + size))
            loss, count = _measured(task.objective(task.call(model, fields), fields))
            total += float(loss) * (min(size, num_samples - first) if count is None else 1)
    return total


@contextmanager
def kept_randomness() -> Iterator[None]:
    """Leave the generators of all random numbers as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _sgd(task: Task, weight: Tensor, gradient: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor]:
    """torch.optim.SGD's update."""
    gradient = gradient + task.weight_decay * weight
    velocity = gradient if velocity is None else _MOMENTUM * velocity + gradient
    return weight - task.lr * velocity, velocity


def stage_seed(seed: int, microbatch: int, stage: int) -> int:
    """The seed of the generators before a stage runs forward on a microbatch."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{microbatch}/{stage}".encode()).digest()[:8], "little")


def _at_starts(model: nn.Module, cut: Cut, begin: Callable[[int], None]) -> None:
    """Call `begin` with the number of a later stage wherever a call of the module at its start begins, or ends."""
    for stage, name in enumerate(cut.starts, start=1):
        if name is None:
            continue
        module = model.get_submodule(name)
        if cut.is_between_blocks:
            module.register_forward_hook(lambda *_, stage=stage: begin(stage))
        else:
            module.register_forward_pre_hook(lambda *_, stage=stage: begin(stage), prepend=True)


def _seed_stages(model: nn.Module, cut: Cut, seed: int) -> Callable[[int], None]:
    """A function to call before every forward; later stages are seeded where they begin.

    The recomputation of an activation checkpoint is seeded again, as the forward was.
    """
    seeds: dict[int, int] = {}
    begun: set[int] = set()

    def begin_stage(stage: int) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        if stage not in begun or is_recomputed:
            begun.add(stage)
            seed_all(seeds[stage])

    _at_starts(model, cut, begin_stage)

    def begin(microbatch: int) -> None:
        begun.clear()
        seeds.update({stage: stage_seed(seed, microbatch, stage) for stage in range(len(cut.starts) + 1)})
        seed_all(seeds[0])

    return begin


class _Uses(TorchFunctionMode):
    """Notes the stages in which each of some tensors is an argument of a torch function."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.stage = 0
        self.found: dict[str, set[int]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Reading an attribute of a tensor, as Module.__call__ and autograd do, is no use of it.
        if getattr(function, "__name__", "") not in ("__get__", "requires_grad_", "register_hook"):
            self._note((args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if (name := self.names.get(id(value))) is not None:
                self.found.setdefault(name, set()).add(self.stage)
        elif isinstance(value, tuple | list):
            for each in value:
                self._note(each)
        elif isinstance(value, dict):
            self._note(list(value.values()))


@dataclass(frozen=True)
class Homes:
    """The stage that uses each tensor first, and in which each module is called first; what is unused is left out."""

    tensors: Mapping[str, int]
    modules: Mapping[str, int]
    users: Mapping[str, set[int]]  # every stage that uses a tensor


def uses(model: nn.Module, forward: Callable[[nn.Module], Any], cut: Cut) -> Homes:
    """What each stage uses, found in one forward; what it does not reach belongs where the module around it is."""
    named = [*model.named_parameters(), *model.named_buffers()]
    mode = _Uses({id(tensor): name for name, tensor in named})
    called: dict[str, int] = {}

    def begin(stage: int) -> None:
        mode.stage = max(mode.stage, stage)

    def note(name: str, *_: object) -> None:
        called.setdefault(name, mode.stage)

    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(partial(note, name), prepend=True)
    _at_starts(model, cut, begin)
    with mode:
        forward(model.train())
    tensors = {}
    for name, _ in named:
        owner = name.rpartition(".")[0]
        while owner and owner not in called:
            owner = owner.rpartition(".")[0]
        if owner in called and (owner or "." not in name):
            tensors[name] = called[owner]
    return Homes(tensors | {name: min(stages) for name, stages in mode.found.items()}, called, mode.found)


@dataclass
class State:
    """What one replica of a stage has for itself: its buffers, and the attributes of its modules by (module, name)."""

    buffers: dict[str, Tensor]
    attributes: dict[tuple[str, str], Any]


class Replicas:
    """Every replica's state, put into the model before a microbatch that the replica runs."""

    def __init__(self, model: nn.Module, homes: Homes, replicas: Sequence[int]) -> None:
        self.model = model
        self.homes = homes
        self.counts = [[0] * count for count in replicas]
        self.own = [
            [deepcopy(self._state(stage)) for _ in range(count if count > 1 else 0)]
            for stage, count in enumerate(replicas)
        ]

    def _state(self, stage: int) -> State:
        homes = self.homes
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if homes.tensors.get(name, 0) == stage}
        attributes = {
            (owner, name): value
            for owner, module in self.model.named_modules()
            for name, value in vars(module).items()
            if homes.modules.get(owner) == stage and _is_state(name, value)
        }
        return State(buffers, attributes)

    def enter(self, microbatch: int) -> None:
        for states in self.own:
            if states:
                self._put(states[microbatch % len(states)])

    def leave(self, microbatch: int) -> None:
        for stage, states in enumerate(self.own):
            self.counts[stage][microbatch % len(self.counts[stage])] += 1
            if states:
                states[microbatch % len(states)] = self._state(stage)

    def average(self) -> None:
        """The mean of statistics weighted by microbatches, the sum of their counts, and the first replica's others."""
        for states, counts in zip(self.own, self.counts, strict=True):
            if not states:
                continue
            first = State(dict(states[0].buffers), states[0].attributes)
            for name in first.buffers:
                own = [state.buffers[name] for state in states]
                kind = name.rpartition(".")[2]
                if kind in ("running_mean", "running_var"):
                    weighted = [count * tensor for count, tensor in zip(counts, own, strict=True)]
                    first.buffers[name] = torch.stack(weighted).sum(0) / sum(counts)
                elif kind == "num_batches_tracked":
                    first.buffers[name] = torch.stack(own).sum(0)
            self._put(first)

    def _put(self, state: State) -> None:
        for name, tensor in state.buffers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, tensor)
        for (owner, attribute), value in state.attributes.items():
            setattr(self.model.get_submodule(owner), attribute, value)


def _is_state(name: str, value: object) -> bool:
    """Whether an attribute may be state of a forward's own; replicas of the plain side share all others."""
    if name.startswith("_") or name == "training" or (isinstance(value, Tensor) and value.requires_grad):
        return False
    return isinstance(value, int | float | Tensor | dict | torch.Generator | np.random.Generator)


def even_cut(model: nn.Module, units: Sequence[str], stages: int, impossible: Collection[str] = ()) -> Cut:
    """Cuts near equal numbers of units, each at the nearest unit that is a module's call, where there is one."""
    modules = {name for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule)}
    chosen: list[int] = []
    for stage in range(1, stages):
        wanted = len(units) * stage // stages
        first = chosen[-1] + 1 if chosen else 1
        rest = [index for index in range(first, len(units)) if units[index] not in impossible]
        if not rest:
            break
        named = [index for index in rest if units[index] in modules]
        room = [index for index in named if len(units) - index >= stages - stage]
        chosen.append(min(room or rest, key=lambda index: abs(index - wanted)))
    return Cut(
        tuple(units[index] for index in chosen),
        tuple(units[index] if units[index] in modules else None for index in chosen),
    )


def cut_between_blocks(blocks: Sequence[str], stages: int) -> Cut:
    """Cuts near equal numbers of blocks."""
    chosen = sorted({len(blocks) * stage // stages for stage in range(1, stages)} - {0})
    return Cut(tuple(blocks[index] for index in chosen), tuple(blocks[index - 1] for index in chosen), True)


def difference(actual: Outcome, expected: Outcome) -> tuple[float, str]:
    """The largest relative difference of losses, tensors and score, and where it is.

    It is infinite where a tensor that training moved is missing: a stage leaves out what it does not use. Names that
    only a run has, such as those of constants, count for nothing.
    """
    gaps: dict[str, float] = {}
    losses = (torch.tensor(outcome.losses, dtype=torch.float64) for outcome in (actual, expected))
    gaps["losses"] = _gap(*losses)
    for name, tensor in expected.state.items():
        if name in actual.state:
            gaps[name] = _gap(actual.state[name], tensor)
        elif name not in expected.unmoved:
            gaps[f"{name} (missing)"] = float("inf")
    if expected.score is not None and actual.score is not None:
        gaps["evaluation"] = _gap(torch.tensor(actual.score).double(), torch.tensor(expected.score).double())
    where = max(gaps, key=lambda name: gaps[name])
    return gaps[where], where


def _gap(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    distance = float(torch.linalg.vector_norm(actual.to(wide) - expected.to(wide)))
    if distance != distance:
        return float("inf")
    return distance and distance / max(float(torch.linalg.vector_norm(expected.to(wide))), 1e-3)
