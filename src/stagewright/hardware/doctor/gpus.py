"""Findings about GPUs: power, slots, other processes, temperature, and how the GPUs reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagewright.hardware.doctor.finding import Finding, Grade, finding
from stagewright.hardware.environment import Environment
from stagewright.hardware.gpu import Gpu, NoNvml, Nvml, open_nvml
from stagewright.hardware.meters import MPS, GpuMeter, name_of
from stagewright.hardware.topology import LinkKind
from stagewright.metrics import GIB

_LOW_CAP = 0.8  # of the default power limit
_HOT = 83.0  # degrees Celsius; most GPUs begin to lower their clocks there
_TOPOLOGY = "topology"
_P2P_READ = 0  # NVML's index of reading a peer's memory; the Python package has a tuple there by mistake
_P2P_ALLOWED = 0  # NVML's answers
_P2P_REFUSED = (1, 2, 3, 4, 5)
Peers = list[list[bool | None]]  # whether GPU i may read the memory of GPU j


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU now: the processes on it, memory, temperature, and why its clock is lowered."""

    processes: tuple[str, ...] = ()  # of others, such as `1234 python`
    used: int | None = None  # bytes
    temperature: float | None = None
    throttled: tuple[str, ...] = ()


def read_states() -> tuple[dict[int, GpuState], Peers]:
    """The state of every GPU by index, and which may read each other's memory; both empty without a driver."""
    try:
        nvml = open_nvml()
    except NoNvml:
        return {}, []
    with nvml:
        handles = nvml.handles()
        uuids = [nvml.ask("nvmlDeviceGetUUID", handle) for handle in handles]
        states = {
            gpu.index: GpuState(_processes(nvml, handles[gpu.index]), gpu.memory, gpu.temperature, gpu.throttled)
            for gpu in GpuMeter(nvml, uuids, name_of).read(())
        }
        return states, [[_may_read(nvml, one, other) for other in handles] for one in handles]


def gpu_findings(gpus: Sequence[Gpu], states: Mapping[int, GpuState]) -> Iterator[Finding]:
    mig = "split into MIG instances, which can't reach each other; undo it with nvidia-smi -mig 0"
    for gpu in gpus:
        area, state = f"GPU {gpu.index}", states.get(gpu.index, GpuState())
        memory = "" if gpu.memory is None else f", {gpu.memory / GIB:.1f} GiB"
        yield finding(area, "card", f"{gpu.name}{memory}", (bool(gpu.is_mig), Grade.NOTE, mig))
        yield _power(area, gpu)
        yield _slot(area, gpu)
        yield from _now(area, state)
    kinds = Counter(gpu.name for gpu in gpus)
    if len(kinds) > 1:
        names = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        advice = "a stage waits for its slowest replica; give each stage GPUs of one kind"
        yield Finding("GPUs", "kinds", names, Grade.NOTE, advice)


def _power(area: str, gpu: Gpu) -> Finding:
    limit, default = gpu.power_limit, gpu.power_default
    if limit is None or default is None:
        return finding(area, "power cap", None if limit is None else f"{limit:.0f} W")
    lift = f"lift the cap with nvidia-smi -i {gpu.index} -pl {default:.0f}"
    is_low = gpu.is_capped and limit < _LOW_CAP * default
    return finding(
        area,
        "power cap",
        f"{limit:.0f} W of {default:.0f} W",
        (is_low, Grade.PROBLEM, f"clocks will drop under load; {lift}"),
        (gpu.is_capped, Grade.NOTE, f"below the default; {lift}"),
    )


def _slot(area: str, gpu: Gpu) -> Finding:
    generation, width = gpu.pcie_generation, gpu.pcie_width
    if generation is None and width is None:
        return finding(area, "PCIe", None)
    value = f"{generation or '?'}.0 x{width or '?'}, the GPU supports "
    value += f"{gpu.card_generation or '?'}.0 x{gpu.card_width or '?'}"
    lanes = 1.0 if width is None or gpu.card_width is None else width / gpu.card_width
    steps = 0 if generation is None or gpu.card_generation is None else generation - gpu.card_generation
    share = lanes * 2.0**steps
    advice = f"about {share:.0%} of the bandwidth that the GPU supports; " + (
        "use a slot with all lanes, or check riser and BIOS" if lanes < 1 else "board, riser or BIOS limit it"
    )
    is_slow = lanes < 1 or steps < 0
    troubles = (is_slow and share <= 0.25, Grade.PROBLEM, advice), (is_slow, Grade.NOTE, advice)
    return finding(area, "PCIe", value, *troubles)


def _now(area: str, state: GpuState) -> Iterator[Finding]:
    """Who computes on a GPU, and how warm it is."""
    others = ", ".join(state.processes[:3]) + (f" and {len(state.processes) - 3} more" if state.processes[3:] else "")
    used = "" if state.used is None else f", {state.used / GIB:.1f} GiB in use"
    advice = "other processes compute on this GPU; wait for them or end them before measuring"
    yield finding(area, "processes", (others or "none") + used, (bool(state.processes), Grade.PROBLEM, advice))
    temperature = "temperature not known" if state.temperature is None else f"{state.temperature:.0f} C"
    slowed = [reason for reason in state.throttled if reason != "application clocks"]
    yield finding(
        area,
        "condition",
        ", ".join([temperature, *state.throttled]),
        (bool(slowed), Grade.NOTE, f"already slowed down by {' and '.join(slowed)}; check cooling and power"),
        ((state.temperature or 0) > _HOT, Grade.NOTE, "hot before any work; check the cooling"),
    )


def topology_findings(found: Environment, peers: Sequence[Sequence[bool | None]]) -> Iterator[Finding]:
    """How pairs of GPUs are connected, and whether they may read each other's memory."""
    topology = found.topology
    if topology is None or len(topology) < 2:
        return
    cells = [cell for index, row in enumerate(topology.rows) for cell in row[:index]]
    kinds = Counter("not known" if cell is None else str(cell) for cell in cells)
    pairs = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    is_far = any(cell is not None and cell.kind is LinkKind.SYSTEM for cell in cells)
    advice = (
        "some pairs cross sockets; keep the replicas of a stage on one socket, or let the planner do it: "
        "stagewright cluster import --here -o box.toml"
    )
    yield finding(_TOPOLOGY, "pairs", pairs, (is_far, Grade.NOTE, advice))
    allowed = [peers[one][other] for one in range(len(peers)) for other in range(len(peers)) if one != other]
    known = [value for value in allowed if value is not None]
    advice = (
        "the other pairs copy through host memory, which favours plans that move few bytes; the usual reasons are "
        "GeForce drivers, virtual machines and an IOMMU (docs/hardware.md)"
    )
    share = f"{sum(known)} of {len(allowed)} pairs" if known else None
    yield finding(_TOPOLOGY, "peer access", share, (not all(known), Grade.NOTE, advice))


def _processes(nvml: Nvml, handle: object) -> tuple[str, ...]:
    listed = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    names = [(int(entry.pid), name_of(int(entry.pid)) or "of another container") for entry in listed]
    return tuple(f"{process} {name}" for process, name in names if not name.startswith(MPS))


def _may_read(nvml: Nvml, one: object, other: object) -> bool | None:
    if one is other:
        return True
    status = nvml.ask("nvmlDeviceGetP2PStatus", one, other, _P2P_READ)
    return True if status == _P2P_ALLOWED else False if status in _P2P_REFUSED else None
