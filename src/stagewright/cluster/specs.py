"""What the catalogue knows: devices, links, software and clusters, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stagewright.cluster.topology import Cluster, Link

MIB = 1 << 20
ALONE = "one run"
_Entry = TypeVar("_Entry")
_EFFICIENCY = 0.85  # of a device that no published run has measured


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
        return find(self.devices, name, "device")

    def system(self, name: str) -> Software:
        return find(self.software, name, "software")

    def cluster(self, name: str) -> Cluster:
        return find(self.clusters, name, "cluster")


def find(known: Mapping[str, _Entry], name: str, what: str) -> _Entry:
    """The entry of a name, or an error with the names next to it."""
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, 3, 0.4)
    hint = f"near names: {', '.join(near)}" if near else f"known: {', '.join(sorted(known))}"
    listed = "" if what == "software" else "; stagewright cluster list shows all"
    raise ValueError(f"unknown {what} '{name}'; {hint}{listed}")


def calibration_note(devices: Iterable[DeviceSpec], precision: str) -> str | None:
    """A line that names devices whose speed no measurement, or a single one, has calibrated."""
    bases = {device.name: device.basis(precision) for device in devices}
    without = sorted(name for name, basis in bases.items() if basis is None)
    alone = sorted(name for name, basis in bases.items() if basis == ALONE)
    parts = [f"{', '.join(without)}: not calibrated by a measurement"] if without else []
    parts += [f"{', '.join(alone)}: calibrated by {ALONE} alone"] if alone else []
    return f"{precision} speed of {'; of '.join(parts)}" if parts else None
