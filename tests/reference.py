"""The independent reference: one process, plain PyTorch, the semantics of section 2 of the design and nothing else.

Every microbatch runs through the whole model at once, each stage's parameters taken from the version the rules name:

    microbatch i  ──►  stage s: round k = i div span, version max(0, k+1-K), statistics of replica i mod r
    span microbatches of a stage make one gradient and one update; span is M, or r in pipedream

A loss is a mean, or a total and its count: then the gradient of a round is that of its totals over its counts.

A tied parameter has a home in several stages. They have one K, so a microbatch sees one version of it in all of them:
the whole model's gradient of it is the sum over its homes, and its first home keeps it for all.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Group:
    """How a parameter moves where that differs from the others: its rate is a factor of theirs, at every batch."""

    rate: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # weight_decay, momentum or betas of `Setup`


@dataclass(frozen=True)
class Setup:
    """What a run depends on besides the model, its cut and the data."""

    replicas: tuple[int, ...]
    versions: tuple[int, ...]
    batch: int
    microbatches: int
    steps: int
    seed: int = 0
    dtype: torch.dtype = torch.float64
    pipedream: bool = False
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    label_smoothing: float = 0.0
    groups: Mapping[str, Group] = field(default_factory=dict)  # by a parameter's first name
    predict: bool = False
    clip: float | None = None
    ema: float | None = None  # decay of the averaged weights, per batch
    ties: tuple[tuple[str, tuple[int, ...]], ...] = ()  # a parameter's first name, and the stages that use it
    scale: float | None = None  # of the loss, at first
    growth_interval: int = 2000
    inputs: tuple[str, ...] = ("image",)  # the fields that the model takes
    names: tuple[str, ...] = ()  # forward's parameters that get the last of them
    loss: Callable[[Any, Tensors], Any] | None = None  # of what the model returns and the fields; or cross-entropy
    lr: Callable[[int], float] = field(kw_only=True)

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.versions):
            raise ValueError(f"{len(self.replicas)} stages have replicas but {len(self.versions)} have versions")
        if min(self.replicas + self.versions) < 1 or self.steps < 1:
            raise ValueError(f"replicas {self.replicas}, versions {self.versions}, steps {self.steps}: all at least 1")
        if self.batch % self.microbatches:
            raise ValueError(f"a batch of {self.batch} does not divide into {self.microbatches} microbatches")
        if self.pipedream and self.num_microbatches % math.lcm(*self.replicas):
            raise ValueError(f"{self.num_microbatches} microbatches are no multiple of lcm{self.replicas}")
        for name, homes in self.ties:
            if any(len({numbers[home] for home in homes}) > 1 for numbers in (self.versions, self.spans)):
                raise ValueError(f"the homes {homes} of {name} have other versions, or other rounds")
        if self.scale is not None and self.ties and set(self.versions) != {1}:
            raise ValueError("a scaled loss with ties needs K = 1")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is none of {sorted(OPTIMIZERS)}")

    @property
    def num_microbatches(self) -> int:
        return self.steps * self.microbatches

    @property
    def spans(self) -> tuple[int, ...]:
        """Microbatches of one update of each stage."""
        return self.replicas if self.pipedream else (self.microbatches,) * len(self.replicas)

    @property
    def clips_globally(self) -> bool:
        return set(self.versions) == {1} and not self.pipedream

    @property
    def decision_delay(self) -> int:
        """Batches until a skip decision has an effect: L of runtime/stage/loss_scaling."""
        return 1 if set(self.versions) == {1} else max(len(self.versions), self.versions[0])


@dataclass
class Result:
    """What a run leaves; `weights | buffers` is a state_dict of the whole model."""

    losses: list[float]
    weights: Tensors
    averages: Tensors  # what evaluations use: the averaged weights, or where there is no decay the newest
    buffers: Tensors
    replica_buffers: dict[tuple[int, int], Tensors]
    scales: list[float]  # of every batch, where the loss is scaled
    skipped: list[tuple[bool, ...]]  # of every batch, by stage


@dataclass(frozen=True)
class Moments:
    """One parameter's optimizer state: updates so far, momentum (or first moment), second moment."""

    count: int
    first: Tensor
    second: Tensor


def sgd(setup: Setup, lr: float, weight: Tensor, gradient: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """torch.optim.SGD's update."""
    gradient = gradient + setup.weight_decay * weight
    velocity = setup.momentum * moments.first + gradient
    direction = gradient + setup.momentum * velocity if setup.nesterov else velocity
    return weight - lr * direction, Moments(moments.count + 1, velocity, moments.second)


def adamw(setup: Setup, lr: float, weight: Tensor, gradient: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """torch.optim.AdamW's update."""
    beta1, beta2 = setup.betas
    count = moments.count + 1
    first = beta1 * moments.first + (1 - beta1) * gradient
    second = beta2 * moments.second + (1 - beta2) * gradient**2
    first_hat = first / (1 - beta1**count)
    second_hat = second / (1 - beta2**count)
    decayed = weight - lr * setup.weight_decay * weight
    return decayed - lr * first_hat / (second_hat.sqrt() + setup.eps), Moments(count, first, second)


def rmsprop(setup: Setup, lr: float, weight: Tensor, gradient: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """torch.optim.RMSprop's update, whose alpha is the decay of the second moment."""
    gradient = gradient + setup.weight_decay * weight
    alpha = setup.betas[1]
    second = alpha * moments.second + (1 - alpha) * gradient**2
    velocity = setup.momentum * moments.first + gradient / (second.sqrt() + setup.eps)
    return weight - lr * velocity, Moments(moments.count + 1, velocity, second)


def lars(setup: Setup, lr: float, weight: Tensor, gradient: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """LARS of You, Gitman and Ginsburg: the gradient of each tensor is scaled by its trust ratio."""
    length, slope = float(weight.norm()), float(gradient.norm())
    trust = 0.001 * length / (slope + setup.weight_decay * length) if length and slope else 1.0
    velocity = setup.momentum * moments.first + trust * (gradient + setup.weight_decay * weight)
    return weight - lr * velocity, Moments(moments.count + 1, velocity, moments.second)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw, "rmsprop": rmsprop, "lars": lars}


def extrapolate(setup: Setup, lr: float, weight: Tensor, moments: Moments, updates: int) -> Tensor:
    """The weight after so many updates in which momentum alone moves it, one after another."""
    if setup.optimizer == "adamw":
        if moments.count == 0:
            return weight
        first_hat = moments.first / (1 - setup.betas[0] ** moments.count)
        second_hat = moments.second / (1 - setup.betas[1] ** moments.count)
        return weight - updates * lr * first_hat / (second_hat.sqrt() + setup.eps)
    if setup.optimizer in ("rmsprop", "lars"):
        return weight - lr * moments.first * sum(setup.momentum**update for update in range(1, updates + 1))
    still = replace(setup, weight_decay=0.0)
    for _ in range(updates):
        weight, moments = sgd(still, lr, weight, torch.zeros_like(weight), moments)
    return weight


class Stage:
    """One stage's whole history of parameters, its replicas' buffers and the gradient of its unfinished round.

    A parameter of several stages is in the history of its first home.
    """

    def __init__(self, stage: int, setup: Setup, weights: Tensors, buffers: Tensors) -> None:
        self.setup = setup
        self.index = stage
        self.num_replicas = setup.replicas[stage]
        self.num_versions = setup.versions[stage]
        self.span = setup.spans[stage]
        found = {name: setup.groups.get(name, Group()) for name in weights}
        self.rates = {name: group.rate for name, group in found.items()}
        self.setups = {name: replace(setup, **group.settings) for name, group in found.items()}
        self.history = [weights]
        self.average = weights
        self.extrapolated: list[Tensors] = [weights]  # every version as extrapolated to its use
        self.moments = {name: Moments(0, torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self.buffers = [{name: b.clone() for name, b in buffers.items()} for _ in range(self.num_replicas)]
        self.gradients: list[Tensors] = [{} for _ in range(self.num_replicas)]
        self.count: float | None = None  # of the round's targets so far, where the loss is a total

    def replica_of(self, microbatch: int) -> int:
        return microbatch % self.num_replicas

    def weights_for(self, microbatch: int) -> Tensors:
        """The parameters of the version with which this microbatch runs forward and backward."""
        version = max(0, microbatch // self.span + 1 - self.num_versions)
        assert version < len(self.history), f"microbatch {microbatch} needs version {version}, not made yet"
        return self.extrapolated[version] if self.setup.predict else self.history[version]

    def add(self, microbatch: int, gradients: Tensors, *, is_shared: bool = False, count: float | None = None) -> None:
        """Adds the gradients of one microbatch's mean loss, or of its share in the batch's, to those of its replica.

        Those of a total, of `count` targets, are divided by the count of the whole round once it has ended.
        """
        mine = self.gradients[self.replica_of(microbatch)]
        share = 1 if is_shared or count is not None else self.span
        accumulate(mine, {name: g / share for name, g in gradients.items() if name in self.history[0]})
        if count is not None:
            self.count = count + (self.count or 0.0)

    def finishes_with(self, microbatch: int) -> bool:
        return (microbatch + 1) % self.span == 0

    def take_gradient(self) -> Tensors:
        """The sum over replicas in replica order, after which the next round starts from nothing."""
        total: Tensors = {}
        for gradients in self.gradients:
            accumulate(total, gradients)
        if self.count is not None:
            total = {name: g / self.count if self.count else torch.zeros_like(g) for name, g in total.items()}
        self.gradients, self.count = [{} for _ in range(self.num_replicas)], None
        return total

    def update(self, gradient: Tensors) -> None:
        """Makes the next version from the newest; a parameter without gradient stays."""
        first_microbatch = (len(self.history) - 1) * self.span
        lr = self.setup.lr(first_microbatch // self.setup.microbatches)
        weights = dict(self.history[-1])
        for name, g in gradient.items():
            weights[name], self.moments[name] = OPTIMIZERS[self.setup.optimizer](
                self.setups[name], lr * self.rates[name], weights[name], g, self.moments[name]
            )
        self.history.append(weights)
        self.extrapolate()
        decay = (self.setup.ema or 0.0) ** (self.span / self.setup.microbatches)
        self.average = {name: decay * self.average[name] + (1 - decay) * w for name, w in weights.items()}

    def extrapolate(self) -> None:
        """Extrapolate the newest version to its use, K-1 updates later."""
        if not self.setup.predict:
            return
        version = len(self.history) - 1
        lr = self.setup.lr(version * self.span // self.setup.microbatches)
        ahead = self.num_versions - 1
        self.extrapolated.append(
            {
                name: extrapolate(self.setups[name], lr * self.rates[name], weight, self.moments[name], ahead)
                for name, weight in self.history[-1].items()
            }
        )

    def skip(self) -> None:
        """Makes the next version the same as the newest."""
        self.history.append(self.history[-1])
        self.extrapolate()

    def averaged_buffers(self) -> Tensors:
        """Statistics averaged over replicas weighted by their microbatches, counts summed, the rest replica 0's."""
        microbatches = range(self.setup.num_microbatches)
        counts = [sum(self.replica_of(i) == replica for i in microbatches) for replica in range(self.num_replicas)]
        averaged = dict(self.buffers[0])
        for name in averaged:
            own = [buffers[name] for buffers in self.buffers]
            match name.split(".")[-1]:
                case "running_mean" | "running_var":
                    weighted = [count * statistic for count, statistic in zip(counts, own, strict=True)]
                    averaged[name] = torch.stack(weighted).sum(0) / sum(counts)
                case "num_batches_tracked":
                    averaged[name] = torch.stack(own).sum(0)
        return averaged


def accumulate(total: Tensors, more: Tensors) -> None:
    """Adds `more` to `total` in place; a name that is new to `total` starts there."""
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def clip_factor(gradients: Sequence[Tensors], limit: float) -> float:
    """By what torch.nn.utils.clip_grad_norm_ scales the gradients."""
    norm = math.sqrt(sum(float((g * g).sum()) for stage in gradients for g in stage.values()))
    return min(1.0, limit / (norm + 1e-6))


def clipped(gradients: Sequence[Tensors], limit: float) -> list[Tensors]:
    """The gradients scaled together."""
    factor = clip_factor(gradients, limit)
    return [{name: g * factor for name, g in stage.items()} for stage in gradients]


def clipped_apart(gradients: Mapping[int, Tensors], setup: Setup) -> list[Tensors]:
    """The gradients of some stages, each scaled by its own norm; a tied one by the smallest factor of its homes.

    Each home's norm has the whole sum of a tied gradient.
    """
    assert setup.clip is not None
    ties = dict(setup.ties)
    factors: dict[int, float] = {}
    for stage, own in gradients.items():
        shared = {name: gradients[ties[name][0]] for name in ties if stage in ties[name]}
        shared_gradients = {name: held[name] for name, held in shared.items() if name in held}
        factors[stage] = clip_factor([own | shared_gradients], setup.clip)
    return [
        {name: g * min(factors[home] for home in ties.get(name, (stage,))) for name, g in own.items()}
        for stage, own in gradients.items()
    ]


def stage_seed(seed: int, microbatch: int, stage: int) -> int:
    """The seed of the generator before this stage runs forward on this microbatch."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{microbatch}/{stage}".encode()).digest()[:8], "little")


class StageSeeds:
    """Seeds torch's default generator where each stage starts: at the first call of its start module."""

    def __init__(self, model: nn.Module, starts: Sequence[str | None], seed: int) -> None:
        named = {stage: name for stage, name in enumerate(starts) if name is not None}
        assert len(set(named.values())) == len(named), f"two stages start at one module: {list(starts)}"
        self.seed = seed
        self.stages = set(named)
        self.waiting: set[int] = set()
        self.microbatch = -1
        for stage, name in named.items():
            model.get_submodule(name).register_forward_pre_hook(partial(self._start, stage))

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Within, the model runs forward on this microbatch once."""
        self.microbatch = microbatch
        self.waiting = set(self.stages)
        yield
        assert not self.waiting, f"stages {self.waiting} never started on microbatch {self.microbatch}"

    def _start(self, stage: int, module: nn.Module, args: object) -> None:
        if stage in self.waiting:
            self.waiting.remove(stage)
            torch.default_generator.manual_seed(stage_seed(self.seed, self.microbatch, stage))


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer name of the model -> the first name of that tensor."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    first_names: dict[int, str] = {}
    return {name: first_names.setdefault(id(tensor), name) for name, tensor in named.items()}


def make_stages(model: nn.Module, stage_of: Callable[[str], int], setup: Setup) -> list[Stage]:
    """The stages before the first batch, each with its own share of the model's tensors."""
    ties = dict(setup.ties)
    for name, first in canonical_names(model).items():
        assert stage_of(name) in ties.get(first, (stage_of(first),)), f"{name} and {first} are one tensor in two stages"
    weights: list[Tensors] = [{} for _ in setup.replicas]
    buffers: list[Tensors] = [{} for _ in setup.replicas]
    for name, parameter in model.named_parameters():
        weights[min(ties.get(name, (stage_of(name),)))][name] = parameter.detach().clone()
    for name, buffer in model.named_buffers():
        buffers[stage_of(name)][name] = buffer
    return [Stage(s, setup, weights[s], buffers[s]) for s in range(len(setup.replicas))]


def next_scale(setup: Setup, scales: Sequence[float], skipped: Sequence[tuple[bool, ...]]) -> float:
    """The scale of the batch after these, from the skip decisions it may know: stage 0's, `decision_delay` behind."""
    assert setup.scale is not None
    scale, clean = setup.scale, 0
    for q in range(len(scales) - setup.decision_delay + 1):
        if scales[q] != scale:
            continue
        clean = 0 if skipped[q][0] else clean + 1
        if skipped[q][0]:
            scale /= 2
        elif clean == setup.growth_interval:
            scale, clean = min(scale * 2, 2.0**127), 0
    return scale


def unscaled(gradients: Sequence[Tensors], scale: float, setup: Setup) -> tuple[list[Tensors], tuple[bool, ...]]:
    """The gradients of all stages divided by the scale, and which stages skip their update."""
    divided = [{name: g / scale for name, g in stage.items()} for stage in gradients]
    overflows = [not all(bool(g.isfinite().all()) for g in stage.values()) for stage in divided]
    first = 0 if setup.clips_globally else None  # where nothing lags, any stage's overflow is everyone's
    return divided, tuple(any(overflows[s if first is None else first :]) for s in range(len(divided)))


def run_microbatch(
    model: nn.Module, stages: Sequence[Stage], microbatch: int, fields: Tensors, scale: float = 1.0, share: float = 1.0
) -> tuple[float, float | None, Tensors]:
    """Forward and backward of the whole model: the loss, its count and its gradients; moves the replicas' buffers.

    The gradients are those of the scaled loss, of a mean times its share.
    """
    setup = stages[0].setup
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    leaves = {name: w.detach() for stage in stages for name, w in stage.weights_for(microbatch).items()}
    for name in trainable:
        leaves[name].requires_grad_()
    own_buffers = [stage.buffers[stage.replica_of(microbatch)] for stage in stages]
    state = leaves | {name: buffer for buffers in own_buffers for name, buffer in buffers.items()}

    number = len(setup.inputs) - len(setup.names)
    values = tuple(fields[name] for name in setup.inputs)
    named = dict(zip(setup.names, values[number:], strict=True))
    output = functional_call(model, state, values[:number], named)
    if setup.loss is None:
        made: Any = cross_entropy(output, fields["label"], label_smoothing=setup.label_smoothing)
    else:
        made = setup.loss(output, fields)
    loss, count = made if isinstance(made, tuple) else (made, None)
    factor = scale * share if count is None else scale
    gradients = torch.autograd.grad(loss * factor, [leaves[name] for name in trainable], allow_unused=True)

    # functional_call moves buffers in place, or, where the module assigned a new tensor, puts it into `state`.
    for buffers in own_buffers:
        buffers.update({name: state[name].detach() for name in buffers})
    reached = {name: g for name, g in zip(trainable, gradients, strict=True) if g is not None}
    return loss.item(), None if count is None else float(count), reached


def update_finished(
    stages: Sequence[Stage], microbatch: int, setup: Setup, scale: float | None = None
) -> tuple[bool, ...]:
    """Updates the stages whose round ends with this microbatch; says which of them skip, where there is a scale."""
    finished = [stage for stage in stages if stage.finishes_with(microbatch)]
    gradients = [stage.take_gradient() for stage in finished]
    skips = (False,) * len(finished)
    if scale is not None and finished:
        gradients, skips = unscaled(gradients, scale, setup)
    if setup.clip is not None and setup.clips_globally:
        gradients = clipped(gradients, setup.clip)
    elif setup.clip is not None:
        gradients = clipped_apart({stage.index: g for stage, g in zip(finished, gradients, strict=True)}, setup)
    for stage, gradient, skip in zip(finished, gradients, skips, strict=True):
        if skip:
            stage.skip()
        else:
            stage.update(gradient)
    return skips


def epochs_in_identity_order(num_samples: int, batch: int) -> Callable[[int], Tensor]:
    """Batch number -> its samples, where every epoch goes through the data in order and drops a partial batch."""
    if num_samples < batch:
        raise ValueError(f"{num_samples} samples make no batch of {batch}")
    return lambda p: torch.arange(batch) + p % (num_samples // batch) * batch


def collect(
    model: nn.Module,
    stages: Sequence[Stage],
    losses: list[float],
    scales: list[float],
    skipped: list[tuple[bool, ...]],
) -> Result:
    """The state after the last update under every name of the model's state_dict."""
    newest = {name: w for stage in stages for name, w in stage.history[-1].items()}
    averages = {name: w for stage in stages for name, w in stage.average.items()}
    averaged = {name: b for stage in stages for name, b in stage.averaged_buffers().items()}
    first_names = {name: first for name, first in canonical_names(model).items() if name in model.state_dict()}
    return Result(
        losses,
        {name: newest[first] for name, first in first_names.items() if first in newest},
        {name: averages[first] for name, first in first_names.items() if first in averages},
        {name: averaged[first] for name, first in first_names.items() if first in averaged},
        {(s, replica): own for s, stage in enumerate(stages) for replica, own in enumerate(stage.buffers)},
        scales,
        skipped,
    )


def train(
    model_factory: Callable[[], nn.Module],
    images: Tensor | Tensors,
    labels: Tensor | None,
    stage_of: Callable[[str], int],
    starts: Sequence[str | None],
    setup: Setup,
    order: Callable[[int], Tensor] | None = None,
) -> Result:
    """Trains the model for `setup.steps` batches as section 2 of the design says; leaves the caller's randomness.

    Data is images and labels, or samples' fields by name.
    """
    data = images if isinstance(images, dict) else {"image": images, "label": labels}
    assert len(starts) == len(setup.replicas), f"{len(starts)} starts for {len(setup.replicas)} stages"
    data = {name: t.to(setup.dtype) if t.is_floating_point() else t for name, t in data.items() if t is not None}
    order = order or epochs_in_identity_order(len(next(iter(data.values()))), setup.batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        model = model_factory().to(setup.dtype).train()
        stages = make_stages(model, stage_of, setup)
        seeds = StageSeeds(model, starts, setup.seed)
        losses: list[float] = []
        scales: list[float] = []
        skipped: list[tuple[bool, ...]] = []
        for p in range(setup.steps):
            scale = None
            if setup.scale is not None:
                scale = next_scale(setup, scales, skipped)
                scales.append(scale)
            indices = order(p)
            assert len(indices) == setup.batch, f"batch {p} has {len(indices)} of {setup.batch} samples"
            pieces = indices.chunk(setup.microbatches)
            batch_losses = []
            for i, samples in enumerate(pieces, start=p * setup.microbatches):
                fields = {name: tensor[samples] for name, tensor in data.items()}
                factor, share = (1.0, 1.0) if scale is None else (scale, 1 / setup.microbatches)
                with seeds.of(i):
                    loss, count, gradients = run_microbatch(model, stages, i, fields, factor, share)
                batch_losses.append((loss, 1.0 if count is None else count))
                for stage in stages:
                    stage.add(i, gradients, is_shared=scale is not None, count=count)
                skips = update_finished(stages, i, setup, scale)
            skipped.append(skips)
            total, weight = (sum(numbers) for numbers in zip(*batch_losses, strict=True))
            losses.append(total / weight if weight else 0.0)
    return collect(model, stages, losses, scales, skipped)
