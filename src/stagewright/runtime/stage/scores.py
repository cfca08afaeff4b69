"""Losses and metrics: from those of microbatches to events, as sums that are exact over microbatches and replicas.

`Losses` collects the losses of training. The rest is about evaluation, and what it measures beside the loss.

A metric is `metric(outputs, sample) -> {name: (total, count)}`, with what the model returned and the fields of the
microbatch. Its value is the sum of totals over the sum of counts (`metrics.metric_values`). `--metric` names built-in
ones (`BUILT_IN`) or functions of the user, `package.module:function`; a `Scorer` adds up what they return. A user's may
return one `(total, count)`, or a number, the mean over the samples given; where samples are pairs or tuples it is
`metric(outputs, target)`, as a user's loss is.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from torch.nn import functional

from stagewright.errors import UserError, did_you_mean, first_line, printable
from stagewright.events import BatchLosses, Emit, Score, build
from stagewright.metrics import LOSS
from stagewright.model.loss import (
    IGNORED,
    NEXT_TOKEN,
    TARGETS,
    Loss,
    LossError,
    LossOptions,
    Measured,
    logits_of,
    next_tokens,
    require_count,
    target_of,
    users_function,
    with_ignored,
)
from stagewright.objects import load_callable, shown
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.comm.transport import Pending

Sample = Mapping[str, Tensor]
Sums = Mapping[str, tuple[float, float]]  # total and count by name
Metric = Callable[[Any, Sample], Sums]  # a user's may return less: see `_checked`
_MOST_CLASSES = 256  # of iou
_FIVE = 5  # of so many classes or fewer the right one is always among the first five
_MOST_NAMES, _LONGEST_NAME = 512, 60


def _by_class(outputs: Any, sample: Sample) -> tuple[Tensor, Tensor, float]:
    """Logits with classes in dimension 1, class numbers, and how many samples count where some are ignored.

    A sample with many labels counts as one, less by the share of them that is ignored. Classes are in dimension 1, as
    torch's cross-entropy has them, or where the shape does not fit that, in the last.
    """
    logits, target = logits_of(outputs), target_of(sample)
    if target.is_floating_point() or logits.dim() != target.dim() + 1:
        raise ValueError(
            f"needs class numbers: outputs are {list(logits.shape)}, "
            f"targets {list(target.shape)} {str(target.dtype).removeprefix('torch.')}"
        )
    if logits.shape[2:] != target.shape[1:] and logits.shape[:-1] == target.shape:
        logits = logits.movedim(-1, 1)
    if (len(logits), *logits.shape[2:]) != tuple(target.shape):
        raise ValueError(f"outputs are {list(logits.shape)} but targets {list(target.shape)}")
    kept = int((target != IGNORED).sum())
    return logits, target.long(), kept / max(1, target[:1].numel())


def _hits(outputs: Any, sample: Sample) -> tuple[dict[str, tuple[float, float]], int]:
    """How often the largest logit, and one of the five largest, is the right class; and how many classes there are."""
    logits, target, count = _by_class(outputs, sample)
    best = (logits.topk(min(_FIVE, logits.shape[1]), 1).indices == target.unsqueeze(1)).double()
    hits = best.flatten(2).mean(2) if best.dim() > 2 else best
    return {"top1": (float(hits[:, 0].sum()), count), "top5": (float(hits.sum()), count)}, logits.shape[1]


def top1(outputs: Any, sample: Sample) -> Sums:
    """How often the class with the largest logit is right."""
    return {"top1": _hits(outputs, sample)[0]["top1"]}


def top5(outputs: Any, sample: Sample) -> Sums:
    """How often the right class is among the five largest logits."""
    return {"top5": _hits(outputs, sample)[0]["top5"]}


def accuracy(outputs: Any, sample: Sample) -> Sums:
    """Multi-label: how many elements are right, with a logit above 0 for 1; with class numbers, as top-1."""
    logits, target = logits_of(outputs), target_of(sample)
    if logits.dim() == target.dim() + 1 and not target.is_floating_point() and logits.shape[-1] != 1:
        return {"accuracy": top1(outputs, sample)["top1"]}
    logits = _like(logits, target)
    kept = target != IGNORED
    return {"accuracy": (float((((logits > 0) == (target > 0)) & kept).sum()), float(kept.sum()))}


def iou(outputs: Any, sample: Sample) -> Sums:
    """Intersection and union of what is predicted and what is right, per class; their mean ratio is `iou`."""
    logits, target, _ = _by_class(outputs, sample)
    classes = logits.shape[1]
    if classes > _MOST_CLASSES:
        raise ValueError(f"{classes} classes are more than {_MOST_CLASSES}")
    kept = target != IGNORED
    right, predicted = target[kept], logits.argmax(1)[kept]
    both = torch.bincount(right[right == predicted], minlength=classes)
    either = torch.bincount(right, minlength=classes) + torch.bincount(predicted, minlength=classes) - both
    pairs = zip(both.tolist(), either.tolist(), strict=True)
    return {f"iou/{number}": (float(inside), float(union)) for number, (inside, union) in enumerate(pairs)}


def mae(outputs: Any, sample: Sample) -> Sums:
    """Mean absolute error per element."""
    error = _errors(outputs, sample).abs()
    return {"mae": (float(error.sum()), float(error.numel()))}


def mse(outputs: Any, sample: Sample) -> Sums:
    """Mean squared error per element."""
    error = _errors(outputs, sample).square()
    return {"mse": (float(error.sum()), float(error.numel()))}


def perplexity(outputs: Any, sample: Sample) -> Sums:
    """The log-losses of all targets and their number; shown as the exponential of their mean."""
    logits, target, count = _by_class(outputs, sample)
    total = functional.cross_entropy(logits, target, reduction="none").double().sum()
    return {"perplexity": (float(total), float(round(count * max(1, target[:1].numel()))))}


def automatic(outputs: Any, sample: Sample) -> Sums:
    """Top-1 where targets are class numbers, and top-5 of more than five classes; nothing otherwise."""
    try:
        logits, target = logits_of(outputs), target_of(sample)
    except LossError:
        return {}
    are_classes = not (target.is_floating_point() or target.is_complex() or target.dtype is torch.bool)
    if not are_classes or logits.dim() != target.dim() + 1:
        return {}
    found, classes = _hits(outputs, sample)
    return found if classes > _FIVE else {"top1": found["top1"]}


def _errors(outputs: Any, sample: Sample) -> Tensor:
    target = target_of(sample)
    return _like(logits_of(outputs), target).double() - target.double()


def _like(outputs: Tensor, target: Tensor) -> Tensor:
    """Outputs in the shape of their targets, from which they may differ in dimensions of one element."""
    if [side for side in outputs.shape if side != 1] != [side for side in target.shape if side != 1]:
        raise ValueError(f"outputs are {list(outputs.shape)} but targets {list(target.shape)}")
    return outputs.reshape(target.shape)


AUTO, NONE = "auto", "none"
BUILT_IN: Mapping[str, Metric] = {
    metric.__name__: metric for metric in (top1, top5, accuracy, iou, mae, mse, perplexity)
}


def load_metrics(text: str) -> dict[str, Metric]:
    """The metrics of --metric, names between commas, a user's also as `label=name`. UserError for an unknown one."""
    found: dict[str, Metric] = {}
    for name in filter(None, map(str.strip, text.split(","))):
        if name == AUTO:
            found[name] = automatic
        elif ":" in name:
            found[name] = load_callable(name.rpartition("=")[2], "metric")
        elif name in BUILT_IN:
            found[name] = BUILT_IN[name]
        elif name != NONE:
            known = (*BUILT_IN, AUTO, NONE)
            raise UserError(
                f"--metric '{name}' is unknown (a function is package.module:name); {did_you_mean(name, known)}"
            )
    return found


class Scorer:
    """Adds up the loss and the metrics of the microbatches that this rank evaluates."""

    def __init__(self, metrics: Mapping[str, Metric], loss: Loss) -> None:
        self._metrics = metrics
        self._loss = loss
        self.score = Score()

    def measure(self, outputs: Any, sample: Sample) -> Measured:
        """The loss of one microbatch."""
        return self._loss(outputs, sample)

    def probe(self, outputs: Any, sample: Sample) -> Measured:
        """The loss of one microbatch, after its metrics: all that an evaluation computes from it."""
        self.add(outputs, sample, samples=1)
        return self.measure(outputs, sample)

    def add(self, outputs: Any, sample: Sample, samples: int) -> None:
        """Add what the metrics make of one microbatch."""
        measured = self.measure(outputs, sample)
        if measured.count is None:
            totals = {LOSS: (float(measured.total) * samples, float(samples))}
        else:
            require_count(float(measured.count), "in an evaluation")
            totals = {LOSS: (float(measured.total), float(measured.count))}
        owners = {LOSS: "the loss"}
        for metric, function in self._metrics.items():
            for name, sums in _checked(metric, function, outputs, sample, samples):
                if name in owners:
                    raise UserError(
                        f"metric '{shown(metric)}' returns '{name}', as {owners[name]} does; rename one of them"
                    )
                owners[name], totals[name] = f"metric '{shown(metric)}'", sums
        if self._loss.name == NEXT_TOKEN and AUTO in self._metrics and "perplexity" not in totals:
            totals["perplexity"] = totals[LOSS]
        self.score += Score(samples, totals)


def make_scorer(metrics: str, loss: LossOptions) -> Scorer:
    """The scorer of a run's --metric and --loss; an evaluation does not smooth labels."""
    plain = Loss(replace(loss, label_smoothing=0.0))
    found = load_metrics(metrics)
    found = {
        name: users_function(metric, is_paired=loss.is_paired) if ":" in name else _of_targets(metric, loss)
        for name, metric in found.items()
    }
    if AUTO in found and loss.name == NEXT_TOKEN:
        found[AUTO] = lambda outputs, sample: {}  # perplexity, which follows from the loss
    return Scorer(found, plain)


def _of_targets(metric: Metric, loss: LossOptions) -> Metric:
    """A built-in metric, which reads nothing but the target: that of the loss, without the labels of --ignore-index."""

    def measure(outputs: Any, sample: Sample) -> Sums:
        if loss.name == NEXT_TOKEN:
            logits = logits_of(outputs).movedim(-1, 1)  # classes are last, as many as there may be positions
            return metric(logits, {"targets": with_ignored(next_tokens(sample), loss.ignore_index)})
        names = [name for name in TARGETS if name in sample][:1]
        return metric(outputs, {name: with_ignored(sample[name], loss.ignore_index) for name in names} or sample)

    return measure if loss.name == NEXT_TOKEN or loss.ignore_index is not None else metric


def _checked(
    metric: str, function: Metric, outputs: Any, sample: Sample, samples: int
) -> Iterator[tuple[str, tuple[float, float]]]:
    """What a metric returns, by cleaned names; a UserError that names it where it raises or returns something else.

    One `(total, count)`, or a mean over the samples given, has the label of the metric, or else its function's name.
    """
    owner = f"metric '{shown(metric)}'"
    try:
        found: Any = function(outputs, sample)
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{owner} raised {type(error).__name__}: {first_line(error, 200)}") from error
    if isinstance(found, Real) or (isinstance(found, Tensor) and found.numel() == 1):
        found = (float(found) * samples, samples)
    if isinstance(found, tuple):
        found = {metric.rpartition("=")[0] or metric.rpartition(":")[2]: found}
    if not isinstance(found, Mapping) or len(found) > _MOST_NAMES:
        what = f"{len(found)} names" if isinstance(found, Mapping) else type(found).__name__
        raise UserError(
            f"{owner} returned {what}; return a number, (total, count), or {{name: (total, count)}} of at "
            f"most {_MOST_NAMES}"
        )
    for name, sums in found.items():
        label = printable(str(name))[:_LONGEST_NAME]
        try:
            total, count = (float(number) for number in sums)
        except (TypeError, ValueError, RuntimeError):
            total = count = math.nan
        if not (isinstance(name, str) and name and math.isfinite(total) and math.isfinite(count) and count >= 0):
            got = printable(repr(sums))[:80]
            raise UserError(
                f"{owner} returned {got} as '{label}'; return a total and a count, two finite numbers of "
                "which the count is at least 0"
            )
        yield label, (total, count)


def exchange_scores(
    store: Store, key: str, rank: int, last_ranks: Sequence[int], score: Score | None
) -> Generator[Pending, None, tuple[Score, ...]]:
    """The scores of all ranks of the last stage, in their order: the same on every rank of the run, to the bit.

    Every rank takes part, those of the last stage with their score. `key` is new for each exchange of a start; what is
    posted stays in the store, a few hundred bytes a rank.
    """
    if rank in last_ranks:
        assert score is not None, f"rank {rank} of the last stage has no score"
        store.set(f"{key}/{rank}", json.dumps(asdict(score)))
    posted = _Posted(store, [f"{key}/{other}" for other in last_ranks])
    yield posted
    return tuple(build(Score, json.loads(store.get(name))) for name in posted.keys)


@dataclass(frozen=True, slots=True)
class _Posted:
    """Keys of the store; as a `Pending`, complete once all of them are set."""

    store: Store
    keys: list[str]

    def is_completed(self) -> bool:
        return bool(self.store.check(self.keys))

    def wait(self) -> None:
        self.store.wait(self.keys)


# The losses of training.


class NonFiniteLoss(UserError):
    """A loss is infinite or NaN; further training would only spread it."""


class Losses:
    """Collects the losses of each batch on this rank, and emits batches in order; only `flush` waits."""

    def __init__(self, plan: Plan, rank: int, emit: Emit) -> None:
        self._plan = plan
        self._rank = rank
        self._emit = emit
        self._batches: deque[tuple[list[tuple[int, Reading]], float | None, float | None]] = deque()

    def add(self, losses: list[tuple[int, Reading]], scale: float | None, rate: float | None = None) -> None:
        """Add a batch's losses on this rank, each a mean or a total and its count; its loss scale and rate, if any."""
        self._batches.append((losses, scale, rate))
        self._emit_batches(wait=False)

    def flush(self) -> None:
        self._emit_batches(wait=True)

    def _emit_batches(self, *, wait: bool) -> None:
        while self._batches and (wait or all(reading.is_completed() for _, reading in self._batches[0][0])):
            losses, scale, rate = self._batches.popleft()
            numbers = tuple((microbatch, *_total_and_count(reading.value())) for microbatch, reading in losses)
            for microbatch, loss, count in numbers:
                require_count(count, f"batch {microbatch // self._plan.microbatches}, microbatch {microbatch}")
                if not math.isfinite(loss):
                    raise NonFiniteLoss(
                        f"the loss of batch {microbatch // self._plan.microbatches} is {loss} "
                        f"(stage {len(self._plan.stages) - 1}, microbatch {microbatch}); "
                        "try a lower --lr, a --warmup or --clip 1"
                    )
            self._emit(BatchLosses(self._rank, numbers, time.monotonic(), scale, rate))


def _total_and_count(loss: Tensor) -> tuple[float, float]:
    """A loss of one number, a mean, counts once; one of two is a total and its count."""
    if loss.numel() == 1:
        return float(loss), 1.0
    total, count = loss.flatten().tolist()
    return total, count
