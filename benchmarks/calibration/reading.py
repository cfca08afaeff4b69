"""A measured row read as a setting: which card, software, model and links its words mean.

`read_row` finds them in the catalog; what it does not know is an `Unknown` that says what. `row_seconds` is the time of
a step, by the same formulas as any prediction of plain data parallel, on arrays of the model's shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.calibration.architectures import known_shapes
from stagewright.cluster.catalog import shipped
from stagewright.cluster.specs import HALF, Catalog, DeviceSpec
from stagewright.cluster.topology import Cluster, Level, Link, Machine
from stagewright.hardware.rows import Row
from stagewright.model.networks.zoo import ZOO
from stagewright.plan import cost
from stagewright.planning.traced import trace_model
from stagewright.profile.analytic import Columns, Rates
from stagewright.profile.shapes import Shape

_MAKERS = re.compile(r"\b(nvidia|geforce|tesla|amd|gpu|graphics|gpus)\b")
_SIZE = re.compile(r"(\d+)\s?gb?$|(sxm\d?|pcie|founders ?edition|fe|oc)$")
_PYTORCH = (
    "pytorch|torch|timm|apex|lightning|fastai|ffcv|composer|hugging|transformers|deepspeed|megatron|caffe|chainer"
)
_SOFTWARE = (  # the first that a software's text has decides
    ("stagewright", "stagewright"),  # first: our rows also name torch
    *((name, name) for name in ("mxnet", "oneflow", "pipedream", "paddle")),
    ("xla|jax", "tensorflow-xla"),
    ("tensorflow|tf_cnn|tf1|tf2|keras", "tensorflow"),
    ("flax", "tensorflow-xla"),
    ("mindspore", "paddle"),
    (_PYTORCH, "pytorch"),
)
_LAYOUTS = (("nhwc", True), ("channels_last", True), ("channels last", True), ("nchw", False))
_NGC_CHANNELS_LAST = 20.10  # NGC's PyTorch examples run mixed precision channels last from about this release on
_TENSORFLOW_CHANNELS_LAST = 14  # minor version of TensorFlow 1 from which half precision runs channels last
_PRECISIONS = (
    (("tf32",), "tf32"),
    (("bf16", "bfloat16"), "bf16"),
    (("fp16", "amp", "mixed", "half", "float16", "not stated"), "fp16"),
    (("fp32", "float32", "single"), "fp32"),
    (("fp64", "float64", "double"), "fp64"),
)
_NO_PEERS = re.compile(r"^rtx-(20|30|40|50)")  # GeForce cards without peer access over PCIe


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why a row can't be read."""

    row: Row
    why: str


@dataclass(frozen=True)
class Reading:
    """A row with what its words mean; the catalog's figures are looked up when it is predicted."""

    row: Row
    devices: tuple[tuple[int, str], ...]  # how many of which, in a machine
    software: str
    channels_last: bool | None  # None: as the software does it
    precision: str
    columns: Columns
    steps: int = 1  # of a batch a device, for one update
    pure_half: bool = False  # half precision without autocast
    is_fused: bool = False  # activations and sums run inside batch norm

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for _, kind in self.devices)

    @property
    def is_staged(self) -> bool:
        """Whether its gradients are copied through the host."""
        return self.row.gpus // self.row.nodes > 1 and _link(self, shipped()).staged

    @property
    def host(self) -> str:
        """The name of its machine's host budget in the catalog."""
        return " ".join(self.row.host)


def read_row(row: Row, catalog: Catalog) -> Reading | Unknown:
    """What a row's words mean."""
    each = row.gpus // row.nodes
    devices = read_devices(row.hardware, each, catalog)
    if devices is None:
        return Unknown(row, f"unknown hardware '{row.hardware}'")
    shapes = model_shapes(row.model)
    if shapes is None:
        return Unknown(row, f"unknown model '{row.model}'")
    text = row.software.lower()
    software = next((name for words, name in _SOFTWARE if re.search(words, text)), None)
    if software is None:
        return Unknown(row, f"unknown software '{row.software}'")
    wanted = row.precision.lower()
    precision = next((name for words, name in _PRECISIONS if any(word in wanted for word in words)), None)
    if precision is None:
        return Unknown(row, f"unknown precision '{row.precision}'")
    channels_last = next((is_last for word, is_last in _LAYOUTS if word in text), None)
    release = re.search(r"ngc pytorch (\d\d\.\d\d)", text)
    if channels_last is None and release and float(release[1]) >= _NGC_CHANNELS_LAST:
        channels_last = True
    old = re.search(r"tensorflow 1\.(\d+)", text)
    if channels_last is None and old and int(old[1]) < _TENSORFLOW_CHANNELS_LAST:
        channels_last = False
    accumulated = re.search(r"accumulation to (\d+)", row.note)
    steps = max(1, int(accumulated[1]) // row.batch_per_gpu) if accumulated else 1
    pure_half = "megatron" in text or (release is not None and "bert" in row.model.lower())
    fused = "tf_cnn" in f"{text} {row.note}".lower() and precision in HALF  # it asks for cuDNN's persistent batch norm
    return Reading(row, devices, software, channels_last, precision, Columns.of(shapes), steps, pure_half, fused)


def model_shapes(name: str) -> Sequence[Shape] | None:
    """The shapes of a model of the zoo or of the literature; None if neither has it."""
    return trace_model(name).shapes if name in ZOO else known_shapes(name)


def read_devices(text: str, count: int, catalog: Catalog) -> tuple[tuple[int, str], ...] | None:
    """The cards of a machine: `rtx-3090`, or `2x rtx-a6000 + 2x rtx-2080ti`; None if one is unknown."""
    found = []
    pieces = [piece for piece in re.split(r"\+|\band\b|,", text) if piece.strip()]
    for piece in pieces:
        match = re.match(r"\s*(?:(\d+)\s*x\s+)?(.*)", piece, re.IGNORECASE)
        assert match is not None
        name = find_device(match[2], catalog)
        if name is None:
            return None
        found.append((int(match[1] or 1) if len(pieces) > 1 else count, name))
    return tuple(found)


@cache
def _spellings() -> Mapping[str, str]:
    """Every name and alias of the catalog's devices, without what people leave out."""
    return {_plain(name): spec.name for name, spec in shipped().devices.items()}


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", text.lower()))


def find_device(text: str, catalog: Catalog) -> str | None:
    """The catalog's name of a card as people write it; None if the catalog has none."""
    if text in catalog.devices:
        return catalog.devices[text].name
    known, rest = _spellings(), text.lower().strip()
    while rest:
        if (found := known.get(_plain(rest))) is not None:
            return found
        shorter = _SIZE.sub("", rest).strip(" -_()/")
        if shorter == rest:
            break
        rest = shorter
    words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word in known]
    if words:
        return known[max(words, key=len)]
    whole = _plain(text)
    inside = [name for name in known if len(name) >= 4 and re.search(rf"{name}(?![0-9]|ti|super|s$)", whole)]
    return known[max(inside, key=len)] if inside else None


def _device(reading: Reading, catalog: Catalog) -> DeviceSpec:
    return catalog.device(reading.devices[0][1])


def _link(reading: Reading, catalog: Catalog) -> Link:
    """The link between a machine's cards, by the row's words or, where it says nothing, by the card."""
    device, text = _device(reading, catalog), reading.row.link.lower()
    nvlinked = "nvswitch" in text or ("nvlink" in text and "no nvlink" not in text)
    built_in = device.nvlink is not None and ("sxm" in device.name or device.name in ("h200", "b200"))
    if device.nvlink is not None and (nvlinked or (built_in and "pcie" not in text)):
        one = catalog.links[device.nvlink]
        lanes = {"nvlink1": 4, "nvlink2": 6 if built_in else 2, "nvlink3": 12, "nvlink3-ga102": 4}.get(one.name, 18)
        return replace(one, bandwidth=one.bandwidth * lanes)
    generation = re.search(r"pcie\s*(?:gen)?\s*(\d)", text)
    number = min(max(int(generation[1]) if generation else device.pcie or 3, 3), 5)
    staged = _NO_PEERS.match(device.name) is not None or "no peer" in text or "no p2p" in text
    if "p2p" in text and "no p2p" not in text:
        staged = False
    return replace(catalog.links[f"pcie{number}-phb"], staged=staged)


def _network(text: str, catalog: Catalog) -> Link:
    rate = re.search(r"(\d+)\s*(?:x\s*(\d+)\s*)?gb", text.lower())
    speed = int(rate[1]) * int(rate[2] or 1) if rate else 100
    known = {int(name[4:-1]): link for name, link in catalog.links.items() if re.fullmatch(r"net-\d+g", name)}
    return known[min(known, key=lambda one: abs(one - speed))]


def row_cluster(reading: Reading, catalog: Catalog) -> Cluster:
    """The machines of a row; those with several kinds of cards as one machine of its first, which is only for links."""
    row, each = reading.row, reading.row.gpus // reading.row.nodes
    link = _link(reading, catalog)
    level = Level(link, (tuple(range(each)),))
    known = catalog.hosts.get(reading.host)
    host = known or catalog.host.usual(each)
    machine = Machine(each, reading.devices[0][1], (level,), host=host, knows_host=known is not None)
    network = _network(row.link, catalog) if row.nodes > 1 else None
    return Cluster((machine,) * row.nodes, row.hardware, network)


def row_seconds(reading: Reading, catalog: Catalog) -> float:
    """Seconds of a step: computes of the slowest card, what of the all-reduce is not hidden, and the update."""
    row, software = reading.row, catalog.system(reading.software)
    if reading.channels_last is not None:
        software = replace(software, channels_last=reading.channels_last)
    software = replace(software, pure_half=reading.pure_half, fused=software.fused or reading.is_fused)
    kinds = [catalog.device(kind) for kind in reading.kinds]
    parameters = float(reading.columns.parameters.sum())
    computes = []
    for device in kinds:
        forward, backward = reading.columns.seconds(Rates.of(device, reading.precision, software), row.batch_per_gpu)
        update = cost.update_seconds(parameters, software.update_passes, device.bandwidth)
        computes.append((float(forward.sum() + backward.sum()), float(backward.sum()), float(update)))
    compute, backward_seconds, update = max(computes)
    lost = float(cost.scaling_factor(row.gpus, row.nodes, software, reading.precision)) - 1
    factor = 1 + lost / reading.steps
    exposed = 0.0
    if row.gpus > 1:
        cluster = row_cluster(reading, catalog)
        fabric = cost.ring_fabric(cluster, cluster.devices)
        size = parameters * cost.GRADIENT_BYTES
        largest = float(reading.columns.parameters.max()) * cost.GRADIENT_BYTES
        carried = cost.carried_bytes(size, largest, software, fabric)
        reduction = float(cost.allreduce_seconds(carried, row.gpus, fabric.bandwidth, fabric.latency))
        hiding = cost.hidden_seconds(backward_seconds * factor, fabric)
        exposed = float(cost.exposed_seconds(reduction, hiding, cost.tail_share(size)))
    return compute * factor + (exposed + update + software.overhead) / reading.steps


def row_rate(reading: Reading, catalog: Catalog) -> float:
    """Predicted samples per second of all devices."""
    row = reading.row
    return row.gpus * row.batch_per_gpu / row_seconds(reading, catalog)
