"""A machine as a cluster file: cards by the catalogue's names, connections as levels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stagewright.catalog.values import Catalogue, DeviceSpec
from stagewright.machine.topology import Topology, Way

_MOST_LINKS = 18  # that a card has; rows with more are behind a switch, and name the same links again
_TOLERANCE = 0.05  # of memory: drivers differ in what they count
_LINK_OF = {Way.BRIDGE: "pix", Way.BRIDGES: "pix", Way.HOST: "phb", Way.NODE: "node", Way.SYSTEM: "sys"}


@dataclass(frozen=True, slots=True)
class Step:
    """A level of a cluster file: groups that reach each other over a link of the catalogue."""

    link: str
    groups: tuple[tuple[int, ...], ...]
    lanes: float = 1

    @property
    def text(self) -> str:
        lanes = f", lanes = {self.lanes:g}" if self.lanes != 1 else ""
        groups = [list(group) for group in self.groups]
        return f'{{ link = "{self.link}"{lanes}' + (f", groups = {groups} }}" if len(groups) > 1 else " }")


@dataclass(frozen=True, slots=True)
class Box:
    """A machine, ready to be written."""

    name: str
    title: str
    device: str
    devices: int
    steps: tuple[Step, ...]
    cores: int | None = None
    count: int = 1
    network: str | None = None
    remarks: tuple[str, ...] = ()

    def as_toml(self) -> str:
        """The file that `--cluster` takes."""
        lines = [f"# {remark}" for remark in self.remarks]
        lines += [f"[cluster.{self.name}]", f'title = "{_escaped(self.title)}"']
        lines += [f'network = "{self.network}"'] if self.network else []
        lines.append(f"[[cluster.{self.name}.machines]]")
        lines += [f"count = {self.count}"] if self.count > 1 else []
        lines += [f'device = "{self.device}"', f"devices = {self.devices}"]
        lines += [f"cores = {self.cores}"] if self.cores else []
        return "\n".join([*lines, "levels = [", *(f"  {step.text}," for step in self.steps), "]", ""])


def find_device(catalogue: Catalogue, name: str, memory: int | None) -> str:
    """The catalogue's name of a card, by the driver's name and, where several share it, by memory."""
    plain = _plain(name.removesuffix("..."))
    is_whole = not name.endswith("...")
    found = {
        spec.name: spec
        for known, spec in catalogue.devices.items()
        if any(_is_called(text, plain, is_whole) for text in (known, spec.title))
    }
    near = [spec for spec in found.values() if memory is None or abs(spec.memory / memory - 1) < _TOLERANCE]
    if len(near) == 1:
        return near[0].name
    if memory is not None and near:
        return min(near, key=lambda spec: abs(spec.memory - memory)).name
    mib = "" if memory is None else f" of {memory >> 20} MiB"
    others = ", ".join(f"{spec.name} ({spec.memory >> 20} MiB)" for spec in found.values())
    hint = f"it knows {others}" if others else f"known: {', '.join(sorted(_names(catalogue)))}"
    raise ValueError(f"the catalogue has no '{name}'{mib}; {hint}; choose the nearest with --device NAME")


def _names(catalogue: Catalogue) -> set[str]:
    return {spec.name for spec in catalogue.devices.values()} - {"cpu"}


def _is_called(text: str, plain: str, is_whole: bool) -> bool:
    known = _plain(text)
    return known == plain or known.startswith(f"{plain} " if is_whole else plain)


def _plain(name: str) -> str:
    words = name.lower().split()
    return " ".join(word for word in words if word not in ("nvidia", "tesla"))


def make_steps(topology: Topology, spec: DeviceSpec, generation: int, lanes: float = 1) -> tuple[Step, ...]:
    """Levels from the nearest connection outwards; `lanes` is the share of 16 that each card's slot has."""
    groups: tuple[tuple[int, ...], ...] = tuple((index,) for index in range(len(topology)))
    if len(groups) == 1:
        return (Step(f"pcie{generation}-{_kind(Way.HOST, spec)}", groups, lanes),)
    steps = []
    for way in list(Way)[1:]:
        joined = _joined(topology, groups, way)
        if joined == groups:
            continue
        if way is Way.NVLINK:
            steps.append(Step(_nvlink(spec), joined, _links(topology)))
        else:
            is_over_links = bool(steps) and steps[-1].link == spec.nvlink
            # Linked cards keep a slot each; only what joins sockets is shared by all of a group.
            slots = min(map(len, groups)) if is_over_links and way is not Way.SYSTEM else 1
            steps.append(Step(f"pcie{generation}-{_kind(way, spec)}", joined, lanes * slots))
        groups = joined
    if len(groups) > 1:
        raise ValueError(
            f"the topology does not say how GPU {groups[0][0]} reaches GPU {groups[1][0]}; "
            "save all of nvidia-smi topo -m and import that"
        )
    return tuple(steps)


def _kind(way: Way, spec: DeviceSpec) -> str:
    """GeForce cards have no peer access, so even behind one bridge they copy through the host."""
    is_host_only = "GeForce" in spec.title and way in (Way.BRIDGE, Way.BRIDGES)
    return "phb" if is_host_only else _LINK_OF[way]


def _nvlink(spec: DeviceSpec) -> str:
    if spec.nvlink is None:
        raise ValueError(f"the topology has NVLinks but the catalogue gives {spec.name} none; choose another --device")
    return spec.nvlink


def _joined(topology: Topology, groups: Sequence[tuple[int, ...]], way: Way) -> tuple[tuple[int, ...], ...]:
    """The groups after those with a connection of this kind between them became one."""
    merged = [set(group) for group in groups]
    for one, other in itertools.combinations(range(len(topology)), 2):
        cell = topology.rows[one][other]
        if cell is not None and cell.way is way:
            first = next(group for group in merged if one in group)
            second = next(group for group in merged if other in group)
            if first is not second:
                first |= second
                merged.remove(second)
    return tuple(sorted(tuple(sorted(group)) for group in merged))


def _links(topology: Topology) -> int:
    """NVLinks that every linked card has: all that lead away from it, or those to its switch."""
    counts = []
    for row in topology.rows:
        links = [cell.links for cell in row if cell is not None and cell.way is Way.NVLINK]
        if links:
            counts.append(sum(links) if sum(links) <= _MOST_LINKS else max(links))
    return min(counts)


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() and c not in '"\\' else " " for c in text)
