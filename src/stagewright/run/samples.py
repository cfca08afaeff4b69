"""What of a sample goes where: which fields the model takes and how, and which loss is computed from the others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from stagewright.config.rules import LOSS_OPTIONS
from stagewright.config.sections import Config
from stagewright.data.own import DatasetSource
from stagewright.data.sources import Source
from stagewright.errors import UserError, did_you_mean
from stagewright.model.call import Inputs
from stagewright.model.loss import IGNORED, LossOptions
from stagewright.model.probe import Given

_OWN_LOSS = "model"


@dataclass(frozen=True, slots=True)
class Binding:
    """How a model takes a sample: the fields it gets, and the names of forward's parameters for the last of them."""

    fields: tuple[str, ...]
    names: tuple[str, ...] = ()

    def given(self, fields: Mapping[str, Tensor]) -> Given:
        return Given(Inputs(tuple(fields[name] for name in self.fields), self.names), self.fields, fields)


def bind(model: nn.Module, fields: Sequence[str], source: Source, config: Config) -> Binding:
    """How the model takes samples with these fields: as --inputs says, or all fields that are no targets.

    One input goes by position, unless another parameter than the first has its name; so do those of tuples, which have
    no names. Several named ones go by name, so that data names its fields as forward names its parameters. A model that
    computes its own loss also gets the targets that it has parameters for.
    """
    parameters, takes_any = _parameters(model)
    if config.model.inputs is not None:
        return _as_asked(config.model.inputs, fields, parameters, takes_any=takes_any)
    inputs = [name for name in fields if name not in source.targets]
    own = [name for name in fields if name in source.targets and name in parameters]
    own = own if config.loss.name == _OWN_LOSS else []
    if has_pairs(source):
        return Binding((*inputs, *own), tuple(own))
    inputs += own
    if len(inputs) == 1:
        return Binding((inputs[0],), (inputs[0],) if inputs[0] in parameters[1:] else ())
    foreign = [name for name in inputs if name not in parameters and not takes_any]
    if foreign:
        raise UserError(
            f"the samples have a field '{foreign[0]}' but forward of {type(model).__name__} takes "
            f"{', '.join(parameters) or 'nothing'}; name the fields that it takes by --inputs "
            f"(for example --inputs {','.join(name for name in inputs if name != foreign[0])})"
        )
    return Binding(tuple(inputs), tuple(inputs))


def _parameters(model: nn.Module) -> tuple[list[str], bool]:
    """The names of forward's parameters, and whether it takes any others."""
    try:
        kinds = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return [], True
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in kinds if parameter.kind in plain]
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in kinds)


def _as_asked(text: str, fields: Sequence[str], parameters: Sequence[str], *, takes_any: bool) -> Binding:
    """`a,b` by position or, where forward has parameters of those names, by name; `parameter=field` by name."""
    by_position: list[str] = []
    by_name: dict[str, str] = {}
    parts = [part.strip() for part in text.split(",")]
    is_named = any("=" in part for part in parts) or (len(parts) > 1 and all(part in parameters for part in parts))
    for part in parts:
        parameter, equals, field = part.partition("=")
        field = field if equals else parameter
        if parameter in by_name:
            raise UserError(f"--inputs {text} gives '{parameter}' twice; give each parameter of forward one field")
        if field not in fields:
            raise UserError(
                f"--inputs {text}: the samples have no field '{field}'; they have {', '.join(fields)}; "
                f"{did_you_mean(field, fields)}"
            )
        if not is_named:
            by_position.append(field)
            continue
        if parameter not in parameters and not takes_any:
            raise UserError(
                f"--inputs {text}: forward has no parameter '{parameter}'; it has {', '.join(parameters)}; "
                f"{did_you_mean(parameter, parameters)}"
            )
        by_name[parameter] = field
    return Binding((*by_position, *by_name.values()), tuple(by_name))


def loss_options(config: Config, source: Source, val: Source, fields: Mapping[str, Tensor]) -> LossOptions:
    """The loss that --loss names; `auto` is the one that suits the target."""
    name = config.loss.name
    if name == "auto":
        name = _suitable(source, fields)
        _require_used(name, config)
    ignored = config.loss.ignore_index
    if ignored is None and (source.has_ignored or val.has_ignored):
        ignored = IGNORED
    return LossOptions(name, config.optimizer.label_smoothing, ignored, _class_weights(config), has_pairs(source))


def has_pairs(source: Source) -> bool:
    """Whether samples are pairs or tuples that end with their target, without names of their own."""
    return isinstance(source, DatasetSource) and source.is_paired


def _require_used(name: str, config: Config) -> None:
    """An error about an option that changes nothing with the loss that suits the target."""
    given = {
        "--label-smoothing": config.optimizer.label_smoothing or None,
        "--ignore-index": config.loss.ignore_index,
        "--class-weights": config.loss.class_weights,
    }
    for option, value in given.items():
        losses = LOSS_OPTIONS[option]
        if value is not None and name not in losses:
            raise UserError(
                f"{option} {str(value)[:80]} changes nothing with --loss {name}, which suits the target; leave it out, "
                f"or give --loss {' or '.join(losses)}"
            )


def _suitable(source: Source, fields: Mapping[str, Tensor]) -> str:
    if source.unit[0] == "tokens":
        return "next-token"
    target = next((fields[name] for name in source.targets), None)
    if target is None:
        raise UserError(
            f"the samples have {', '.join(fields)} and no label, labels, target or targets; name what to minimise by "
            "--loss (model: the loss that the model returns)"
        )
    return "mse" if target.is_floating_point() else "cross-entropy"


def _class_weights(config: Config) -> tuple[float, ...]:
    text = config.loss.class_weights
    if text is None:
        return ()
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if not weights or not all(np.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise UserError(f"--class-weights {text[:80]}: give one number of at least 0 for each class: 1,2.5,1")
    return weights
