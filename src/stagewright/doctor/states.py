"""GPUs as they are now, asked of their driver."""

from __future__ import annotations

from stagewright.doctor.gpus import State
from stagewright.machine.nvml import NoNvml, Nvml, open_nvml
from stagewright.monitor.gpus import MPS, GpuMeter
from stagewright.monitor.host import name_of

_READ = 0  # NVML's number for reading another GPU's memory; the Python package has a tuple there by mistake
_ALLOWED = 0
_UNSUPPORTED = (1, 2, 3, 4, 5)

Peers = list[list[bool | None]]


def read_states() -> tuple[dict[int, State], Peers]:
    """Every GPU's state by index, and whether each may read each other's memory; nothing without a driver."""
    try:
        nvml = open_nvml()
    except NoNvml:
        return {}, []
    with nvml:
        handles = nvml.handles()
        uuids = [nvml.ask("nvmlDeviceGetUUID", handle) for handle in handles]
        uses = GpuMeter(nvml, uuids, name_of).read(())
        states = {
            use.index: State(_processes(nvml, handles[use.index]), use.memory, use.temperature, use.throttled)
            for use in uses
        }
        return states, [[_may_read(nvml, one, other) for other in handles] for one in handles]


def _processes(nvml: Nvml, handle: object) -> tuple[str, ...]:
    listed = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
    names = [(int(entry.pid), name_of(int(entry.pid)) or "of another container") for entry in listed]
    return tuple(f"{process} {name}" for process, name in names if not name.startswith(MPS))


def _may_read(nvml: Nvml, one: object, other: object) -> bool | None:
    if one is other:
        return True
    status = nvml.ask("nvmlDeviceGetP2PStatus", one, other, _READ)
    return True if status == _ALLOWED else False if status in _UNSUPPORTED else None
