"""Train from Python: the options of `stagewright train` as keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagewright.config.sections import RENAMED, options
from stagewright.errors import UserError, did_you_mean
from stagewright.run.resume import resumed_config
from stagewright.run.train import Result, run


def train(model: str | Callable[..., object] | None = None, **settings: Any) -> Result:
    """Train a model, with options as keywords: `placement="0:0-6.0:7"`, `weight_decay=1e-4`, and so on.

    `model` is a zoo name, `package.module:factory`, or a factory function that ranks can import.
    `metric` is a name, such a function, or a list of both.
    """
    by_keyword = {option.flag.removeprefix("--").replace("-", "_"): option.key for option in options()}
    renamed = {old.partition(".")[2]: new.partition(".")[2] for old, new in RENAMED.items()}
    tables: dict[str, dict[str, Any]] = {"model": {} if model is None else {"name": _name_of(model)}}
    if (metrics := settings.get("metric")) is not None:
        given = metrics if isinstance(metrics, list | tuple) else [metrics]
        settings["metric"] = ",".join(str(_name_of(metric)) for metric in given)
    for keyword, value in settings.items():
        if new := renamed.get(keyword):
            raise UserError(f"option '{keyword}' is now '{new}'; give {new}={value!r}")
        if keyword not in by_keyword:
            raise UserError(f"unknown option '{keyword}'; {did_you_mean(keyword, by_keyword)}")
        section, _, name = by_keyword[keyword].partition(".")
        tables.setdefault(section, {})[name] = value
    return run(resumed_config(tables))


def _name_of(given: str | Callable[..., object]) -> str:
    """A name, or that by which ranks import a function."""
    return f"{given.__module__}:{given.__qualname__}" if callable(given) else given
