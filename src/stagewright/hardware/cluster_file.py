"""A machine as a cluster file: cards by the catalogue's names, connections as levels. Makes a cluster file of a machine: from nvidia-smi's texts, or from this one's driver."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stagewright.cluster.catalog import open_cluster, shipped
from stagewright.cluster.specs import Catalogue, DeviceSpec
from stagewright.hardware.gpu import NoNvml, open_nvml, read_gpus
from stagewright.hardware.host import num_cores
from stagewright.hardware.smi import parse_smi, parse_topology, read_smi_text
from stagewright.hardware.topology import SELF, LinkKind, Topology, read_topology

_MOST_LINKS = 18  # that a card has; rows with more are behind a switch, and name the same links again
_TOLERANCE = 0.05  # of memory: drivers differ in what they count
_LINK_OF = {
    LinkKind.BRIDGE: "pix",
    LinkKind.BRIDGES: "pix",
    LinkKind.HOST: "phb",
    LinkKind.NODE: "node",
    LinkKind.SYSTEM: "sys",
}


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
class MachineFile:
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
        return (Step(f"pcie{generation}-{_kind(LinkKind.HOST, spec)}", groups, lanes),)
    steps = []
    for way in list(LinkKind)[1:]:
        joined = _joined(topology, groups, way)
        if joined == groups:
            continue
        if way is LinkKind.NVLINK:
            steps.append(Step(_nvlink(spec), joined, _links(topology)))
        else:
            is_over_links = bool(steps) and steps[-1].link == spec.nvlink
            # Linked cards keep a slot each; only what joins sockets is shared by all of a group.
            slots = min(map(len, groups)) if is_over_links and way is not LinkKind.SYSTEM else 1
            steps.append(Step(f"pcie{generation}-{_kind(way, spec)}", joined, lanes * slots))
        groups = joined
    if len(groups) > 1:
        raise ValueError(
            f"the topology does not say how GPU {groups[0][0]} reaches GPU {groups[1][0]}; "
            "save all of nvidia-smi topo -m and import that"
        )
    return tuple(steps)


def _kind(way: LinkKind, spec: DeviceSpec) -> str:
    """GeForce cards have no peer access, so even behind one bridge they copy through the host."""
    is_host_only = "GeForce" in spec.title and way in (LinkKind.BRIDGE, LinkKind.BRIDGES)
    return "phb" if is_host_only else _LINK_OF[way]


def _nvlink(spec: DeviceSpec) -> str:
    if spec.nvlink is None:
        raise ValueError(f"the topology has NVLinks but the catalogue gives {spec.name} none; choose another --device")
    return spec.nvlink


def _joined(topology: Topology, groups: Sequence[tuple[int, ...]], way: LinkKind) -> tuple[tuple[int, ...], ...]:
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
        links = [cell.links for cell in row if cell is not None and cell.way is LinkKind.NVLINK]
        if links:
            counts.append(sum(links) if sum(links) <= _MOST_LINKS else max(links))
    return min(counts)


def _escaped(text: str) -> str:
    return "".join(c if c.isprintable() and c not in '"\\' else " " for c in text)


_FULL_WIDTH = 16
_Card = TypeVar("_Card")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the user says beside the texts, or against them; None where the texts are to tell."""

    name: str = "imported"
    device: str | None = None
    gpus: tuple[int, ...] | None = None
    pcie: int | None = None  # generation
    cores: int | None = None
    count: int = 1
    network: str | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of a machine before the catalogue is asked."""

    cards: tuple[tuple[str, int | None], ...]  # names, and bytes of memory
    topology: Topology | None
    about: str
    generation: int | None = None
    width: int | None = None
    cores: int | None = None


def import_texts(topo: str | None, smi: str | None, wishes: ImportOptions) -> MachineFile:
    """A machine from the texts of `nvidia-smi topo -m` and `nvidia-smi`, each a file or `-`; one file may hold both."""
    pasted = {path: read_smi_text(path) for path in dict.fromkeys((topo, smi)) if path is not None}
    topology = parse_topology(pasted[topo]) if topo is not None else None
    cards: tuple[tuple[str, int | None], ...]
    if smi is not None:
        table = parse_smi(pasted[smi])
        kept = _chosen(table.cards, wishes.gpus)
        cut = next((card for card in kept if card.is_mig), None)
        if cut is not None:
            raise ValueError(f"GPU {cut.index} is cut into MIG instances; leave it out with --gpus, or switch MIG off")
        cards = tuple((card.name, card.memory) for card in table.cards)
        about = f"driver {table.driver}" + (f", CUDA {table.cuda}" if table.cuda else "")
    elif topology is not None and wishes.device is not None:
        cards, about = ((wishes.device, None),) * len(topology), "no nvidia-smi table"
    else:
        raise ValueError("nothing says which GPUs there are: give --smi FILE, or --topo FILE with --device NAME")
    cores = None if topology is None else topology.processors
    return _make(_Seen(cards, topology, about, cores=cores), wishes)


def import_this(wishes: ImportOptions) -> MachineFile:
    """This machine."""
    try:
        nvml = open_nvml()
    except NoNvml as error:
        raise ValueError(f"this machine's GPUs can't be read ({error}); give --topo FILE and --smi FILE") from error
    with nvml:
        gpus, topology, driver = read_gpus(nvml), read_topology(nvml), nvml.ask("nvmlSystemGetDriverVersion")
    if not gpus:
        raise ValueError("this machine has 0 GPUs; give --topo FILE and --smi FILE of one that has some")
    cards = tuple((gpu.name, gpu.memory) for gpu in gpus)
    width = _least([gpu.pcie_width for gpu in _chosen(gpus, wishes.gpus)])
    generation = _least([gpu.pcie_generation for gpu in _chosen(gpus, wishes.gpus)])
    return _make(_Seen(cards, topology, f"driver {driver}", generation, width, num_cores()), wishes)


def checked(box: MachineFile) -> str:
    """The text of the file, once the planner has accepted it."""
    text = box.as_toml()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        open_cluster(file.name)
    return text


def _make(seen: _Seen, wishes: ImportOptions) -> MachineFile:
    catalogue = shipped()
    every = range(len(seen.cards))
    topology = seen.topology
    if topology is not None and len(topology) != len(seen.cards):
        raise ValueError(
            f"the topology has {len(topology)} GPUs but the table {len(seen.cards)}; save both on the same machine"
        )
    if topology is None and len(seen.cards) > 1 and (wishes.gpus is None or len(wishes.gpus) > 1):
        raise ValueError(f"{len(seen.cards)} GPUs and nothing says how they are connected; give --topo FILE as well")
    indices = list(every if wishes.gpus is None else wishes.gpus)
    beyond = [index for index in indices if index not in every]
    if beyond:
        raise ValueError(f"--gpus names {beyond[0]} but there are {len(every)} (0-{len(every) - 1})")
    topology = Topology(((SELF,),)) if topology is None else topology.only(indices)
    names = [wishes.device or find_device(catalogue, *seen.cards[index]) for index in indices]
    other = next((place for place, name in enumerate(names) if name != names[0]), None)
    if other is not None:
        raise ValueError(
            f"GPU {indices[0]} is a {names[0]} and GPU {indices[other]} a {names[other]}; a machine of a cluster file "
            "has one kind, so import each kind with --gpus"
        )
    spec = catalogue.device(names[0])
    generation = wishes.pcie or seen.generation or spec.pcie
    steps = make_steps(topology, spec, generation, (seen.width or _FULL_WIDTH) / _FULL_WIDTH)
    title = f"{len(indices)} x {seen.cards[indices[0]][0]}, {seen.about}"
    box = MachineFile(wishes.name, title, spec.name, len(indices), steps, wishes.cores or seen.cores)
    return replace(
        box, count=wishes.count, network=wishes.network, remarks=_remarks(seen, wishes, indices, generation, box)
    )


def _remarks(
    seen: _Seen, wishes: ImportOptions, indices: Sequence[int], generation: int, box: MachineFile
) -> tuple[str, ...]:
    """What the reader of the file should know of it."""
    remarks = [f"Imported {time.strftime('%Y-%m-%d')}; stagewright plan MODEL --cluster FILE --batch B"]
    if any(step.link.startswith("pcie") for step in box.steps) and seen.width is None:
        source = "as given" if wishes.pcie else "the best of the card"
        remarks.append(f"PCIe {generation}.0 x16 is {source}: nvidia-smi's texts do not tell; lanes = 0.5 is x8.")
    if list(indices) != list(range(len(seen.cards))):
        remarks.append(f"Devices here are GPUs {', '.join(map(str, indices))} there.")
    if wishes.cores is None and seen.cores:
        remarks.append("Cores counts what the system counts: two for a core with two threads.")
    return tuple(remarks)


def _chosen(cards: Sequence[_Card], gpus: tuple[int, ...] | None) -> list[_Card]:
    return [card for index, card in enumerate(cards) if gpus is None or index in gpus]


def _least(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known, default=None)
