"""What is minimised: `loss(outputs, sample)`, on what the model returns and the fields of its samples.

A loss returns a mean over the microbatch, or `(total, count)`: then the loss of a batch is the sum of totals over the
sum of counts, however many targets each microbatch has. `config/losses` lists the built-in ones; `model` takes the
loss that the model itself returns. A user's is `package.module:function`; where samples are pairs or tuples, not named
fields, it is `loss(outputs, target)`, as torch's criteria are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stagewright.config.losses import LOSSES
from stagewright.errors import UserError, did_you_mean, either_of, first_line
from stagewright.model.call import leaves_of
from stagewright.objects import load_callable, load_object, shown

Sample = Mapping[str, Tensor]
Function = Callable[[Any, Sample], Any]
TARGETS = ("label", "labels", "target", "targets")
NEXT_TOKEN = "next-token"
IGNORED = -100  # a target that does not count
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)


class LossError(UserError):
    """A loss that can't be computed, or is none."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The loss of one microbatch: a mean, or a total and its count."""

    total: Tensor
    count: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOptions:
    """What a user says about the loss."""

    name: str = "cross-entropy"
    label_smoothing: float = 0.0
    ignore_index: int | None = None  # a label that does not count, as -100; None: there is none where samples have one
    class_weights: tuple[float, ...] = ()
    is_paired: bool = False  # samples end with their target: a user's loss and metrics get that in place of all fields


class Loss:
    """Calls a loss, and checks that it is one number, or a total and its count."""

    def __init__(self, options: LossOptions) -> None:
        self.name = options.name
        self.option = f"--loss {shown(self.name)}"  # in errors
        self._function = _function(options)
        self.is_builtin = ":" not in options.name
        self.counts_alike = self.is_builtin or _is_plain_mean(options.name)  # every microbatch, of one size

    def __call__(self, outputs: Any, sample: Sample) -> Measured:
        try:
            made = self._function(outputs, sample)
        except (UserError, torch.OutOfMemoryError):
            raise
        except KeyError as error:
            if isinstance(sample, Watched) and error.args and error.args[0] not in sample:
                raise LossError(
                    f"{self.option} reads field '{error.args[0]}' but the samples have {', '.join(sample)}"
                ) from error
            raise
        if isinstance(made, tuple) and len(made) == 2:
            total, count = made
            count = torch.tensor(float(count)) if isinstance(count, Real) else count
            total, count = self._number(total, "total"), self._number(count, "count")
            return Measured(total, count.detach().double().to(total.device))
        return Measured(self._number(made, "loss"))

    def _number(self, value: Any, what: str) -> Tensor:
        if not isinstance(value, Tensor):
            raise LossError(
                f"{self.option} returns a {type(value).__name__} as its {what}; return a tensor with one number, "
                "or a pair (total, count)"
            )
        if value.is_complex():
            raise LossError(f"{self.option} returns a complex {what}; return a real number, such as its .abs()")
        if value.numel() != 1:
            raise LossError(
                f"{self.option} returns a {what} of shape {list(value.shape)}; return one number, a mean over the "
                "microbatch, or a pair (total, count)"
            )
        return widened(value.reshape(()))


class Watched(Mapping[str, Tensor]):
    """A sample that notes which of its fields are read."""

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self._fields = fields
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._fields[name]
        self.read.add(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, name: object) -> bool:
        return name in self._fields


def logits_of(outputs: Any) -> Tensor:
    """The predictions in what a model returned: itself, its `logits`, or its first tensor; half precision widened."""
    named = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    found = [named] if isinstance(named, Tensor) else leaves_of(outputs)
    if not found:
        raise LossError(f"the model returns {type(outputs).__name__} without a tensor")
    return widened(found[0])


def widened(logits: Tensor) -> Tensor:
    """Half-precision numbers as fp32, in which losses are computed."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def target_of(sample: Sample) -> Tensor:
    """The target of a sample: the field named label, labels, target or targets."""
    for name in TARGETS:
        if name in sample:
            return sample[name]
    raise LossError(f"the samples have {', '.join(sample)} but no {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")


def with_ignored(target: Tensor, ignore_index: int | None) -> Tensor:
    """A target whose labels of --ignore-index are -100, which counts nowhere."""
    return target if ignore_index in (None, IGNORED) else target.masked_fill(target == ignore_index, IGNORED)


def require_count(count: float, where: str) -> None:
    """An error for a count that is negative or not finite, with which no gradient could be divided."""
    if not 0 <= count < float("inf"):
        raise LossError(f"the loss returns {count:g} as its count ({where}); return a finite number of at least 0")


# The built-in losses of `config/losses`: each of what the model returns, the fields, and the options.


def cross_entropy(outputs: Any, sample: Sample, options: LossOptions) -> Any:
    """A mean where every sample has one label that counts; otherwise a total and its count."""
    logits, target = logits_of(outputs), target_of(sample)
    _require_classes(logits, target, 1)
    weights = torch.tensor(options.class_weights) if options.class_weights else None
    if weights is not None and len(weights) != logits.shape[1]:
        raise LossError(
            f"--class-weights has {len(weights)} weights but the model has {logits.shape[1]} outputs; give as many"
        )
    if target.is_floating_point():
        others = either_of([name for name, facts in LOSSES.items() if facts.takes_real])
        raise LossError(f"the target is a floating-point number; use --loss {others}")
    if target.dtype is torch.bool:
        raise LossError("the target is boolean; use --loss binary, or store class numbers as integers")
    if options.ignore_index is None and weights is None and target.dim() == 1:
        return functional.cross_entropy(logits, target, label_smoothing=options.label_smoothing)
    return _counted(logits, target, options, weights)


def next_token(outputs: Any, sample: Sample, options: LossOptions) -> Any:
    """Cross-entropy of each position's next token."""
    logits, target = logits_of(outputs), next_tokens(sample)
    _require_classes(logits, target, logits.dim() - 1)
    return _counted(logits.flatten(0, -2), target.flatten(), options, None)


def binary(outputs: Any, sample: Sample, options: LossOptions) -> Any:
    """Each output is a yes or no of its own: several labels at once."""
    logits, target = _alike("binary", outputs, sample)
    counts = with_ignored(target, options.ignore_index) != IGNORED
    each = functional.binary_cross_entropy_with_logits(logits, target.clamp(min=0), reduction="none")
    return (each * counts).sum(), counts.sum()


def mse(outputs: Any, sample: Sample, options: LossOptions) -> Any:
    return functional.mse_loss(*_alike("mse", outputs, sample))


def l1(outputs: Any, sample: Sample, options: LossOptions) -> Any:
    return functional.l1_loss(*_alike("l1", outputs, sample))


def soft(outputs: Any, sample: Sample, options: LossOptions) -> Any:
    """Cross-entropy with a probability for each class, as of mixed samples or of a teacher."""
    logits, target = logits_of(outputs), target_of(sample)
    if not target.is_floating_point() or target.shape != logits.shape:
        raise LossError(
            f"--loss soft needs a probability for each output {list(logits.shape)}; the target is "
            f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
        )
    return functional.cross_entropy(logits, target.to(logits), label_smoothing=options.label_smoothing)


def of_model(outputs: Any, sample: Sample, options: LossOptions) -> Any:
    """The loss that the model itself returns."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif not isinstance(outputs, Tensor):
        found = getattr(outputs, "loss", outputs[0] if isinstance(outputs, tuple | list) and outputs else None)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise LossError(
            "--loss model needs a model that returns its loss: one number, alone, first, or named 'loss'; give it "
            "its labels by --inputs (for example --inputs input_ids,labels)"
        )
    return found


def next_tokens(sample: Sample) -> Tensor:
    """Each position's next token: `targets` where samples have them, otherwise the tokens shifted.

    The last position has none, which spares a copy of all logits but the last.
    """
    if "targets" in sample:
        return sample["targets"]
    name = next((name for name in ("labels", "input_ids") if name in sample), None)
    if name is None:
        raise LossError(
            f"--loss next-token needs a field targets, labels or input_ids; the samples have {', '.join(sample)}"
        )
    tokens = sample[name]
    if tokens.dtype is torch.bool or tokens.is_floating_point() or tokens.is_complex():
        kind = str(tokens.dtype).removeprefix("torch.")
        raise LossError(f"--loss next-token needs tokens but '{name}' is {kind}; store tokens as integers")
    if tokens.dim() < 2:
        raise LossError(f"--loss next-token needs sequences but '{name}' is {list(tokens.shape)}; use another --loss")
    tokens = tokens.long()
    if name == "input_ids" and "attention_mask" in sample:
        mask = sample["attention_mask"]
        if mask.shape != tokens.shape:
            raise LossError(
                f"'attention_mask' is {list(mask.shape)} and 'input_ids' {list(tokens.shape)}; give it the same shape"
            )
        tokens = tokens.masked_fill(mask == 0, IGNORED)
    return functional.pad(tokens[..., 1:], (0, 1), value=IGNORED)


def _counted(logits: Tensor, target: Tensor, options: LossOptions, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The total over all labels that count, and how many they are, or how much they weigh."""
    target = with_ignored(target, options.ignore_index)
    weights = None if weights is None else weights.to(logits)
    total = functional.cross_entropy(
        logits, target, weights, ignore_index=IGNORED, reduction="sum", label_smoothing=options.label_smoothing
    )
    counts = target != IGNORED
    if weights is None:
        return total, counts.sum()
    return total, (weights[target.masked_fill(~counts, 0)] * counts).sum()


def _alike(name: str, outputs: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """Predictions and targets of one shape; a trailing dimension of 1 is left out."""
    made, target = logits_of(outputs), target_of(sample)
    if made.dim() == target.dim() + 1 and made.shape[-1] == 1:
        made = made.squeeze(-1)
    if made.shape != target.shape:
        raise LossError(
            f"--loss {name}: the model returns {list(made.shape)} but the target is {list(target.shape)}; "
            "make them alike"
        )
    return made, target.to(made.dtype)


def _require_classes(logits: Tensor, target: Tensor, axis: int) -> None:
    if logits.dim() < 2:
        raise LossError(
            f"the model returns shape {list(logits.shape)} but cross-entropy needs [samples, classes]; use another "
            "--loss, or change the model's output"
        )
    expected = [*logits.shape[:axis], *logits.shape[axis + 1 :]]
    if list(target.shape) != expected:
        raise LossError(
            f"the model returns {list(logits.shape)}, classes in dimension {axis}, and the target is "
            f"{list(target.shape)}, not {expected}; use another --loss, or change the model's output"
        )


# A user's loss.


def _function(options: LossOptions) -> Function:
    """The loss of a name, as a function of outputs and fields."""
    if facts := LOSSES.get(options.name):
        builtin = load_callable(f"stagewright.model.loss:{facts.computed_by}", "--loss")
        return lambda outputs, sample: builtin(outputs, sample, options)
    if ":" not in options.name:
        raise UserError(
            f"--loss {shown(options.name)} is neither a built-in loss ({', '.join(LOSSES)}) nor "
            f"package.module:function; {did_you_mean(options.name, LOSSES)}"
        )
    function = load_callable(options.name, "--loss")
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise UserError(f"--loss {shown(options.name)} is a class; give a function loss(outputs, sample)")
    if isinstance(function, nn.Module):
        function = _criterion(options.name, function)
    function = users_function(function, is_paired=options.is_paired)

    def loss(outputs: Any, sample: Sample) -> Any:
        try:
            return function(outputs, sample)
        except (UserError, KeyError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's code may raise anything
            raise LossError(
                f"--loss {shown(options.name)} raised {type(error).__name__}: {first_line(error, 200)}"
            ) from error

    return loss


def users_function(function: Callable[..., Any], *, is_paired: bool) -> Function:
    """A user's loss or metric as one of outputs and fields: where samples are pairs, it gets their target alone."""
    if not is_paired:
        return function
    return lambda outputs, sample: function(
        widened(outputs) if isinstance(outputs, Tensor) else outputs, target_of(sample)
    )


def _criterion(name: str, module: nn.Module) -> Callable[[Any, Any], Any]:
    """A criterion of torch, whose own tensors, such as class weights, take the device and the type of the outputs."""
    if trained := [path for path, parameter in module.named_parameters() if parameter.requires_grad]:
        raise UserError(
            f"--loss {shown(name)} has a parameter '{trained[0]}', which no stage would train; make it a part of the "
            "model"
        )
    if type(module) is nn.CrossEntropyLoss and module.reduction == "mean":
        return partial(_exact_entropy, module)
    tensors = dict([*module.named_parameters(), *module.named_buffers()])

    def call(outputs: Any, given: Any) -> Any:
        found = leaves_of(outputs)
        if not tensors or not found:
            return module(outputs, given)
        like = widened(found[0])
        moved = {
            path: tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)
            for path, tensor in tensors.items()
        }
        return torch.func.functional_call(module, moved, (outputs, given))

    return call


def _exact_entropy(module: nn.CrossEntropyLoss, outputs: Tensor, target: Tensor) -> Any:
    """torch's cross-entropy with its total and count, so that labels that do not count are left out exactly."""
    weights = None if module.weight is None else module.weight.to(outputs)
    if not isinstance(target, Tensor) or target.is_floating_point():
        return functional.cross_entropy(outputs, target, weights, label_smoothing=module.label_smoothing)
    return _counted(outputs, target, LossOptions("", module.label_smoothing, module.ignore_index), weights)


def _is_plain_mean(name: str) -> bool:
    """Whether a loss is one of torch's means over elements, of which microbatches of one size have equally many."""
    found = load_object(name, "--loss")
    return type(found) in _ELEMENTWISE and found.reduction == "mean"
