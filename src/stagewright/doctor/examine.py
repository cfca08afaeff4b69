"""A whole examination: facts first, then what they mean, then measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.doctor.finding import Finding, Grade
from stagewright.machine.environment import Environment, environment

if TYPE_CHECKING:
    from stagewright.doctor.disk import DiskRead
    from stagewright.doctor.measure import Measured

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found."""

    environment: Environment
    findings: tuple[Finding, ...]
    measured: tuple[Measured, ...]
    disk: DiskRead | None

    @property
    def verdict(self) -> str:
        """All of it in a line."""
        hurts = sum(found.grade is Grade.HURTS for found in self.findings)
        notes = sum(found.grade is Grade.NOTE for found in self.findings)
        devices = f"{len(self.environment.gpus)} GPUs" if self.environment.gpus else "no GPU: train with --device cpu"
        if not hurts and not notes:
            return f"{devices}; nothing to worry about"
        return f"{devices}; {hurts} will hurt, {notes} to note, {len(self.findings) - hurts - notes} fine"

    def describe(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "findings": [asdict(found) for found in self.findings],
            "measured": [asdict(one) for one in self.measured],
            "disk": None if self.disk is None else asdict(self.disk),
            "environment": self.environment.describe(),
        }


def examine(data: str | None, *, measures: bool, tell: Tell) -> Examination:
    """Look at this machine; `data` is a file or folder whose disk is to be timed."""
    from stagewright.doctor.gpus import gpu_findings, topology_findings
    from stagewright.doctor.software import software_findings
    from stagewright.doctor.states import read_states
    from stagewright.doctor.system import read_circumstances, system_findings
    from stagewright.runtime.nodes import DEFAULT_PORT

    read = None if data is None else _read_disk(data, tell)
    tell("system and GPUs")
    found = environment()
    states, peers = read_states()
    findings = [
        *system_findings(found, read_circumstances(DEFAULT_PORT)),
        *software_findings(found),
        *gpu_findings(found.gpus, states),
        *topology_findings(found, peers),
    ]
    measured = tuple(_measured(tell)) if measures else ()
    return Examination(found, (*findings, *_speeds(found, measured, read)), measured, read)


def _read_disk(data: str, tell: Tell) -> DiskRead:
    from stagewright.doctor.disk import read_disk

    tell(f"reading {data}")
    return read_disk(Path(data.partition(":")[2] if data.startswith(("folder:", "ofrecord:", "tensors:")) else data))


def _measured(tell: Tell) -> Iterator[Measured]:
    from stagewright.doctor.measure import Measured, gpu_copies, loopback, memory_copy

    tell("copies of memory")
    yield _attempt("memory copy, one core", memory_copy, Measured)
    tell("messages between two ranks")
    yield _attempt("between two ranks", loopback, Measured)
    for name, copy in gpu_copies():
        tell(name)
        yield _attempt(name, copy, Measured)


def _attempt(name: str, work: Callable[[], Measured], measured: type[Measured]) -> Measured:
    """A measurement, or why there is none: a doctor does not fall ill of what it finds."""
    try:
        return work()
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        return measured(name, None, trouble=words or type(error).__name__)


def _speeds(found: Environment, measured: tuple[Measured, ...], read: DiskRead | None) -> Iterator[Finding]:
    from stagewright.doctor.speeds import disk_finding, speed_findings
    from stagewright.machine.gpu import visible

    yield from speed_findings(measured, dict(enumerate(visible(found.gpus))))
    if read is not None:
        yield disk_finding(read)
