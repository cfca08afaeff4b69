"""Writes a cluster file for `--cluster` from this machine, or from another one's saved `nvidia-smi` output.

`import_texts` and `import_this_machine` gather the facts of a machine; `_make` looks its GPUs up in the catalog and
turns the matrix of connections into levels; `checked_toml` makes sure that the planner accepts the result.
"""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stagewright.cluster.catalog import read_catalog, shipped
from stagewright.cluster.specs import Catalog, DeviceSpec
from stagewright.config.toml import toml_value
from stagewright.errors import UserError
from stagewright.hardware.gpu import Gpu, NoNvml, open_nvml, read_gpus
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
        lines += [f"network = {toml_value(self.network)}"] if self.network else []
        lines.append(f"[[cluster.{self.name}.machines]]")
        lines += [f"count = {self.count}"] if self.count > 1 else []
        lines += [f'device = "{self.device}"', f"devices = {self.devices}"]
        lines += [f"cores = {self.cores}"] if self.cores else []
        return "\n".join([*lines, "levels = [", *(f"  {level.as_toml()}," for level in self.levels), "]", ""])

    @property
    def tables(self) -> dict[str, Any]:
        """What the cluster file holds, as the catalog reads it."""
        levels = [
            {"link": one.link, "lanes": one.lanes, "groups": [list(group) for group in one.groups]}
            for one in self.levels
        ]
        machine = {"device": self.device, "devices": self.devices, "count": self.count, "levels": levels}
        machine |= {"cores": self.cores} if self.cores else {}
        network = {"network": self.network} if self.network else {}
        return {"cluster": {self.name: {"title": self.title, "machines": [machine], **network}}}

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


def import_texts(topo: str | None, smi: str | None, options: ImportOptions) -> MachineFile:
    """A machine from saved output of `nvidia-smi topo -m` and `-q -x`: files or `-`; one file may hold both."""
    texts = {path: read_smi_text(path) for path in dict.fromkeys((topo, smi)) if path is not None}
    topology = None if topo is None else parse_topology(texts[topo])
    if smi is not None:
        gpus, software = parse_smi(texts[smi])
    elif topology is not None and options.device is not None:
        gpus = tuple(Gpu(index, f"GPU {index}", options.device) for index in range(len(topology)))
        software = "no output of nvidia-smi -q -x"
    else:
        raise UserError("the kind of GPU is unknown: give --smi FILE, or --topo FILE with --device NAME")
    return _make(gpus, topology, software, None if topology is None else topology.processors, options)


def import_this_machine(options: ImportOptions) -> MachineFile:
    """This machine, as its driver describes it."""
    instead = "give --topo FILE and --smi FILE"
    try:
        with open_nvml() as nvml:
            gpus, topology, driver = read_gpus(nvml), read_topology(nvml), nvml.ask("nvmlSystemGetDriverVersion")
    except NoNvml as error:
        raise UserError(f"can't read this machine's GPUs ({error}); {instead}") from error
    if not gpus:
        raise UserError(f"this machine has 0 GPUs; {instead} of a machine with GPUs")
    return _make(gpus, topology, f"driver {driver}", num_cores(), options)


def checked_toml(machine: MachineFile) -> str:
    """The text of the file; an error where the planner would not accept it."""
    text = machine.as_toml()
    try:
        read_catalog((), tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:  # a lone surrogate, of a name that is no text
        raise UserError(f"a cluster file can't hold these names: {error}; use names of UTF-8 text") from error
    return text


def find_device(catalog: Catalog, name: str, memory: int | None) -> str:
    """The catalog's name of a GPU, by the driver's name and, where several share it, by memory."""
    plain = f"{_plain(name)} "  # whole words
    found = {
        spec.name: spec
        for known, spec in catalog.devices.items()
        if any(f"{_plain(text)} ".startswith(plain) for text in (known, spec.title))
    }
    near = [spec for spec in found.values() if memory is None or abs(spec.memory / memory - 1) < _TOLERANCE]
    if near and (memory is not None or len(near) == 1):
        return min(near, key=lambda spec: abs(spec.memory - (memory or 0))).name
    mib = "" if memory is None else f" with {memory // MIB} MiB"
    others = ", ".join(f"{spec.name} ({spec.memory // MIB} MiB)" for spec in found.values())
    known_names = {spec.name for spec in catalog.devices.values()} - {"cpu"}
    hint = f"it knows {others}" if others else f"known: {', '.join(sorted(known_names))}"
    raise UserError(f"the catalog has no '{name}'{mib}; {hint}; choose the nearest with --device NAME")


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
                raise UserError(
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
        raise UserError(
            f"the topology does not say how GPU {groups[0][0]} reaches GPU {groups[1][0]}; "
            "save the whole output of nvidia-smi topo -m"
        )
    return tuple(levels)


def _wanted(gpus: Sequence[Gpu], topology: Topology | None, options: ImportOptions) -> list[int]:
    """The indices of the GPUs to import, which a cluster file can describe."""
    count = len(gpus)
    if topology is not None and len(topology) != count:
        raise UserError(
            f"the topology has {len(topology)} GPUs but nvidia-smi -q -x shows {count}; save both on the same machine"
        )
    if topology is None and count > 1 and (options.gpus is None or len(options.gpus) > 1):
        raise UserError(f"{count} GPUs but nothing says how they are connected; give --topo FILE as well")
    indices = list(range(count) if options.gpus is None else options.gpus)
    for index in indices:
        if index not in range(count):
            raise UserError(f"--gpus names {index} but there are {count} (0-{count - 1})")
        if gpus[index].is_mig:
            raise UserError(
                f"GPU {gpus[index].index} is split into MIG instances; exclude it with --gpus, or switch MIG off"
            )
    return indices


def _make(
    gpus: Sequence[Gpu], topology: Topology | None, software: str, cores: int | None, options: ImportOptions
) -> MachineFile:
    """A machine with these GPUs and cores; `software` names its versions, for the title."""
    indices = _wanted(gpus, topology, options)
    kept = [gpus[index] for index in indices]
    spec = _only_spec(kept, options.device)
    width, slowest = (
        min((number for gpu in kept if (number := getattr(gpu, name)) is not None), default=None)
        for name in ("pcie_width", "pcie_generation")
    )
    generation = options.pcie or slowest or spec.pcie
    connections = Topology(((SELF,),)) if topology is None else topology.only(indices)
    levels = make_levels(connections, spec, generation, (width or _FULL_WIDTH) / _FULL_WIDTH)
    guessed = generation if width is None and any(level.link.startswith("pcie") for level in levels) else None
    return MachineFile(
        options.name,
        f"{len(kept)} x {kept[0].name}, {software}",
        spec.name,
        len(kept),
        levels,
        options.cores or cores,
        options.count,
        options.network,
        tuple(_remarks(kept, len(gpus), guessed, cores, options)),
    )


def _remarks(
    kept: Sequence[Gpu], count: int, guessed: int | None, cores: int | None, options: ImportOptions
) -> Iterator[str]:
    """What the file assumes; `guessed` is the generation of slots that nothing shows."""
    yield f"Imported {time.strftime('%Y-%m-%d')}; stagewright plan MODEL --cluster FILE --batch B"
    if guessed is not None:
        source = "as given" if options.pcie else "the best that the GPU supports"
        yield f"PCIe {guessed}.0 x16 is {source}: only nvidia-smi -q -x shows the slot; lanes = 0.5 is x8."
    for gpu in kept:
        if gpu.is_capped:
            cap = f"{gpu.power_limit:.0f} of {gpu.power_default:.0f} W"
            yield f"GPU {gpu.index} is capped at {cap}; predictions assume no cap."
    numbers = [gpu.index for gpu in kept]
    if numbers != list(range(count)):
        yield f"The devices of this file are GPUs {', '.join(map(str, numbers))} of the machine."
    if options.cores is None and cores:
        yield "Cores are counted as the system does: a core with two threads counts twice."


def _only_spec(gpus: Sequence[Gpu], device: str | None) -> DeviceSpec:
    """The one kind of device that these GPUs are, or are said to be."""
    catalog = shipped()
    names = [device or find_device(catalog, gpu.name, gpu.memory) for gpu in gpus]
    for gpu, name in zip(gpus, names, strict=True):
        if name != names[0]:
            raise UserError(
                f"GPU {gpus[0].index} is a {names[0]} and GPU {gpu.index} a {name}; a machine of a cluster file has "
                "one kind of GPU, so import each kind with --gpus"
            )
    return catalog.device(names[0])


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
