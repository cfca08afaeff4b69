"""Configurations from TOML files and other tables, and back to TOML.

`make_config` merges tables into a `Config` that keeps its bounds and rules; whatever is wrong is an error of one line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stagewright.config.groups import read_groups, require_used
from stagewright.config.rules import check_rules, replaced_options, unused_options
from stagewright.config.sections import DEFAULT_BATCH, RENAMED, Config, Option, options
from stagewright.errors import UserError, did_you_mean, is_text
from stagewright.files import read_text

Tables = Mapping[str, Mapping[str, Any]]  # options by section and name
_OPTIONS = {option.flag: option for option in options()}
# One CPU process in fp32: what a benchmark or a demo trains where it does not say, whatever the machine has.
FIXED: Tables = {
    "plan": {"placement": "0:0", "mode": "stale", "batch": DEFAULT_BATCH},
    "run": {"device": "cpu", "precision": "fp32", "threads": 1},
}


def make_config(*layers: Tables, given: Collection[str] | None = None) -> Config:
    """A configuration from nested tables; later tables override earlier ones.

    `given` are the keys that the user gave for this run, by default all of the layers': an error where one would change
    nothing. The others come from an earlier run or are shared by several; where one of them and a given one exclude
    each other, it is dropped.
    """
    config = config_within_bounds(*layers)
    flags = _flags_of(keys_of(*layers) if given is None else given)
    config = _with_defaults(config, replaced_options(flag_values(config), flags))
    check_rules(flag_values(config), flags)
    require_used(config.optimizer)
    return config


def config_within_bounds(*layers: Tables) -> Config:
    """The configuration of some layers within its bounds; its rules are not checked: there may be more layers."""
    tables = merged(*layers)
    _refuse_unknown(tables)
    if "groups" in tables.get("optimizer", {}):
        tables["optimizer"]["groups"] = read_groups(tables["optimizer"]["groups"])
    return _validated(tables)


def without_unused(config: Config) -> Config:
    """The configuration with the defaults of options that change nothing in it, for options that several runs share."""
    values = flag_values(config)
    return _with_defaults(config, unused_options(values, values))


def _with_defaults(config: Config, flags: Iterable[str]) -> Config:
    for flag in flags:
        config = _OPTIONS[flag].put(config, _OPTIONS[flag].default)
    return config


def merged(*layers: Tables) -> dict[str, dict[str, Any]]:
    """One table of several; later ones override earlier ones."""
    tables: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.items():
            if not isinstance(values, Mapping):
                raise UserError(
                    f"configuration key '{section}' is not a table; write [{section}]; {_nearest_section(section)}"
                )
            tables.setdefault(section, {}).update(values)
    return tables


def keys_of(*layers: Tables) -> set[str]:
    """The keys that tables hold, such as run.seed."""
    return {f"{section}.{name}" for section, values in merged(*layers).items() for name in values}


def changed_keys(tables: Tables) -> set[str]:
    """The keys whose value is not the default: what a file that lists every option asks for."""
    default = merged(as_tables(Config()))
    return {
        f"{section}.{name}"
        for section, values in merged(tables).items()
        for name, value in values.items()
        if default.get(section, {}).get(name) != value
    }


def flag_values(config: Config) -> dict[str, Any]:
    """The value of every option, by its flag."""
    return {flag: option.of(config) for flag, option in _OPTIONS.items()}


def refuse_unused(configurations: Sequence[Tables], keys: Collection[str]) -> None:
    """Raise for a key that several configurations share and that changes nothing in any of them."""
    flags = _flags_of(keys)
    unused = [unused_options(flag_values(make_config(tables, given=())), flags) for tables in configurations]
    for flag, error in unused[0].items() if unused else ():
        if all(flag in found for found in unused):
            raise error


def _flags_of(keys: Collection[str]) -> set[str]:
    return {flag for flag, option in _OPTIONS.items() if option.key in keys}


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UserError(f"configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a plain ValueError
        raise UserError(f"configuration {path}: not TOML: {error}") from error


def parse_assignment(text: str) -> dict[str, dict[str, Any]]:
    """`run.seed=3` as a table with one value, which is read as TOML if it is valid TOML and as text otherwise."""
    key, equals, value = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        raise UserError(f"--set '{text}' is not section.key=value (for example run.seed=3)")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value.strip()
    return {section: {name: parsed}}


def as_tables(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as nested tables, without values that are None."""
    return {
        section.name: {
            entry.name: [{"pattern": g.pattern, **g.settings} for g in value] if isinstance(value, tuple) else value
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


def toml_value(value: str | float | bool | list[Any] | dict[str, Any]) -> str:
    """A string, number or boolean as TOML, a list of them, or a table of them on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml_value(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    return repr(value)


def _refuse_unknown(tables: Mapping[str, Mapping[str, Any]]) -> None:
    for section, values in tables.items():
        known = [option.key for option in options() if option.key.startswith(f"{section}.")]
        if not known:
            raise UserError(f"unknown configuration table [{section}]; {_nearest_section(section)}")
        for key in (f"{section}.{name}" for name in values):
            if key in RENAMED:
                raise UserError(f"configuration key '{key}' is now '{RENAMED[key]}'; write that")
            if key not in known:
                raise UserError(f"unknown configuration key '{key}'; {did_you_mean(key, known)}")


def _nearest_section(section: str) -> str:
    return did_you_mean(section, [entry.name for entry in fields(Config)])


@cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _validated(tables: Mapping[str, Any]) -> Config:
    try:
        config = _adapter().validate_python(tables)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        raise UserError(f"configuration value {key} = {first['input']!r}: {first['msg'].lower()}") from error
    for option in options():
        _require_bounds(option, option.of(config))
    return config


def _require_bounds(option: Option, value: Any) -> None:
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{option.flag} is {value!r}, which has a zero byte; no path or name can have one")
    if isinstance(value, str) and not is_text(value):
        raise UserError(f"{option.flag} is {value!r}, which is not UTF-8; a run's files store it as text, so rename it")
    option.check(value)
    if option.is_list and not all(part.strip().isdecimal() for part in value.split(",") if part.strip()):
        raise UserError(f"{option.flag} must be comma-separated integers such as 100,200, got '{value}'")
