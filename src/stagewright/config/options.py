"""Every option of a run, once: its default, its flag, its help and its place in a TOML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, get_args, get_type_hints

from stagewright.config.sections import Config, require_within


@dataclass(frozen=True, slots=True)
class Option:
    """One option as the command line needs it."""

    key: str  # section.field
    flag: str
    help: str
    type: type
    choices: tuple[str, ...]
    default: Any
    bounds: Mapping[str, float]


def options(*sections: str) -> Iterator[Option]:
    """Every option of the named sections, or of all."""
    hints = get_type_hints(Config)
    for section in fields(Config):
        if not sections or section.name in sections:
            types = get_type_hints(hints[section.name])
            for entry in fields(hints[section.name]):
                yield _as_option(section.name, entry, types[entry.name])


def _as_option(section: str, entry: Field[Any], hint: Any) -> Option:
    alternatives = get_args(hint)
    choices = tuple(choice for choice in alternatives if isinstance(choice, str))
    kind = str if choices else next((kind for kind in alternatives if kind is not type(None)), hint)
    about = entry.metadata
    return Option(
        f"{section}.{entry.name}", about["flag"], about["help"], kind, choices, entry.default, about["bounds"]
    )


def require_options(**given: float | None) -> None:
    """An error where an option of a run, which another command has too, is given beyond its bounds."""
    bounds = {option.flag: option.bounds for option in options()}
    for name, value in given.items():
        if value is not None:
            require_within(f"--{name}", value, **bounds[f"--{name}"])
