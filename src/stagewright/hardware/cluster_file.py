"""Writes a cluster file for `--cluster` from this machine, or from another one's saved `nvidia-smi` output.

`import_texts` and `import_this_machine` gather the facts of a machine; `_make` looks its GPUs up in the catalog and
turns the matrix of connections into levels; `checked_toml` makes sure that the planner accepts the result.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from stagewright.cluster.catalog import open_cluster, shipped
from stagewright.cluster.specs import Catalog, DeviceSpec
from stagewright.config.toml import toml_value
from stagewright.hardware.gpu import NoNvml, open_nvml, read_gpus
from stagewright.hardware.host import num_cores
from stagewright.hardware.smi import parse_smi, parse_topology, read_smi_text
from stagewright.hardware.topology import SELF, LinkKind, Topology, read_topology
from stagewright.metrics import MIB

_MOST_LINKS = 18  # NVLinks of one GPU; a row with more is behind a switch and counts the same links again
_TOLERANCE = 0.05  # of memory: drivers differ in what they count
_FULL_WIDTH = 16  # PCIe lanes
_LINK_NAMES = {
    LinkKind.BRIDGE: "pix",
    LinkKind.BRIDGES: "pix",
    LinkKind.HOST: "phb",
    LinkKind.NODE: "node",
    LinkKind.SYSTEM: "sys",
}
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class FileLevel:
    """One level of a cluster file: groups of GPUs that reach each other over a link of the catalog."""

    link: str
    groups: tuple[tuple[int, ...], ...]
    lanes: float = 1

    def as_toml(self) -> str:
        lanes = f", lanes = {self.lanes:g}" if self.lanes != 1 else ""
        groups = [list(group) for group in self.groups]
        return f'{{ link = "{self.link}"{lanes}' + (f", groups = {groups} }}" if len(groups) > 1 else " }")


@dataclass(frozen=True, slots=True)
class MachineFile:
    """What a cluster file says about machines of one kind."""

    name: str
    title: str
    device: str
    devices: int
    levels: tuple[FileLevel, ...]  # innermost first
    cores: int | None = None
    count: int = 1
    network: str | None = None
    remarks: tuple[str, ...] = ()

    def as_toml(self) -> str:
        """The text of the cluster file."""
        lines = [f"# {remark}" for remark in self.remarks]
        lines += [f"[cluster.{self.name}]", f"title = {toml_value(self.title)}"]
        lines += [f'network = "{self.network}"'] if self.network else []
        lines.append(f"[[cluster.{self.name}.machines]]")
        lines += [f"count = {self.count}"] if self.count > 1 else []
        lines += [f'device = "{self.device}"', f"devices = {self.devices}"]
        lines += [f"cores = {self.cores}"] if self.cores else []
        return "\n".join([*lines, "levels = [", *(f"  {level.as_toml()}," for level in self.levels), "]", ""])

    def describe(self) -> dict[str, Any]:
        """The fields as JSON takes them; levels are called `steps` there."""
        fields = asdict(self)
        return {"steps" if name == "levels" else name: value for name, value in fields.items()}


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the user adds to the texts, or overrides; None means as the texts say."""

    name: str = "imported"
    device: str | None = None
    gpus: tuple[int, ...] | None = None
    pcie: int | None = None  # generation
    cores: int | None = None
    count: int = 1
    network: str | None = None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known about a machine before its GPUs are looked up in the catalog."""

    gpus: tuple[tuple[str, int | None], ...]  # name, and bytes of memory
    topology: Topology | None
    software: str  # versions, for the title
    generation: int | None = None
    width: int | None = None
    cores: int | None = None


def import_texts(topo: str | None, smi: str | None, options: ImportOptions) -> MachineFile:
    """A machine from the output of `nvidia-smi topo -m` and `nvidia-smi`: files or `-`; one file may hold both."""
    texts = {path: read_smi_text(path) for path in dict.fromkeys((topo, smi)) if path is not None}
    topology = parse_topology(texts[topo]) if topo is not None else None
    gpus: tuple[tuple[str, int | None], ...]
    if smi is not None:
        table = parse_smi(texts[smi])
        kept = _selected(table.gpus, options.gpus)
        mig = next((gpu for gpu in kept if gpu.is_mig), None)
        if mig is not None:
            raise ValueError(f"GPU {mig.index} is split into MIG instances; exclude it with --gpus, or switch MIG off")
        gpus = tuple((gpu.name, gpu.memory) for gpu in table.gpus)
        software = f"driver {table.driver}" + (f", CUDA {table.cuda}" if table.cuda else "")
    elif topology is not None and options.device is not None:
        gpus, software = ((options.device, None),) * len(topology), "no nvidia-smi table"
    else:
        raise ValueError("the kind of GPU is unknown: give --smi FILE, or --topo FILE with --device NAME")
    cores = None if topology is None else topology.processors
    return _make(_Facts(gpus, topology, software, cores=cores), options)


def import_this_machine(options: ImportOptions) -> MachineFile:
    """This machine, as its driver describes it."""
    try:
        nvml = open_nvml()
    except NoNvml as error:
        raise ValueError(f"can't read this machine's GPUs ({error}); give --topo FILE and --smi FILE") from error
    with nvml:
        gpus, topology, driver = read_gpus(nvml), read_topology(nvml), nvml.ask("nvmlSystemGetDriverVersion")
    if not gpus:
        raise ValueError("this machine has 0 GPUs; give --topo FILE and --smi FILE of a machine with GPUs")
    named = tuple((gpu.name, gpu.memory) for gpu in gpus)
    kept = _selected(gpus, options.gpus)
    width = min((gpu.pcie_width for gpu in kept if gpu.pcie_width is not None), default=None)
    generation = min((gpu.pcie_generation for gpu in kept if gpu.pcie_generation is not None), default=None)
    return _make(_Facts(named, topology, f"driver {driver}", generation, width, num_cores()), options)


def checked_toml(machine: MachineFile) -> str:
    """The text of the file; an error where the planner would not accept it."""
    text = machine.as_toml()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        open_cluster(file.name)
    return text


def find_device(catalog: Catalog, name: str, memory: int | None) -> str:
    """The catalog's name of a GPU, by the driver's name and, where several share it, by memory."""
    is_whole = not name.endswith("...")
    plain = _plain(name.removesuffix("...")) + (" " if is_whole else "")  # whole words, unless it is cut short
    found = {
        spec.name: spec
        for known, spec in catalog.devices.items()
        if any(f"{_plain(text)} ".startswith(plain) for text in (known, spec.title))
    }
    near = [spec for spec in found.values() if memory is None or abs(spec.memory / memory - 1) < _TOLERANCE]
    if len(near) == 1:
        return near[0].name
    if memory is not None and near:
        return min(near, key=lambda spec: abs(spec.memory - memory)).name
    mib = "" if memory is None else f" with {memory // MIB} MiB"
    others = ", ".join(f"{spec.name} ({spec.memory // MIB} MiB)" for spec in found.values())
    known_names = {spec.name for spec in catalog.devices.values()} - {"cpu"}
    hint = f"it knows {others}" if others else f"known: {', '.join(sorted(known_names))}"
    raise ValueError(f"the catalog has no '{name}'{mib}; {hint}; choose the nearest with --device NAME")


def make_levels(topology: Topology, spec: DeviceSpec, generation: int, lanes: float = 1) -> tuple[FileLevel, ...]:
    """Levels from the nearest connection outwards; `lanes` is the share of 16 lanes that each GPU's slot has."""
    groups: tuple[tuple[int, ...], ...] = tuple((index,) for index in range(len(topology)))
    if len(groups) == 1:
        return (FileLevel(f"pcie{generation}-{_pcie_link(LinkKind.HOST, spec)}", groups, lanes),)
    levels: list[FileLevel] = []
    for kind in list(LinkKind)[1:]:
        joined = _join(topology, groups, kind)
        if joined == groups:
            continue
        if kind is LinkKind.NVLINK:
            if spec.nvlink is None:
                raise ValueError(
                    f"the topology has NVLinks but the catalog gives {spec.name} none; choose another --device"
                )
            levels.append(FileLevel(spec.nvlink, joined, _num_links(topology)))
        else:
            is_over_nvlink = bool(levels) and levels[-1].link == spec.nvlink
            # GPUs joined by NVLink still have a slot each; only the link between sockets is one for a whole group.
            slots = min(map(len, groups)) if is_over_nvlink and kind is not LinkKind.SYSTEM else 1
            levels.append(FileLevel(f"pcie{generation}-{_pcie_link(kind, spec)}", joined, lanes * slots))
        groups = joined
    if len(groups) > 1:
        raise ValueError(
            f"the topology does not say how GPU {groups[0][0]} reaches GPU {groups[1][0]}; "
            "save the whole output of nvidia-smi topo -m"
        )
    return tuple(levels)


def _make(facts: _Facts, options: ImportOptions) -> MachineFile:
    catalog = shipped()
    count = len(facts.gpus)
    topology = facts.topology
    if topology is not None and len(topology) != count:
        raise ValueError(f"the topology has {len(topology)} GPUs but the table {count}; save both on the same machine")
    if topology is None and count > 1 and (options.gpus is None or len(options.gpus) > 1):
        raise ValueError(f"{count} GPUs but nothing says how they are connected; give --topo FILE as well")
    indices = list(range(count) if options.gpus is None else options.gpus)
    beyond = [index for index in indices if index not in range(count)]
    if beyond:
        raise ValueError(f"--gpus names {beyond[0]} but there are {count} (0-{count - 1})")
    topology = Topology(((SELF,),)) if topology is None else topology.only(indices)
    names = [options.device or find_device(catalog, *facts.gpus[index]) for index in indices]
    other = next((place for place, name in enumerate(names) if name != names[0]), None)
    if other is not None:
        raise ValueError(
            f"GPU {indices[0]} is a {names[0]} and GPU {indices[other]} a {names[other]}; a machine of a cluster file "
            "has one kind of GPU, so import each kind with --gpus"
        )
    spec = catalog.device(names[0])
    generation = options.pcie or facts.generation or spec.pcie
    levels = make_levels(topology, spec, generation, (facts.width or _FULL_WIDTH) / _FULL_WIDTH)
    title = f"{len(indices)} x {facts.gpus[indices[0]][0]}, {facts.software}"
    cores, remarks = options.cores or facts.cores, _remarks(facts, options, indices, generation, levels)
    return MachineFile(
        options.name, title, spec.name, len(indices), levels, cores, options.count, options.network, remarks
    )


def _remarks(
    facts: _Facts, options: ImportOptions, indices: Sequence[int], generation: int, levels: Sequence[FileLevel]
) -> tuple[str, ...]:
    """Comments for whoever reads the file."""
    remarks = [f"Imported {time.strftime('%Y-%m-%d')}; stagewright plan MODEL --cluster FILE --batch B"]
    if any(level.link.startswith("pcie") for level in levels) and facts.width is None:
        source = "as given" if options.pcie else "the best that the GPU supports"
        remarks.append(f"PCIe {generation}.0 x16 is {source}: nvidia-smi does not print the slot; lanes = 0.5 is x8.")
    if list(indices) != list(range(len(facts.gpus))):
        remarks.append(f"The devices of this file are GPUs {', '.join(map(str, indices))} of the machine.")
    if options.cores is None and facts.cores:
        remarks.append("Cores are counted as the system does: a core with two threads counts twice.")
    return tuple(remarks)


def _plain(name: str) -> str:
    words = name.lower().split()
    return " ".join(word for word in words if word not in ("nvidia", "tesla"))


def _pcie_link(kind: LinkKind, spec: DeviceSpec) -> str:
    """GeForce GPUs have no peer access, so even behind one bridge they copy through the host."""
    is_host_only = "GeForce" in spec.title and kind in (LinkKind.BRIDGE, LinkKind.BRIDGES)
    return "phb" if is_host_only else _LINK_NAMES[kind]


def _join(topology: Topology, groups: Sequence[tuple[int, ...]], kind: LinkKind) -> tuple[tuple[int, ...], ...]:
    """The groups after merging those with a connection of this kind between them."""
    merged = [set(group) for group in groups]
    for one, other in itertools.combinations(range(len(topology)), 2):
        cell = topology.rows[one][other]
        if cell is not None and cell.kind is kind:
            first = next(group for group in merged if one in group)
            second = next(group for group in merged if other in group)
            if first is not second:
                first |= second
                merged.remove(second)
    return tuple(sorted(tuple(sorted(group)) for group in merged))


def _num_links(topology: Topology) -> int:
    """NVLinks that every linked GPU has: the sum over its peers, or those to its switch."""
    counts = []
    for row in topology.rows:
        links = [cell.links for cell in row if cell is not None and cell.kind is LinkKind.NVLINK]
        if links:
            counts.append(sum(links) if sum(links) <= _MOST_LINKS else max(links))
    return min(counts)


def _selected(gpus: Sequence[_Item], indices: tuple[int, ...] | None) -> list[_Item]:
    return [gpu for index, gpu in enumerate(gpus) if indices is None or index in indices]
