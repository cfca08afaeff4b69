"""The entries of the catalog: devices, links, software and clusters, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from stagewright.cluster.topology import Cluster, Link
from stagewright.errors import UserError, did_you_mean
from stagewright.metrics import MIB

FITTED, ALIKE, SHEET = "fitted card", "same chip family", "data sheet"  # what a card's speed is based on
OWN = "your own"  # a figure of the user's
_Entry = TypeVar("_Entry")
HALF = ("fp16", "bf16")
_EFFICIENCY = 0.85  # of a device without a family
_FEW_CARDS = 4
_USUAL_INTENSITY = 140.0  # operations of the matrix units for a byte of memory traffic, of a common card


@dataclass(frozen=True, slots=True)
class Family:
    """What the kernels of a chip family reach: shares of the data sheet's figures, by kind of kernel and units."""

    name: str = ""
    convolution: Mapping[str, float] = field(default_factory=dict)
    product: Mapping[str, float] = field(default_factory=dict)
    memory: float = 0.8
    slope: float = 0.0  # how the share of matrix units falls as they outgrow the memory bandwidth
    grouped: float = 0.2  # share of the fp32 peak that grouped convolutions reach without matrix units

    def share(self, units: str, *, convolution: bool) -> float:
        known = self.convolution if convolution else self.product
        return known.get("fp16" if units in HALF else units, known.get("fp32", _EFFICIENCY))


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device by its data sheet, and by what was measured on it."""

    name: str
    title: str
    memory: int  # bytes
    bandwidth: float
    peak: Mapping[str, float]  # operations per second by precision
    efficiency: Mapping[str, float]  # share of the peak that this card's products reach, where it has its own
    watts: float | None = None
    usd: float | None = None
    pcie: int = 0  # generation
    nvlink: str | None = None  # its kind of NVLink, a name in links.toml
    measured: Mapping[str, str] = field(default_factory=dict)  # what each measured efficiency is based on
    family: Family = field(default_factory=Family)
    evidence: Mapping[str, str] = field(default_factory=dict)  # by units: what the speed of its kernels is based on

    @property
    def has_matrix_units(self) -> bool:
        """Whether half precision is faster than its plain fp32 units: those have a memory layout of their own."""
        return self.peak.get("fp16", 0.0) > 2.5 * self.peak["fp32"] or "bf16" in self.peak

    def units(self, precision: str, *, convolution: bool) -> str:
        """The units that compute in a precision: the fp32 units, if the device has none for it.

        `fp32` is as in stock PyTorch: convolutions may use tf32, other products do not.
        """
        wanted = {"ieee": "fp32", "fp32": "tf32" if convolution else "fp32"}.get(precision, precision)
        return wanted if wanted in self.peak else "fp32"

    def rate(self, precision: str, *, convolution: bool) -> tuple[float, float]:
        """Peak and efficiency in a precision."""
        units = self.units(precision, convolution=convolution)
        peak = self.peak[units]
        if units in self.efficiency:
            return peak, self.efficiency[units]
        share = self.family.share(units, convolution=convolution)
        if units in HALF or units == "tf32":
            share *= (peak / self.bandwidth / _USUAL_INTENSITY) ** -self.family.slope
        return peak, share

    def basis(self, precision: str) -> str:
        """What its speed in a precision, that of convolutions, is based on."""
        units = self.units(precision, convolution=True)
        if self.measured.get(units) == OWN:
            return FITTED
        return self.evidence.get("fp16" if units in HALF else units, SHEET)


@dataclass(frozen=True, slots=True)
class Software:
    """How a training system uses a device: one efficiency, and facts about how it works."""

    name: str
    title: str
    efficiency: float  # multiplied with the device's
    parallel_efficiency: float = 1.0  # multiplied with it where a plan has one stage
    jitter: float = 0.0  # how much longer a step takes for every doubling of a machine's devices
    half_jitter: float = 0.0  # the same beside it, in half precision
    network_jitter: float = 0.0  # the same for every doubling of machines
    overhead: float = 0.0  # seconds of a step that no device computes
    fused: bool = False  # ReLU and addition run inside the normalisation before them
    pure_half: bool = False  # no autocast: weights, layer norm and softmax are in half precision like the rest
    whole_sums: bool = False  # sums gradients tensor by tensor: through the host, one goes up before it comes down
    channels_last: bool = False  # half-precision convolutions need no change of memory layout
    whole_batches: bool = False  # a stage waits for a whole batch before it begins
    in_flight: int | None = None  # batches in the pipeline, if the software fixes them
    blocking: bool = False  # computes wait for copies to and from the host
    handover: Link | None = None  # the host's memory, if stages hand over through it
    update_passes: float = 5.0  # times the optimizer reads or writes the weights
    temporaries: float = 0.0  # buffers as large as the weights, beside weights, gradient and optimizer state
    context: int = 500 * MIB  # memory of the process itself on a GPU
    workspace: int = 1024 * MIB  # most that a convolution may borrow
    keeps_workspace: bool = False  # the largest workspace is never given back
    loader: int = 0  # memory of the input pipeline on the device, with real data
    input_bytes: int = 1  # bytes of one value of an image as it is copied to the device


@dataclass(frozen=True, slots=True)
class HostBudget:
    """Bytes per second that all copies of a machine through its host get together, where nobody measured it."""

    budget: float
    slow: float
    fast: float

    def usual(self, devices: int) -> float:
        """The budget to assume: half of it for more than four cards, which sit behind switches and sockets."""
        return self.budget / 2 if devices > _FEW_CARDS else self.budget


@dataclass(frozen=True, slots=True)
class Catalog:
    """All entries, by name."""

    devices: Mapping[str, DeviceSpec]
    links: Mapping[str, Link]
    software: Mapping[str, Software]
    clusters: Mapping[str, Cluster]
    decode: float  # images per second that one core decodes
    host: HostBudget
    hosts: Mapping[str, float] = field(default_factory=dict)  # budgets of machines that rows measured, by their name
    errors: Mapping[str, float] = field(default_factory=dict)  # what 90 % of errors are within, by class of evidence

    def device(self, name: str) -> DeviceSpec:
        return find(self.devices, name, "device")

    def system(self, name: str) -> Software:
        return find(self.software, name, "software")

    def cluster(self, name: str) -> Cluster:
        return find(self.clusters, name, "cluster")


def find(known: Mapping[str, _Entry], name: str, what: str) -> _Entry:
    """The entry of a name, or an error with the nearest name."""
    if name in known:
        return known[name]
    listed = "" if what == "software" else " (stagewright cluster list shows all)"
    raise UserError(f"unknown {what} '{name}'{listed}; {did_you_mean(name, sorted(known))}")


def calibration_note(devices: Iterable[DeviceSpec], precision: str) -> str | None:
    """A line that names the devices whose own speed no measurement has calibrated."""
    words = {ALIKE: "by other cards of its chip family", SHEET: "by its data sheet"}
    named: dict[str, list[str]] = {}
    for name, basis in sorted({device.name: device.basis(precision) for device in devices}.items()):
        if basis != FITTED:
            named.setdefault(words.get(basis, words[SHEET]), []).append(name)
    parts = [f"{', '.join(names)}: {basis}" for basis, names in named.items()]
    return f"{precision} speed of {'; of '.join(parts)}" if parts else None
