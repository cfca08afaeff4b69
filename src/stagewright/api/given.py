"""What a script gives to one call: objects, under names of their own until the call ends, and values, as files."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from stagewright import objects
from stagewright.data.own import PREFIX, Collate, Collated, Samples
from stagewright.errors import UserError
from stagewright.plan.plan import Plan
from stagewright.planning.planner import Choice
from stagewright.profile.profile import Profile

Model = str | nn.Module | Callable[..., Any]
Data = str | Samples | Callable[[], Samples] | tuple[Tensor, ...]
Criterion = str | Callable[[Any, Any], Any]  # a loss or a metric
Metrics = Criterion | Sequence[Criterion] | Mapping[str, Callable[[Any, Any], Any]]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Given(ExitStack):
    """The names and files of what was given; leaving the context forgets them."""

    def model(self, model: Model) -> str:
        """A model's name; of an object, one that it gets."""
        if isinstance(model, str):
            return model
        if not isinstance(model, nn.Module) and not callable(model):
            raise UserError(f"model is of type {type(model).__name__}; give a name, an nn.Module, or a function")
        return self.object(model)

    def data(self, data: Data, collate: Collate | None = None, keyword: str = "data") -> str:
        """The name of a data source; of a dataset, `python:` and one that it gets."""
        if isinstance(data, DataLoader):
            raise UserError(f"{keyword} is a DataLoader; give its dataset, and batch= and workers= beside it")
        if isinstance(data, tuple) and data and all(isinstance(tensor, Tensor) for tensor in data):
            data = TensorDataset(*data)
        if isinstance(data, str):
            if collate is not None and not data.startswith(f"{PREFIX}:"):
                raise UserError(f"collate changes nothing with {keyword} '{data}'; it stacks samples of a Dataset")
            if collate is None:
                return data
            found: Any = Collated(objects.load_object(data.partition(":")[2], keyword), collate)
            return f"{PREFIX}:{self.object(found, data.rpartition(':')[2])}"
        found = data if collate is None else Collated(data, collate)
        return f"{PREFIX}:{self.object(found, getattr(data, '__name__', type(data).__name__))}"

    def loss(self, loss: Criterion) -> str:
        """The name of a loss."""
        return loss if isinstance(loss, str) else self.function(loss, "loss")

    def optimizer(self, optimizer: str | Callable[..., Any]) -> str:
        """The name of an optimizer; one that has its parameters already would not train those of the stages."""
        if isinstance(optimizer, Optimizer):
            raise UserError(
                f"optimizer is a {type(optimizer).__name__} of parameters of this process; give a function that makes "
                f"one of those of a stage: lambda parameters: {type(optimizer).__name__}(parameters, lr=...)"
            )
        return optimizer if isinstance(optimizer, str) else self.function(optimizer, "optimizer")

    def metrics(self, metrics: Metrics) -> str:
        """Names between commas; a function of a mapping has its key as its label."""
        if isinstance(metrics, Mapping):
            for label in metrics:
                if not label or {*label} & {*",=:"}:
                    raise UserError(f"metrics has the name '{label}'; give one without a comma, = or :")
            return ",".join(f"{label}={self.function(found, 'metrics')}" for label, found in metrics.items())
        listed = [metrics] if isinstance(metrics, str) or callable(metrics) else metrics
        return ",".join(found if isinstance(found, str) else self.function(found, "metrics") for found in listed)

    def function(self, function: Any, keyword: str) -> str:
        """The name of a function."""
        if not callable(function):
            raise UserError(f"{keyword} has a {type(function).__name__}; give names or functions")
        return self.object(function)

    def object(self, what: Any, name: str = "") -> str:
        """The name that an object has until the context ends; a function or class of a module has one already."""
        if (known := objects.importable_name(what)) is not None:
            return known
        is_new = all(other is not what for other in objects.given().values())
        put = objects.put(what, name)
        if is_new:  # else a call around this one has given it
            self.callback(objects.remove, put)
        return put

    def file(self, value: Any) -> Any:
        """A plan, the best plan of a choice or a profile as the path of a file with it; anything else as it is."""
        value = value.best.plan if isinstance(value, Choice) else value
        if not isinstance(value, Plan | Profile):
            return os.fspath(value) if isinstance(value, os.PathLike) else value
        path = Path(self.enter_context(TemporaryDirectory())) / f"{type(value).__name__.lower()}.json"
        if isinstance(value, Plan):
            path.write_text(json.dumps(value.describe()))
        else:
            value.write(path)
        return str(path)


def completes(options: type) -> Callable[[_Function], _Function]:
    """Give a function's typed keywords to whoever asks for its signature, as notebooks do to complete them."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        named = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=hint)
            for name, hint in options.__annotations__.items()
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *more])
        return function

    return decorate
