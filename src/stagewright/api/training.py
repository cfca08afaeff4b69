"""Train from Python: `stagewright train` as a function, with objects where the command takes names."""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Unpack

from rich.console import Console

from stagewright.api.given import Criterion, Data, Given, Metrics, Model, completes
from stagewright.api.options import TrainOptions
from stagewright.config.sections import RENAMED, options
from stagewright.data.own import Collate
from stagewright.errors import UserError, did_you_mean
from stagewright.plan.plan import Plan
from stagewright.planning.planner import Choice
from stagewright.profile.profile import Profile
from stagewright.run.observe.monitor import Callback
from stagewright.run.resume import resumed_config
from stagewright.run.train import Result, run

_OPTIONS = {option.keyword: option for option in options()}
_PLAIN = TrainOptions.__annotations__  # the keywords below are the others


@completes(TrainOptions)
def train(
    model: Model | None = None,
    data: Data | None = None,
    *,
    val: Data | None = None,
    collate: Collate | None = None,
    loss: Criterion | None = None,
    metrics: Metrics | None = None,
    optimizer: str | Callable[..., Any] | None = None,
    plan: str | os.PathLike[str] | Plan | Choice | None = None,
    profile: str | os.PathLike[str] | Profile | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool | None = None,
    **options: Unpack[TrainOptions],
) -> Result:
    """Train a model over stages; every option of `stagewright train` is a keyword.

    model: a name, an nn.Module, which stays as it is, or a function that makes one.
    data, val: a name, a map-style Dataset, a function that makes one, or a tuple of tensors. `collate` stacks samples.
    loss: a name, a function or a criterion. Where samples are pairs or tuples it is called with (outputs, target),
    where they are dicts or of a named source with (outputs, sample). It returns a mean, or (total, count).
    metrics: names and functions, or {name: function}; functions are called as a loss is, and return a number (the mean
    over the samples given), (total, count) or {name: (total, count)}.
    optimizer: a name, or a function of parameters that makes an optimizer of torch.
    plan: a file, or what `stagewright.plan` returned; profile: a file, or what `stagewright.profile` returned.
    callbacks: functions that are called in this process with every record (Step, Evaluated, Saved, ...), in order;
    where one returns True, the run stops after a checkpoint.
    progress: show it; by default in a terminal and in a notebook.
    """
    with Given() as given:
        named = {
            "model": None if model is None else given.model(model),
            "data": None if data is None else given.data(data, collate),
            "val": None if val is None else given.data(val, collate, "val"),
            "loss": None if loss is None else given.loss(loss),
            "metric": None if metrics is None else given.metrics(metrics),
            "optimizer": None if optimizer is None else given.optimizer(optimizer),
            "plan": given.file(plan),
            "profile": given.file(profile),
        }
        if collate is not None and data is None and val is None:
            raise UserError("collate changes nothing without data; give a Dataset as well")
        tables = tables_of(
            {**{name: value for name, value in named.items() if value is not None}, **known_options(options, train)}
        )
        listeners = [callbacks] if callable(callbacks) else callbacks
        keeps_weights = not isinstance(model, str | None)
        return run(resumed_config(tables), _console(progress), listeners, keeps_weights=keeps_weights)


def known_options(options: Mapping[str, Any], of: Callable[..., Any]) -> Mapping[str, Any]:
    """The options of a function, or an error that suggests the nearest one for a name that is not an option."""
    renamed = {old.partition(".")[2]: new.partition(".")[2] for old, new in RENAMED.items()}
    for keyword, value in options.items():
        if new := renamed.get(keyword):
            raise UserError(f"option '{keyword}' is now '{new}'; give {new}={value!r}")
        if keyword not in _PLAIN:
            known = [*signature(of).parameters, *_PLAIN]
            raise UserError(f"stagewright.{of.__name__} has no option '{keyword}'; {did_you_mean(keyword, known)}")
    return options


def tables_of(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options by their keywords as the tables of a configuration."""
    tables: dict[str, dict[str, Any]] = {}
    for keyword, value in values.items():
        section, _, name = _OPTIONS[keyword].key.partition(".")
        tables.setdefault(section, {})[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return tables


def _console(progress: bool | None) -> Console:
    """Where a run shows its progress, if it does: lines in a notebook, a bar as well in a terminal."""
    in_notebook = hasattr(builtins, "__IPYTHON__") and not sys.stdout.isatty()
    shown = in_notebook or sys.stdout.isatty() if progress is None else progress
    return Console(force_jupyter=False) if shown else _Warnings(force_terminal=False)


class _Warnings(Console):
    """Shows nothing; what a run warns about is a warning of Python."""

    def print(self, *shown: Any, **style: Any) -> None:
        for line in map(str, shown):
            if line.startswith("warning: "):
                warnings.warn(line.removeprefix("warning: "), stacklevel=2)
