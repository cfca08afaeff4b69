"""Reads the table that plain `nvidia-smi` prints, of drivers old and new."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from stagewright.machine.pasted import Pasted, shown

_VERSIONS = re.compile(r"(?:Driver|KMD) Version:\s*([0-9.]+)(?:.*?CUDA(?: UMD)? Version:\s*([0-9.]+|N/A|ERR!))?")
_CARD = re.compile(
    r"\|\s*([0-9]+)\s+(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9])"
)
_MEMORY = re.compile(r"([0-9]+)\s*MiB\s*/\s*([0-9]+)\s*MiB")
_POWER = re.compile(r"(?:([0-9]+)W|N/A|ERR!|Unknown.*?)\s*/\s*(?:([0-9]+)W|N/A)")
_MIG = re.compile(r"\|\s*(Enabled|Disabled|N/A)\*?\s*\|$")
_PROCESS = re.compile(
    r"\|\s*([0-9]+)\s+(?:(?:[0-9]+|N/A)\s+(?:[0-9]+|N/A)\s+)?([0-9]+)\s+([CGM+]+)\s+(\S.*?)\s+([0-9]+MiB|N/A)\s*\|$"
)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU of the table."""

    index: int
    name: str
    bus: str
    memory: int = 0  # bytes
    used: int = 0
    power_limit: float | None = None  # watts
    is_mig: bool = False

    @property
    def is_cut_short(self) -> bool:
        """The table had no room for the whole name."""
        return self.name.endswith("...")


@dataclass(frozen=True, slots=True)
class Occupant:
    """A process on a GPU."""

    gpu: int
    process: int
    kind: str  # C computes, G draws
    name: str
    memory: int | None


@dataclass(frozen=True, slots=True)
class Smi:
    """The whole table."""

    driver: str
    cuda: str | None
    cards: tuple[Card, ...]
    occupants: tuple[Occupant, ...]


def parse_smi(pasted: Pasted) -> Smi:
    """A pasted table; what follows or precedes it does not matter."""
    lines = [line.strip() for line in pasted.lines()]
    found = next((match for line in lines if (match := _VERSIONS.search(line))), None)
    if found is None:
        raise ValueError(
            f"{pasted.name} has no line with a driver version in {len(lines)} lines; save all that nvidia-smi prints"
        )
    cuda = found[2] if found[2] and found[2][0].isdigit() else None
    cards: list[Card] = []
    occupants: list[Occupant] = []
    for number, line in enumerate(lines, 1):
        if match := _CARD.match(line):
            cards.append(_card(pasted, number, lines, match))
        elif match := _PROCESS.match(line):
            size = None if match[5] == "N/A" else int(match[5].removesuffix("MiB")) * _MIB
            occupants.append(Occupant(int(match[1]), int(match[2]), match[3], match[4], size))
    if not cards:
        raise ValueError(f"{pasted.name} names driver {found[1]} but no GPU; save all that nvidia-smi prints")
    indices = [card.index for card in cards]
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ValueError(f"{pasted.name} shows GPU {twice} {indices.count(twice)} times; save one table")
    return Smi(found[1], cuda, tuple(cards), tuple(occupants))


def _card(pasted: Pasted, number: int, lines: list[str], match: re.Match[str]) -> Card:
    """A GPU from its line and the one or two below it."""
    card = Card(int(match[1]), match[2], match[3].lower())
    usage = lines[number] if number < len(lines) else ""
    memory = _MEMORY.search(usage)
    if memory is None:
        message = f"GPU {card.index} should have its memory here (10MiB / 24576MiB), not {shown(usage)}"
        raise pasted.error(number + 1, 1, message)
    power = _POWER.search(usage.split("|")[1]) if usage.startswith("|") else None
    below = lines[number + 1] if number + 1 < len(lines) else ""
    mig = _MIG.search(below)
    return replace(
        card,
        memory=int(memory[2]) * _MIB,
        used=int(memory[1]) * _MIB,
        power_limit=float(power[2]) if power and power[2] else None,
        is_mig=mig is not None and mig[1] == "Enabled",
    )
