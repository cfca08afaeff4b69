"""Measured training rates as rows that others can use: what `selftest` and `bench SUITE --row` append to a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from stagewright import __version__
from stagewright.cluster.catalog import shipped
from stagewright.errors import UserError
from stagewright.files import read_text, write_text
from stagewright.hardware.cluster_file import find_device
from stagewright.metrics import GIB


@dataclass(frozen=True, slots=True)
class Row:
    """One rate; `batch_per_gpu` samples a step on each of `gpus` devices of `nodes` machines."""

    hardware: str
    gpus: int
    software: str
    model: str
    precision: str
    batch_per_gpu: int
    images_per_second: float
    source: str
    nodes: int = 1
    link: str = "not stated"
    note: str = ""
    verified: bool = True
    memory_mib: float | None = None

    @property
    def host(self) -> tuple[str, str]:
        """The machine it ran on, as far as a row tells: one kind of card of one source."""
        return (self.source, self.hardware)


def append_rows(rows: Sequence[Row], path: str) -> None:
    """Append rows to a TOML file of `[[row]]` tables; what is not known is left out."""
    try:
        before = read_text(path)
    except FileNotFoundError:
        before = ""
    except OSError as error:
        raise UserError(f"--row {path}: {error.strerror}; give a file that can be written") from error
    write_text(path, before + "".join(map(_as_toml, rows)))


def _as_toml(row: Row) -> str:
    known = {name: value for name, value in asdict(row).items() if value is not None}
    return "\n[[row]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in known.items())


def hardware_of(machine: Mapping[str, str], device: str) -> str:
    """The catalog's name of a machine's cards, by the rows of its environment, or else their own name."""
    card = next((text for what, text in machine.items() if "gpu" in what.lower()), None)
    if device == "cpu" or card is None:
        return "cpu" if device == "cpu" else "not stated"
    name, _, rest = card.partition(",")
    memory = re.search(r"([\d.]+) GiB", rest)
    try:
        return find_device(shipped(), name, int(float(memory[1]) * GIB) if memory else None)
    except UserError:
        return name


def software_of(machine: Mapping[str, str]) -> str:
    return f"Stagewright {__version__}, torch {machine.get('torch', 'not stated')}"
