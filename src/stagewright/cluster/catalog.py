"""The catalog, from its TOML files and a user's own: devices, links, software and clusters, with sources.

`shipped` is the catalog of the package; `open_cluster` reads what `--cluster` names. An error in a table is one line.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from stagewright.cluster.specs import Catalog, DeviceSpec, Software, find
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.errors import did_you_mean
from stagewright.metrics import MIB

_FILES = ("devices.toml", "links.toml", "software.toml", "clusters.toml", "calibration.toml")
_MOST_DEVICES = 65536
_KEYS: Mapping[str, tuple[str, ...]] = {  # of each table; some are only for people
    "device": (
        *("title", "aliases", "memory_mib", "bandwidth", "peak", "efficiency", "watts", "usd", "pcie"),
        *("nvlink_kind", "nvlink", "sms", "boost_mhz"),
    ),
    "link": ("title", "bandwidth", "latency", "staged"),
    "cluster": ("title", "network", "machines"),
    "machine": ("device", "devices", "count", "cores", "levels"),
    "level": ("link", "lanes", "groups"),
}


@cache
def shipped() -> Catalog:
    """The catalog that comes with the package."""
    return read_catalog(())


def price_source(device: str) -> str:
    """The source and date of the catalog's price of a device."""
    tables: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("devices.toml").read_text())
    figure = tables["device"].get(device, {}).get("usd")
    source = tables["source"].get(figure[1], {}) if isinstance(figure, list) else {}
    return f"{source.get('date', 'no date')}: {source.get('text', 'no source')}"


def open_cluster(text: str) -> tuple[Catalog, Cluster]:
    """A cluster by name or from a user's file, and the catalog with what that file adds."""
    if not (text.endswith(".toml") or Path(text).is_file()):
        catalog = shipped()
        return catalog, catalog.cluster(text)
    catalog = read_catalog([text])
    own = list(_read_file(text).get("cluster", {}))
    if len(own) != 1:
        raise ValueError(f"cluster file {text} describes {len(own)} clusters; describe one as [cluster.NAME]")
    return catalog, catalog.clusters[own[0]]


def read_catalog(own_files: Iterable[str], overrides: Mapping[str, Any] | None = None) -> Catalog:
    """The catalog of the shipped files; a user's files override them, and `overrides` override both."""
    tables: dict[str, dict[str, Any]] = {}
    folder = resources.files(__package__)
    for name in _FILES:
        _merge(tables, tomllib.loads(folder.joinpath(name).read_text()))
    for path in own_files:
        _merge(tables, _read_file(path))
    _merge(tables, overrides or {})
    return make_catalog(tables)


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cluster file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cluster file {path}: not TOML: {error}") from error


def _merge(tables: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(tables.get(key, {}), dict):
            _merge(tables.setdefault(key, {}), value)
        else:
            tables[key] = value


def make_catalog(tables: Mapping[str, Any]) -> Catalog:
    """The catalog of merged tables."""
    links = {name: _link(name, entry) for name, entry in _section(tables, "link").items()}
    sources = _section(tables, "source")
    devices = {name: _device(name, entry, sources) for name, entry in _section(tables, "device").items()}
    for name, entry in _section(tables, "device").items():
        for alias in _names(entry.get("aliases", []), f"device.{name}.aliases"):
            devices.setdefault(alias, devices[name])
    software = {name: _software(name, entry, links) for name, entry in _section(tables, "software").items()}
    clusters = {name: _cluster(name, entry, links, devices) for name, entry in _section(tables, "cluster").items()}
    decode = _figure(_section(tables, "loader")["decode"], "loader.decode")
    return Catalog(devices, links, software, clusters, decode)


def _section(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tables[name]
    if not isinstance(section, Mapping):
        raise ValueError(f"catalog: {name} is {str(section)[:40]!r}, not a table; write [{name}.NAME]")
    return section


def _names(entry: Any, where: str) -> list[str]:
    if not isinstance(entry, list) or not all(isinstance(name, str) for name in entry):
        raise ValueError(f'catalog: {where} is {str(entry)[:40]!r}, not a list of names; write ["NAME"]')
    return entry


def _figure(entry: Any, where: str) -> float:
    """A number, with or without its source."""
    value = entry[0] if isinstance(entry, list) and entry else entry
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"catalog: {where} is {str(entry)[:40]!r}, not a number")
    return float(value)


def _positive(entry: Any, where: str) -> float:
    value = _figure(entry, where)
    if not 0 < value < float("inf"):
        raise ValueError(f"catalog: {where} is {value:g}; it must be above 0")
    return value


def _require_table(entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"catalog: {where} is not a table; write [{where}]")


def _required(entry: Mapping[str, Any], key: str, where: str) -> Any:
    _require_table(entry, where)
    if key not in entry:
        raise ValueError(f"catalog: {where} has no '{key}'; it needs one")
    return entry[key]


def _refuse_unknown(entry: Mapping[str, Any], table: str, where: str) -> None:
    """Raise if a table has an unknown key, such as a misspelt one."""
    for key in entry:
        if key not in _KEYS[table]:
            hint = did_you_mean(key, _KEYS[table])
            listed = "" if hint.startswith("known") else f" (known: {', '.join(_KEYS[table])})"
            raise ValueError(f"catalog: {where} has the unknown key '{key}'{listed}; {hint}")


def _optional(entry: Mapping[str, Any], key: str, where: str) -> float | None:
    return _positive(entry[key], f"{where}.{key}") if key in entry else None


def _link(name: str, entry: Mapping[str, Any]) -> Link:
    where = f"link.{name}"
    bandwidth = _positive(_required(entry, "bandwidth", where), f"{where}.bandwidth")
    _refuse_unknown(entry, "link", where)
    latency = _figure(entry.get("latency", 0.0), f"{where}.latency")
    return Link(name, bandwidth, latency, bool(entry.get("staged", False)))


def _measured(figure: Any, sources: Mapping[str, Any]) -> str | None:
    """The measurements behind a figure, by its source; a figure without a source is the user's own."""
    if not isinstance(figure, list):
        return "your own"
    source = sources.get(figure[1]) if len(figure) > 1 and isinstance(figure[1], str) else None
    return str(source["measured"]) if isinstance(source, Mapping) and "measured" in source else None


def _device(name: str, entry: Mapping[str, Any], sources: Mapping[str, Any]) -> DeviceSpec:
    where = f"device.{name}"
    peaks = _required(entry, "peak", where)
    _refuse_unknown(entry, "device", where)
    efficiency = entry.get("efficiency", {})
    if not isinstance(peaks, Mapping) or "fp32" not in peaks or not isinstance(efficiency, Mapping):
        raise ValueError(f"catalog: {where}.peak needs fp32; write [{where}.peak]")
    return DeviceSpec(
        name,
        str(entry.get("title", name)),
        int(_positive(_required(entry, "memory_mib", where), f"{where}.memory_mib") * MIB),
        _positive(_required(entry, "bandwidth", where), f"{where}.bandwidth"),
        {key: _positive(value, f"{where}.peak.{key}") for key, value in peaks.items()},
        {key: _positive(value, f"{where}.efficiency.{key}") for key, value in efficiency.items()},
        _optional(entry, "watts", where),
        _optional(entry, "usd", where),
        int(_figure(entry.get("pcie", 0), f"{where}.pcie")),
        str(entry["nvlink_kind"]) if "nvlink_kind" in entry else None,
        {key: basis for key, value in efficiency.items() if (basis := _measured(value, sources))},
    )


def _software(name: str, entry: Mapping[str, Any], links: Mapping[str, Link]) -> Software:
    where = f"software.{name}"
    _require_table(entry, where)
    made = Software(name, str(entry.get("title", name)), _positive(entry.get("efficiency", 1.0), f"{where}.efficiency"))
    numbers: Mapping[str, Callable[[float], Any]] = {
        "update_passes": float,
        "temporaries": float,
        "in_flight": int,
        "input_bytes": int,
    }
    changes: dict[str, Any] = {
        key: kind(_positive(entry[key], f"{where}.{key}")) for key, kind in numbers.items() if key in entry
    }
    for key in ("fused", "channels_last", "whole_batches", "keeps_workspace", "blocking"):
        if key in entry:
            changes[key] = bool(entry[key])
    if "handover" in entry:
        changes["handover"] = find(links, str(entry["handover"]), "link")
    for key in ("context", "workspace", "loader"):
        if f"{key}_mib" in entry:
            changes[key] = int(_figure(entry[f"{key}_mib"], f"{where}.{key}_mib") * MIB)
    return replace(made, **changes)


def _cluster(name: str, entry: Any, links: Mapping[str, Link], devices: Mapping[str, DeviceSpec]) -> Cluster:
    where = f"cluster.{name}"
    described = _required(entry, "machines", where)
    _refuse_unknown(entry, "cluster", where)
    if not isinstance(described, list) or not described:
        raise ValueError(f"catalog: {where}.machines is empty; describe one as [[{where}.machines]]")
    machines: list[Machine] = []
    for machine in described:
        _required(machine, "device", f"{where}.machines")
        _refuse_unknown(machine, "machine", f"{where}.machines")
        count = int(_positive(machine.get("count", 1), f"{where}.machines.count"))
        machines += [_machine(machine, f"{where}.machines", links, devices)] * min(count, _MOST_DEVICES + 1)
        if sum(machine.devices or 0 for machine in machines) > _MOST_DEVICES:
            raise ValueError(f"catalog: {where} has more than {_MOST_DEVICES} devices")
    network = find(links, str(entry["network"]), "link") if "network" in entry else None
    cluster = Cluster(tuple(machines), name, network)
    for one, other in itertools.pairwise(cluster.devices):
        cluster.path(one, other)  # raises if they have no link, so that no plan can need a missing one
    return cluster


def _machine(entry: Any, where: str, links: Mapping[str, Link], devices: Mapping[str, DeviceSpec]) -> Machine:
    kind = str(_required(entry, "device", where))
    find(devices, kind, "device")
    count = int(_positive(_required(entry, "devices", where), f"{where}.devices"))
    if count > _MOST_DEVICES:
        raise ValueError(f"catalog: {where}.devices is {count}; the most is {_MOST_DEVICES}")
    levels: list[Level] = []
    described = entry.get("levels", [])
    if not isinstance(described, list):
        raise ValueError(f"catalog: {where}.levels is not a list; describe one as [[{where}.levels]]")
    for level in described:
        link = find(links, str(_required(level, "link", f"{where}.levels")), "link")
        _refuse_unknown(level, "level", f"{where}.levels")
        lanes = _positive(level.get("lanes", 1), f"{where}.levels.lanes")
        groups = level.get("groups") or [list(range(count))]
        if not isinstance(groups, list) or not all(
            isinstance(group, list) and all(isinstance(index, int) for index in group) for group in groups
        ):
            raise ValueError(f"catalog: {where}.levels.groups are not lists of devices (for example [[0, 1], [2, 3]])")
        levels.append(Level(replace(link, bandwidth=link.bandwidth * lanes), tuple(tuple(group) for group in groups)))
    cores = _optional(entry, "cores", where)
    return Machine(count, kind, tuple(levels), None if cores is None else int(cores))
