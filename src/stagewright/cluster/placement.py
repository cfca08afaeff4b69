"""Placements: the devices of each stage, from and to text such as `0:0-6.0:7`.

Stages are separated by dots, pieces by commas: `machine:first-last`; a bare number continues the machine before it.
Ranks are numbered by (machine, device). On CPUs a device is a process and any index is allowed; with `--emulate` any
machine is, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from stagewright.cluster.topology import Cluster, Device
from stagewright.errors import UserError

_PIECE = re.compile(r"(?:([0-9]+):)?([0-9]+)(?:-([0-9]+))?")
_MOST_DEVICES = 65536
Placement = tuple[tuple[Device, ...], ...]


def parse_placement(text: str, cluster: Cluster | None = None) -> Placement:
    """Read `0:0-6.0:7`: stages between dots, devices between commas, `machine:first-last` ranges."""
    cluster = cluster or Cluster()
    return tuple(_parse_stage(stage, index, text, cluster) for index, stage in enumerate(text.split(".")))


def _parse_stage(text: str, stage: int, placement: str, cluster: Cluster) -> tuple[Device, ...]:
    if not text.strip():
        raise UserError(f"placement {placement[:80]!r} leaves stage {stage} empty; name its devices, for example 0:0-6")
    devices: dict[Device, None] = {}
    machine: int | None = None
    for piece in (piece.strip() for piece in text.split(",")):
        machine, indices = _parse_piece(piece, machine, placement)
        cluster.require(Device(machine, indices[-1]), piece)
        for device in (Device(machine, index) for index in indices):
            if device in devices:
                raise UserError(f"placement piece '{piece}' puts device {device} into stage {stage} a second time")
            devices[device] = None
    return tuple(devices)


def _parse_piece(piece: str, machine: int | None, placement: str) -> tuple[int, range]:
    match = _PIECE.fullmatch(piece)
    if match is None or len(piece) > 32:
        raise UserError(
            f"placement piece {piece[:32]!r} of {placement[:80]!r} is not machine:device or machine:first-last "
            "(for example 0:0-6)"
        )
    if match[1] is None and machine is None:
        raise UserError(f"placement piece '{piece}' names no machine; write 0:{piece}")
    first = int(match[2])
    last = first if match[3] is None else int(match[3])
    if last < first:
        raise UserError(f"placement piece '{piece}' counts down from {first} to {last}; write {last}-{first}")
    if last - first >= _MOST_DEVICES:
        raise UserError(f"placement piece '{piece}' names {last - first + 1} devices; the limit is {_MOST_DEVICES}")
    return (int(match[1]) if match[1] is not None else machine or 0), range(first, last + 1)


def format_placement(placement: Placement) -> str:
    """The shortest text that parses back to this placement."""
    return ".".join(format_devices(devices) for devices in placement)


def format_devices(devices: Iterable[Device]) -> str:
    """One stage's devices as placement text, in their order."""
    runs: list[tuple[Device, Device]] = []
    for device in devices:
        if runs and runs[-1][1] == Device(device.machine, device.index - 1):
            runs[-1] = (runs[-1][0], device)
        else:
            runs.append((device, device))
    pieces: list[str] = []
    machine: int | None = None
    for first, last in runs:
        prefix = "" if first.machine == machine else f"{first.machine}:"
        pieces.append(f"{prefix}{first.index}" if first == last else f"{prefix}{first.index}-{last.index}")
        machine = first.machine
    return ",".join(pieces)
