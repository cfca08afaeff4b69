"""Every option of a run, once: its default, its flag, its help and its place in a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stagewright.config.options import options
from stagewright.config.sections import Config, require_within


def make_config(*layers: Mapping[str, Any]) -> Config:
    """A configuration from nested tables, later ones over earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            if not isinstance(values, Mapping):
                raise ValueError(
                    f"configuration key '{section}' is not a table; write [{section}]{_near_section(section)}"
                )
            merged.setdefault(section, {}).update(values)
    _refuse_unknown(merged)
    return _validated(merged)


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"configuration {path}: not TOML: {error}") from error


def parse_assignment(text: str) -> dict[str, dict[str, Any]]:
    """`run.seed=3` as a table of one value; the value is TOML where it is TOML, and text otherwise."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        raise ValueError(f"--set '{text}' is not section.key=value (for example run.seed=3)")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = value.strip()
    return {section: {name: parsed}}


def as_tables(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as nested tables, without what is absent."""
    return {
        section.name: {
            entry.name: value
            for entry in fields(getattr(config, section.name))
            if (value := getattr(getattr(config, section.name), entry.name)) is not None
        }
        for section in fields(Config)
    }


def as_toml(config: Config) -> str:
    """The configuration as a TOML file that reads back to the same."""
    lines: list[str] = []
    for section, values in as_tables(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)


def _refuse_unknown(tables: Mapping[str, Mapping[str, Any]]) -> None:
    known: dict[str, list[str]] = {}
    for entry in options():
        section, _, name = entry.key.partition(".")
        known.setdefault(section, []).append(name)
    for section, values in tables.items():
        if section not in known:
            raise ValueError(f"unknown configuration table [{section}]{_near_section(section)}")
        for name in values:
            if name not in known[section]:
                raise ValueError(f"unknown configuration key '{section}.{name}'{_near(name, known[section])}")


def _near_section(section: str) -> str:
    return _near(section, [entry.name for entry in fields(Config)])


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"


def _validated(tables: Mapping[str, Any]) -> Config:
    try:
        config = TypeAdapter(Config).validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        raise ValueError(f"configuration value {key} = {first['input']!r}: {first['msg'].lower()}") from error
    for section in fields(Config):
        for entry in fields(getattr(config, section.name)):
            _require_bounds(entry, getattr(getattr(config, section.name), entry.name))
    return config


def _require_bounds(entry: Field[Any], value: Any) -> None:
    flag, bounds = entry.metadata["flag"], entry.metadata["bounds"]
    if bounds and value is not None:
        require_within(flag, value, **bounds)
    if entry.metadata.get("is_list") and not all(part.strip().isdecimal() for part in value.split(",") if part.strip()):
        raise ValueError(f"{flag} '{value}' are not whole numbers between ',' (for example 100,200)")
