"""Makes a cluster file of a machine: from nvidia-smi's texts, or from this one's driver."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stagewright.catalog import open_cluster, shipped
from stagewright.machine.box import Box, find_device, make_steps
from stagewright.machine.gpu import read_gpus
from stagewright.machine.host import num_cores
from stagewright.machine.nvml import NoNvml, open_nvml
from stagewright.machine.pasted import read_pasted
from stagewright.machine.smitext import parse_smi
from stagewright.machine.topology import SELF, Topology, read_topology
from stagewright.machine.topotext import parse_topology

_FULL_WIDTH = 16
_Card = TypeVar("_Card")


@dataclass(frozen=True, slots=True)
class Wishes:
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


def import_texts(topo: str | None, smi: str | None, wishes: Wishes) -> Box:
    """A machine from the texts of `nvidia-smi topo -m` and `nvidia-smi`, each a file or `-`; one file may hold both."""
    pasted = {path: read_pasted(path) for path in dict.fromkeys((topo, smi)) if path is not None}
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


def import_this(wishes: Wishes) -> Box:
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


def checked(box: Box) -> str:
    """The text of the file, once the planner has accepted it."""
    text = box.as_toml()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        open_cluster(file.name)
    return text


def _make(seen: _Seen, wishes: Wishes) -> Box:
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
    box = Box(wishes.name, title, spec.name, len(indices), steps, wishes.cores or seen.cores)
    return replace(
        box, count=wishes.count, network=wishes.network, remarks=_remarks(seen, wishes, indices, generation, box)
    )


def _remarks(seen: _Seen, wishes: Wishes, indices: Sequence[int], generation: int, box: Box) -> tuple[str, ...]:
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
