"""The catalog, from its TOML files and a user's own: devices, links, software and clusters, with sources.

`shipped` is the catalog of the package; `open_cluster` reads what `--cluster` names. An error in a table is one line.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from stagewright.cluster.specs import ALIKE, OWN, Catalog, DeviceSpec, Family, HostBudget, Software, find
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.errors import UserError, did_you_mean
from stagewright.files import read_text
from stagewright.metrics import MIB

_FILES = ("devices.toml", "links.toml", "software.toml", "clusters.toml", "calibration.toml")
_MOST_DEVICES = 65536
_MAY_BE_ZERO = ("jitter", "half_jitter", "network_jitter", "overhead")  # losses of software
_KEYS: Mapping[str, tuple[str, ...]] = {  # of each table; some are only for people
    "device": (
        *("title", "aliases", "memory_mib", "bandwidth", "peak", "efficiency", "watts", "usd", "pcie"),
        *("nvlink_kind", "nvlink", "sms", "boost_mhz", "family", "evidence"),
    ),
    "family": ("title", "convolution", "product", "memory"),
    "link": ("title", "bandwidth", "latency", "staged"),
    "cluster": ("title", "network", "machines"),
    "machine": ("device", "devices", "count", "cores", "levels", "host", "parts", "watts", "is_shared"),
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
    about, _, _ = source.get("text", "no source").partition(": ")  # behind it are the figures
    return f"{source.get('date', 'no date')}: {about}"


def open_cluster(text: str) -> tuple[Catalog, Cluster]:
    """A cluster by name or from a user's file, and the catalog with what that file adds."""
    if not (text.endswith(".toml") or Path(text).is_file()):
        catalog = shipped()
        return catalog, catalog.cluster(text)
    catalog = read_catalog([text])
    own = list(_read_file(text).get("cluster", {}))
    if len(own) != 1:
        raise UserError(f"cluster file {text} describes {len(own)} clusters; describe one as [cluster.NAME]")
    return catalog, catalog.clusters[own[0]]


@cache
def _shipped_tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    folder = resources.files(__package__)
    for name in _FILES:
        _merge(tables, tomllib.loads(folder.joinpath(name).read_text()))
    return tables


def read_catalog(
    own_files: Iterable[str], overrides: Mapping[str, Any] | None = None, replaced: Mapping[str, Any] | None = None
) -> Catalog:
    """The catalog of the shipped files; a user's files override them, and `overrides` override both.

    `replaced`: tables that take the place of the shipped ones, instead of being merged with them.
    """
    tables = deepcopy(_shipped_tables()) | dict(replaced or {})
    for path in own_files:
        _merge(tables, _read_file(path))
    _merge(tables, overrides or {})
    return make_catalog(tables)


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UserError(f"cluster file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"cluster file {path}: not TOML: {error}") from error


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
    families = _families(tables)
    devices = {name: _device(name, entry, sources, families) for name, entry in _section(tables, "device").items()}
    for name, entry in _section(tables, "device").items():
        for alias in _names(entry.get("aliases", []), f"device.{name}.aliases"):
            devices.setdefault(alias, devices[name])
    devices = _with_families(devices)
    software = {name: _software(name, entry, links) for name, entry in _section(tables, "software").items()}
    budget = _Table(_section(tables, "host"), "host")
    host = HostBudget(*(budget.positive(name) for name in ("budget", "slow", "fast")))
    hosts = {name: _figure(value, f"hosts.{name}") for name, value in _section(tables, "hosts").items()}
    clusters = {
        name: _cluster(name, entry, links, devices, host, hosts.get(f"cluster {name}"))
        for name, entry in _section(tables, "cluster").items()
    }
    decode = _figure(_section(tables, "loader")["decode"], "loader.decode")
    errors = {name: _figure(value, f"errors.{name}") for name, value in _section(tables, "errors").items()}
    return Catalog(devices, links, software, clusters, decode, host, hosts, errors)


def _with_families(devices: Mapping[str, DeviceSpec]) -> dict[str, DeviceSpec]:
    """The devices, with what is known of their speed by other cards of their chip family."""
    seen = dict.fromkeys((device.family.name, units) for device in devices.values() for units in device.evidence)
    return {
        name: replace(
            device,
            evidence={units: ALIKE for family, units in seen if family and family == device.family.name}
            | dict(device.evidence),
        )
        for name, device in devices.items()
    }


def _families(tables: Mapping[str, Any]) -> dict[str, Family]:
    """Every chip family: its factors times what the kernels of all families reach."""
    kernels = _section(tables, "kernels")
    slope, grouped = (_figure(kernels[name], f"kernels.{name}") for name in ("slope", "grouped"))
    shares = {
        kind: {units: _figure(value, f"kernels.{kind}.{units}") for units, value in kernels[kind].items()}
        for kind in ("convolution", "product")
    }
    memory = _figure(kernels["memory"], "kernels.memory")
    families = {"": Family("", shares["convolution"], shares["product"], memory, slope, grouped)}
    for name, entry in _section(tables, "family").items():
        table = _Table(entry, f"family.{name}", _KEYS["family"])
        factors = {kind: _Table(table.get(kind, {}), f"{table.where}.{kind}") for kind in shares}
        own = {
            kind: {units: share * factors[kind].positive(units, 1.0) for units, share in known.items()}
            for kind, known in shares.items()
        }
        moved = memory * table.positive("memory", 1.0)
        families[name] = Family(name, own["convolution"], own["product"], moved, slope, grouped)
    return families


def _section(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tables[name]
    if not isinstance(section, Mapping):
        raise UserError(f"catalog: {name} is {str(section)[:40]!r}, not a table; write [{name}.NAME]")
    return section


def _names(entry: Any, where: str) -> list[str]:
    if not isinstance(entry, list) or not all(isinstance(name, str) for name in entry):
        raise UserError(f'catalog: {where} is {str(entry)[:40]!r}, not a list of names; write ["NAME"]')
    return entry


def _figure(entry: Any, where: str) -> float:
    """A number, with or without its source."""
    value = entry[0] if isinstance(entry, list) and entry else entry
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"catalog: {where} is {str(entry)[:40]!r}, not a number")
    return float(value)


class _Table:
    """One table of the catalog; what is wrong with it is an error that says where it stands."""

    def __init__(self, entry: Any, where: str, known: Sequence[str] = ()) -> None:
        if not isinstance(entry, Mapping):
            raise UserError(f"catalog: {where} is not a table; write [{where}]")
        self.entry, self.where = entry, where
        for key in entry:
            if known and key not in known:
                hint = did_you_mean(key, known)
                listed = "" if hint.startswith("known") else f" (known: {', '.join(known)})"
                raise UserError(f"catalog: {where} has the unknown key '{key}'{listed}; {hint}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which the table must have unless there is a default."""
        found = self.entry.get(key, default)
        if found is None:
            raise UserError(f"catalog: {self.where} has no '{key}'; it needs one")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        return _figure(self.get(key, default), f"{self.where}.{key}")

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not 0 < value < float("inf"):
            raise UserError(f"catalog: {self.where}.{key} is {value:g}; it must be above 0")
        return value

    def optional(self, key: str) -> float | None:
        return self.positive(key) if key in self.entry else None


def _link(name: str, entry: Mapping[str, Any]) -> Link:
    table = _Table(entry, f"link.{name}", _KEYS["link"])
    return Link(name, table.positive("bandwidth"), table.number("latency", 0.0), bool(table.get("staged", False)))


def _measured(figure: Any, sources: Mapping[str, Any]) -> str | None:
    """The measurements behind a figure, by its source; a figure without a source is the user's own."""
    if not isinstance(figure, list):
        return OWN
    source = sources.get(figure[1]) if len(figure) > 1 and isinstance(figure[1], str) else None
    return str(source["measured"]) if isinstance(source, Mapping) and "measured" in source else None


def _device(
    name: str, entry: Mapping[str, Any], sources: Mapping[str, Any], families: Mapping[str, Family]
) -> DeviceSpec:
    table = _Table(entry, f"device.{name}", _KEYS["device"])
    peaks = _Table(table.get("peak"), f"{table.where}.peak")
    efficiency = _Table(table.get("efficiency", {}), f"{table.where}.efficiency")
    if "fp32" not in peaks.entry:
        raise UserError(f"catalog: {peaks.where} needs fp32; write [{peaks.where}]")
    return DeviceSpec(
        name,
        str(table.get("title", name)),
        int(table.positive("memory_mib") * MIB),
        table.positive("bandwidth"),
        {key: peaks.positive(key) for key in peaks.entry},
        {key: efficiency.positive(key) for key in efficiency.entry},
        table.optional("watts"),
        table.optional("usd"),
        int(table.number("pcie", 0)),
        str(entry["nvlink_kind"]) if "nvlink_kind" in entry else None,
        {key: basis for key, value in efficiency.entry.items() if (basis := _measured(value, sources))},
        find(families, str(table.get("family", "")), "family"),
        {
            str(key): str(value)
            for key, value in _Table(table.get("evidence", {}), f"{table.where}.evidence").entry.items()
        },
    )


def _software(name: str, entry: Mapping[str, Any], links: Mapping[str, Link]) -> Software:
    """One training system: each of its keys is a field, but that sizes are in MiB and a hand-over is a link's name."""
    table = _Table(entry, f"software.{name}")
    hints = get_type_hints(Software)
    changes: dict[str, Any] = {}
    for key in entry:
        field = key.removesuffix("_mib")
        if key == "handover":
            changes[key] = find(links, str(entry[key]), "link")
        elif field != key and field in hints:
            changes[field] = int(table.number(key) * MIB)
        elif hints.get(key) is bool:
            changes[key] = bool(entry[key])
        elif hints.get(key) is not str and key in hints:
            number = table.number if key in _MAY_BE_ZERO else table.positive
            changes[key] = int(number(key)) if hints[key] is not float else number(key)
    return Software(name, str(table.get("title", name)), **{"efficiency": table.positive("efficiency", 1.0)} | changes)


def _cluster(
    name: str,
    entry: Any,
    links: Mapping[str, Link],
    devices: Mapping[str, DeviceSpec],
    host: HostBudget,
    measured: float | None,
) -> Cluster:
    where = f"cluster.{name}"
    described = _Table(entry, where, _KEYS["cluster"]).get("machines")
    if not isinstance(described, list) or not described:
        raise UserError(f"catalog: {where}.machines is empty; describe one as [[{where}.machines]]")
    machines: list[Machine] = []
    for one in described:
        table = _Table(one, f"{where}.machines", _KEYS["machine"])
        count = int(table.positive("count", 1))
        machines += [_machine(table, links, devices, host, measured)] * min(count, _MOST_DEVICES + 1)
        if sum(machine.devices or 0 for machine in machines) > _MOST_DEVICES:
            raise UserError(f"catalog: {where} has more than {_MOST_DEVICES} devices")
    network = find(links, str(entry["network"]), "link") if "network" in entry else None
    cluster = Cluster(tuple(machines), name, network)
    for one, other in itertools.pairwise(cluster.devices):
        cluster.path(one, other)  # raises if they have no link, so that no plan can need a missing one
    return cluster


def _machine(
    table: _Table,
    links: Mapping[str, Link],
    devices: Mapping[str, DeviceSpec],
    host: HostBudget,
    measured: float | None,
) -> Machine:
    where, kind = table.where, str(table.get("device"))
    find(devices, kind, "device")
    count = int(table.positive("devices"))
    if count > _MOST_DEVICES:
        raise UserError(f"catalog: {where}.devices is {count}; the most is {_MOST_DEVICES}")
    levels: list[Level] = []
    described = table.get("levels", [])
    if not isinstance(described, list):
        raise UserError(f"catalog: {where}.levels is not a list; describe one as [[{where}.levels]]")
    for one in described:
        level = _Table(one, f"{where}.levels", _KEYS["level"])
        link, lanes = find(links, str(level.get("link")), "link"), level.positive("lanes", 1)
        groups = level.get("groups", []) or [list(range(count))]
        if not isinstance(groups, list) or not all(
            isinstance(group, list) and all(isinstance(index, int) for index in group) for group in groups
        ):
            raise UserError(f"catalog: {where}.levels.groups are not lists of devices (for example [[0, 1], [2, 3]])")
        levels.append(Level(replace(link, bandwidth=link.bandwidth * lanes), tuple(tuple(group) for group in groups)))
    cores = table.optional("cores")
    given = table.optional("host") or measured
    parts = _Table(table.get("parts", {}), f"{where}.parts")
    return Machine(
        count,
        kind,
        tuple(levels),
        None if cores is None else int(cores),
        host.usual(count) if given is None else given,
        knows_host=given is not None,
        parts=tuple((str(name), parts.positive(name)) for name in parts.entry),
        watts=table.optional("watts") or 0.0,
        is_shared=bool(table.get("is_shared", False)),
    )
