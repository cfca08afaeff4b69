"""Groups of parameters that move alike: as options give them, and as a job holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stagewright.config.optimizers import takers
from stagewright.config.sections import GroupConfig, OptimizerConfig, options, require_within
from stagewright.errors import UserError, did_you_mean, either_of, is_text

_FLAG = "--group"
_EXAMPLE = "'head.*:lr=0.1,weight_decay=0'"
_SETTINGS = tuple(entry.name for entry in fields(GroupConfig) if entry.name != "pattern")


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that move alike, by all their names in the whole model; without names: all parameters."""

    names: tuple[str, ...]
    lr: float
    weight_decay: float
    momentum: float
    beta1: float
    beta2: float

    @staticmethod
    def of_all(config: OptimizerConfig) -> Group:
        """The only group, where the options name no other."""
        return Group((), *(getattr(config, name) for name in _SETTINGS))


def read_groups(given: Any) -> tuple[GroupConfig, ...]:
    """Groups from texts such as head.*:lr=0.1,weight_decay=0 or from tables; what is wrong is an error of one line."""
    return tuple(_read_group(group) for group in (given if isinstance(given, list | tuple) else [given]))


def require_used(config: OptimizerConfig) -> None:
    """An error for a setting of a group that the optimizer does not have."""
    for group in config.groups:
        for name in group.settings:
            if (needed := takers(name)) and config.name not in needed:
                raise UserError(
                    f"{_FLAG} {group}: {name} changes nothing with --optimizer {config.name}; "
                    f"it needs --optimizer {either_of(needed)}"
                )


def _read_group(given: Any) -> GroupConfig:
    if isinstance(given, GroupConfig):
        return given
    if isinstance(given, str):
        given = _parse(given)
    if not isinstance(given, Mapping) or not isinstance(pattern := given.get("pattern"), str) or not pattern.strip():
        raise UserError(f"{_FLAG} {given!r} has no pattern of parameter names; write it as in {_EXAMPLE}")
    if "\0" in pattern or not is_text(pattern):
        raise UserError(f"{_FLAG} has the pattern {pattern!r}, which no parameter's name can match")
    settings = {name: value for name, value in given.items() if name != "pattern" and value is not None}
    bounds = {option.key: option.bounds for option in options("optimizer")}
    for name, value in settings.items():
        if name not in _SETTINGS:
            raise UserError(f"{_FLAG} {pattern}: unknown setting '{name}'; {did_you_mean(str(name), _SETTINGS)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{_FLAG} {pattern}: {name} is {value!r}, which is not a number; write it as in {_EXAMPLE}")
        require_within(f"{_FLAG} {pattern}: {name}", value, **bounds[f"optimizer.{name}"])
    if not settings:
        raise UserError(f"{_FLAG} {pattern} changes nothing; give {', '.join(_SETTINGS[:-1])} or {_SETTINGS[-1]}")
    return GroupConfig(pattern.strip(), **{name: float(value) for name, value in settings.items()})


def _parse(text: str) -> dict[str, Any]:
    """The table that a text stands for; values that are no numbers stay texts."""
    pattern, _, settings = text.rpartition(":")
    found: dict[str, Any] = {"pattern": pattern}
    for setting in settings.split(","):
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or name in found:
            raise UserError(
                f"{_FLAG} '{text}': '{setting}' is {'given twice' if equals else 'not KEY=VALUE'}; "
                f"write it as in {_EXAMPLE}"
            )
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
    return found
