"""Hardware, links, software and clusters as TOML, each figure with its source and date."""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from stagewright.cluster import Cluster, Level, Link, Machine

_FILES = ("devices.toml", "links.toml", "software.toml", "clusters.toml", "calibration.toml")
MIB = 1 << 20
_MOST_DEVICES = 65536
_Entry = TypeVar("_Entry")
_EFFICIENCY = 0.85  # of a device that no published run has measured
ALONE = "one run"
_KEYS: Mapping[str, tuple[str, ...]] = {  # of each table; what is not read is there for people
    "device": (
        *("title", "aliases", "memory_mib", "bandwidth", "peak", "efficiency", "watts", "usd", "pcie"),
        *("nvlink_kind", "nvlink", "sms", "boost_mhz"),
    ),
    "link": ("title", "bandwidth", "latency", "staged"),
    "cluster": ("title", "network", "machines"),
    "machine": ("device", "devices", "count", "cores", "levels"),
    "level": ("link", "lanes", "groups"),
}


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a data sheet says of a device, and what was measured on it."""

    name: str
    title: str
    memory: int  # bytes
    bandwidth: float
    peak: Mapping[str, float]  # operations a second by precision
    efficiency: Mapping[str, float]  # share of the peak that large matrix products reach, by precision
    watts: float | None = None
    usd: float | None = None
    pcie: int = 0  # generation
    nvlink: str | None = None  # its kind of NVLink, a name of links.toml
    measured: Mapping[str, str] = field(default_factory=dict)  # what each efficiency rests on, where it was measured

    def units(self, precision: str, *, convolution: bool) -> str:
        """The units that compute in a precision; what a device has none for runs on its fp32 ones.

        `fp32` is stock PyTorch's: convolutions may use tf32, other products do not.
        """
        wanted = {"ieee": "fp32", "fp32": "tf32" if convolution else "fp32"}.get(precision, precision)
        return wanted if wanted in self.peak else "fp32"

    def rate(self, precision: str, *, convolution: bool) -> tuple[float, float]:
        """Peak and efficiency in a precision."""
        units = self.units(precision, convolution=convolution)
        return self.peak[units], self.efficiency.get(units, _EFFICIENCY)

    def basis(self, precision: str) -> str | None:
        """What was measured to calibrate its speed in a precision, that of convolutions; None: nothing."""
        return self.measured.get(self.units(precision, convolution=True))


@dataclass(frozen=True, slots=True)
class Software:
    """How a training system uses a device: one efficiency, and facts of how it works."""

    name: str
    title: str
    efficiency: float  # beside the device's own
    fused: bool = False  # ReLU and addition run inside the normalisation before them
    channels_last: bool = False  # half-precision convolutions need no change of layout
    whole_batches: bool = False  # a stage waits for a whole batch before it begins
    in_flight: int | None = None  # batches in the pipeline, where the software says so
    blocking: bool = False  # computes wait for copies to and from the host
    handover: Link | None = None  # what stages hand over through, where that is the host's own memory
    update_passes: float = 5.0  # times the optimizer reads or writes the weights
    temporaries: float = 0.0  # buffers as large as the weights, beside weights, gradient and optimizer state
    context: int = 500 * MIB  # memory of the process itself on a GPU
    workspace: int = 1024 * MIB  # most that a convolution may borrow
    keeps_workspace: bool = False  # and keeps all of it
    loader: int = 0  # memory of the input pipeline on the device, real data
    input_bytes: int = 1  # bytes of one value of an image as it is copied to the device


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything known, by name."""

    devices: Mapping[str, DeviceSpec]
    links: Mapping[str, Link]
    software: Mapping[str, Software]
    clusters: Mapping[str, Cluster]
    sources: Mapping[str, Mapping[str, Any]]
    decode: float  # images a second that one core decodes

    def device(self, name: str) -> DeviceSpec:
        return _find(self.devices, name, "device")

    def system(self, name: str) -> Software:
        return _find(self.software, name, "software")

    def cluster(self, name: str) -> Cluster:
        return _find(self.clusters, name, "cluster")


def _find(known: Mapping[str, _Entry], name: str, what: str) -> _Entry:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, 3, 0.4)
    hint = f"near names: {', '.join(near)}" if near else f"known: {', '.join(sorted(known))}"
    listed = "" if what == "software" else "; stagewright cluster list shows all"
    raise ValueError(f"unknown {what} '{name}'; {hint}{listed}")


def calibration_remark(devices: Iterable[DeviceSpec], precision: str) -> str | None:
    """A line that names devices whose speed no measurement, or a single one, has calibrated."""
    bases = {device.name: device.basis(precision) for device in devices}
    without = sorted(name for name, basis in bases.items() if basis is None)
    alone = sorted(name for name, basis in bases.items() if basis == ALONE)
    parts = [f"{', '.join(without)}: not calibrated by a measurement"] if without else []
    parts += [f"{', '.join(alone)}: calibrated by {ALONE} alone"] if alone else []
    return f"{precision} speed of {'; of '.join(parts)}" if parts else None


@cache
def shipped() -> Catalogue:
    """The catalogue that comes with the package."""
    return read_catalogue(())


def price_source(device: str) -> str:
    """Where the catalogue's price of a device comes from, and when it was one."""
    tables: dict[str, Any] = tomllib.loads(resources.files(__package__).joinpath("devices.toml").read_text())
    figure = tables["device"].get(device, {}).get("usd")
    source = tables["source"].get(figure[1], {}) if isinstance(figure, list) else {}
    return f"{source.get('date', 'no date')}: {source.get('text', 'no source')}"


def open_cluster(text: str) -> tuple[Catalogue, Cluster]:
    """A cluster by name, or the one that a user's own file describes, with what that file adds to the catalogue."""
    if not (text.endswith(".toml") or Path(text).is_file()):
        catalogue = shipped()
        return catalogue, catalogue.cluster(text)
    catalogue = read_catalogue([text])
    own = list(_read_file(text).get("cluster", {}))
    if len(own) != 1:
        raise ValueError(f"cluster file {text} describes {len(own)} clusters; describe one as [cluster.NAME]")
    return catalogue, catalogue.clusters[own[0]]


def read_catalogue(own_files: Iterable[str], overrides: Mapping[str, Any] | None = None) -> Catalogue:
    """The shipped files, then a user's own over them, then single values as a calibration tries them."""
    tables: dict[str, dict[str, Any]] = {}
    folder = resources.files(__package__)
    for name in _FILES:
        _merge(tables, tomllib.loads(folder.joinpath(name).read_text()))
    for path in own_files:
        _merge(tables, _read_file(path))
    _merge(tables, overrides or {})
    links = {name: _link(name, entry) for name, entry in tables["link"].items()}
    sources = tables.get("source", {})
    devices = {name: _device(name, entry, sources) for name, entry in tables["device"].items()}
    for name, entry in tables["device"].items():
        for alias in entry.get("aliases", ()):
            devices.setdefault(alias, devices[name])
    software = {name: _software(name, entry, links) for name, entry in tables["software"].items()}
    clusters = {name: _cluster(name, entry, links, devices) for name, entry in tables["cluster"].items()}
    decode = _figure(tables["loader"]["decode"], "loader.decode")
    return Catalogue(devices, links, software, clusters, sources, decode)


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


def _figure(entry: Any, where: str) -> float:
    """A number, alone or with its source."""
    value = entry[0] if isinstance(entry, list) and entry else entry
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"catalogue: {where} is {str(entry)[:40]!r}, not a number")
    return float(value)


def _positive(entry: Any, where: str) -> float:
    value = _figure(entry, where)
    if not 0 < value < float("inf"):
        raise ValueError(f"catalogue: {where} is {value:g}; it must be above 0")
    return value


def _required(entry: Mapping[str, Any], key: str, where: str) -> Any:
    if not isinstance(entry, Mapping):
        raise ValueError(f"catalogue: {where} is no table; write [{where}]")
    if key not in entry:
        raise ValueError(f"catalogue: {where} has no '{key}'; it needs one")
    return entry[key]


def _refuse_unknown(entry: Mapping[str, Any], table: str, where: str) -> None:
    """An error where a table has a key that nobody reads, such as a misspelt one."""
    for key in entry:
        if key not in _KEYS[table]:
            near = difflib.get_close_matches(key, _KEYS[table], 1, 0.7)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(_KEYS[table])}"
            raise ValueError(f"catalogue: {where} has the unknown key '{key}'; {hint}")


def _optional(entry: Mapping[str, Any], key: str, where: str) -> float | None:
    return _positive(entry[key], f"{where}.{key}") if key in entry else None


def _link(name: str, entry: Mapping[str, Any]) -> Link:
    where = f"link.{name}"
    bandwidth = _positive(_required(entry, "bandwidth", where), f"{where}.bandwidth")
    _refuse_unknown(entry, "link", where)
    return Link(
        name,
        bandwidth,
        _figure(entry.get("latency", 0.0), f"{where}.latency"),
        bool(entry.get("staged", False)),
    )


def _measured(figure: Any, sources: Mapping[str, Any]) -> str | None:
    """What a figure rests on, by its source; one without a source is the user's own."""
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
        raise ValueError(f"catalogue: {where}.peak needs fp32; write [{where}.peak]")
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
        changes["handover"] = _find(links, str(entry["handover"]), "link")
    for key in ("context", "workspace", "loader"):
        if f"{key}_mib" in entry:
            changes[key] = int(_figure(entry[f"{key}_mib"], f"{where}.{key}_mib") * MIB)
    return replace(made, **changes)


def _cluster(name: str, entry: Any, links: Mapping[str, Link], devices: Mapping[str, DeviceSpec]) -> Cluster:
    where = f"cluster.{name}"
    described = _required(entry, "machines", where)
    _refuse_unknown(entry, "cluster", where)
    if not isinstance(described, list) or not described:
        raise ValueError(f"catalogue: {where}.machines is empty; describe one as [[{where}.machines]]")
    machines: list[Machine] = []
    for machine in described:
        _required(machine, "device", f"{where}.machines")
        _refuse_unknown(machine, "machine", f"{where}.machines")
        count = int(_positive(machine.get("count", 1), f"{where}.machines.count"))
        machines += [_machine(machine, f"{where}.machines", links, devices)] * min(count, _MOST_DEVICES + 1)
        if sum(machine.devices or 0 for machine in machines) > _MOST_DEVICES:
            raise ValueError(f"catalogue: {where} has more than {_MOST_DEVICES} devices")
    network = _find(links, str(entry["network"]), "link") if "network" in entry else None
    cluster = Cluster(tuple(machines), name, network)
    _require_connected(cluster)
    return cluster


def _machine(entry: Any, where: str, links: Mapping[str, Link], devices: Mapping[str, DeviceSpec]) -> Machine:
    kind = str(_required(entry, "device", where))
    _find(devices, kind, "device")
    count = int(_positive(_required(entry, "devices", where), f"{where}.devices"))
    if count > _MOST_DEVICES:
        raise ValueError(f"catalogue: {where}.devices is {count}; the most is {_MOST_DEVICES}")
    levels: list[Level] = []
    described = entry.get("levels", [])
    if not isinstance(described, list):
        raise ValueError(f"catalogue: {where}.levels is no list; describe one as [[{where}.levels]]")
    for level in described:
        link = _find(links, str(_required(level, "link", f"{where}.levels")), "link")
        _refuse_unknown(level, "level", f"{where}.levels")
        lanes = _positive(level.get("lanes", 1), f"{where}.levels.lanes")
        groups = level.get("groups") or [list(range(count))]
        if not isinstance(groups, list) or not all(
            isinstance(group, list) and all(isinstance(index, int) for index in group) for group in groups
        ):
            raise ValueError(
                f"catalogue: {where}.levels.groups are not lists of devices (for example [[0, 1], [2, 3]])"
            )
        levels.append(Level(replace(link, bandwidth=link.bandwidth * lanes), tuple(tuple(group) for group in groups)))
    cores = _optional(entry, "cores", where)
    return Machine(count, kind, tuple(levels), None if cores is None else int(cores))


def _require_connected(cluster: Cluster) -> None:
    """Every pair of neighbours must have a link, so that no plan can need one that is missing."""
    devices = cluster.devices
    for one, other in itertools.pairwise(devices):
        cluster.path(one, other)
