"""Configurations from TOML files and other tables, and back to TOML.

`make_config` merges tables into a validated `Config`; what is wrong with them is an error of one line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stagewright.config.sections import RENAMED, Config, options, require_within
from stagewright.errors import did_you_mean


def make_config(*layers: Mapping[str, Any]) -> Config:
    """A configuration from nested tables; later tables override earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            if not isinstance(values, Mapping):
                raise ValueError(
                    f"configuration key '{section}' is not a table; write [{section}]; {_nearest_section(section)}"
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
    """`run.seed=3` as a table with one value, which is read as TOML if it is valid TOML and as text otherwise."""
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
    """The configuration as nested tables, without values that are None."""
    return {
        section.name: {
            entry.name: value
            for entry in fields(getattr(config, section.name))
            if (value := getattr(getattr(config, section.name), entry.name)) is not None
        }
        for section in fields(Config)
    }


def with_new_names(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables that an older version saved in a run folder, with today's names of renamed keys.

    Only for what a run has written: in a file or option of a user the old name is an error.
    """
    renamed: dict[str, Any] = {}
    for section, values in tables.items():
        if not isinstance(values, Mapping):
            renamed[section] = values  # an error that `make_config` reports
            continue
        names = (RENAMED.get(f"{section}.{name}", f"{section}.{name}").partition(".")[2] for name in values)
        renamed[section] = dict(zip(names, values.values(), strict=True))
    return renamed


def as_toml(config: Config) -> str:
    """The configuration as the text of a TOML file that reads back to an equal configuration."""
    lines: list[str] = []
    for section, values in as_tables(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {toml_value(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: str | float | bool) -> str:
    """A string, number or boolean as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


def _refuse_unknown(tables: Mapping[str, Mapping[str, Any]]) -> None:
    known: dict[str, list[str]] = {}
    for entry in options():
        section, _, name = entry.key.partition(".")
        known.setdefault(section, []).append(name)
    for section, values in tables.items():
        if section not in known:
            raise ValueError(f"unknown configuration table [{section}]; {_nearest_section(section)}")
        for name in values:
            key = f"{section}.{name}"
            if key in RENAMED:
                raise ValueError(f"configuration key '{key}' is now '{RENAMED[key]}'; write that")
            if name not in known[section]:
                raise ValueError(f"unknown configuration key '{key}'; {did_you_mean(name, known[section])}")


def _nearest_section(section: str) -> str:
    return did_you_mean(section, [entry.name for entry in fields(Config)])


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
    if entry.metadata["is_list"] and not all(part.strip().isdecimal() for part in value.split(",") if part.strip()):
        raise ValueError(f"{flag} must be comma-separated integers such as 100,200, got '{value}'")
