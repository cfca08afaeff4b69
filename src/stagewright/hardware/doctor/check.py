"""Checks this machine: reads the facts, grades them as findings, measures bandwidths, and prints all of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from stagewright.errors import counted, printable
from stagewright.hardware.doctor.finding import Finding, Grade, finding_lines
from stagewright.hardware.doctor.gpus import gpu_findings, read_states, topology_findings
from stagewright.hardware.doctor.measure import (
    DiskRead,
    Measured,
    disk_finding,
    gpu_copies,
    loopback,
    memory_copy,
    pairs_at_once,
    read_disk,
    speed_findings,
)
from stagewright.hardware.doctor.system import read_system_state, software_findings, system_findings
from stagewright.hardware.environment import Environment, read_environment
from stagewright.hardware.gpu import visible
from stagewright.runtime.multinode.nodes import DEFAULT_PORT

Progress = Callable[[str], None]
_FILES = ("folder:", "ofrecord:", "segmentation:", "table:", "tensors:", "tokens:")  # kinds that name one path
_LEAST_WIDTH, _MOST_WIDTH = 40, 100  # of what is printed


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """Everything that was found out about this machine."""

    environment: Environment
    findings: tuple[Finding, ...]
    measured: tuple[Measured, ...]
    disk: DiskRead | None

    @property
    def summary(self) -> str:
        """All of it in one line."""
        problems = sum(found.grade is Grade.PROBLEM for found in self.findings)
        notes = sum(found.grade is Grade.NOTE for found in self.findings)
        gpus = len(self.environment.gpus)
        devices = counted(gpus, "GPU") if gpus else "no GPU: train with --device cpu"
        if not problems and not notes:
            return f"{devices}; no problems found"
        fine = len(self.findings) - problems - notes
        return f"{devices}; {counted(problems, 'problem')}, {counted(notes, 'note')}, {fine} fine"

    def describe(self) -> dict[str, Any]:
        """Everything as JSON takes it; the summary is called `verdict` there."""
        return {
            "verdict": self.summary,
            "findings": [asdict(found) for found in self.findings],
            "measured": [asdict(one) for one in self.measured],
            "disk": None if self.disk is None else asdict(self.disk),
            "environment": self.environment.describe(),
        }


def check_machine(data: str | None, *, measures: bool, progress: Progress) -> MachineCheck:
    """Check this machine; `data` is a file or folder whose disk to time, `measures` asks for bandwidths too."""
    read = None if data is None else _read_disk(data, progress)
    progress("system and GPUs")
    found = read_environment()
    states, peers = read_states()
    findings = [
        *system_findings(found, read_system_state(DEFAULT_PORT)),
        *software_findings(found),
        *gpu_findings(found.gpus, states),
        *topology_findings(found, peers),
    ]
    measured = tuple(_measured(progress)) if measures else ()
    findings += speed_findings(measured, dict(enumerate(visible(found.gpus))))
    if read is not None:
        findings.append(disk_finding(read))
    return MachineCheck(found, tuple(findings), measured, read)


def _read_disk(data: str, progress: Progress) -> DiskRead:
    progress(f"reading {data}")
    return read_disk(Path(data.partition(":")[2] if data.startswith(_FILES) else data))


def _measured(progress: Progress) -> Iterator[Measured]:
    progress("memory copies")
    yield try_measuring("memory copy, one core", memory_copy)
    progress("messages between two ranks")
    yield try_measuring("between two ranks", loopback)
    for name, copy in (*gpu_copies(), *pairs_at_once()):
        progress(name)
        yield try_measuring(name, copy)


def try_measuring(name: str, measure: Callable[[], Measured]) -> Measured:
    """A measurement, or the reason why it failed: the doctor reports faults and never stops at one."""
    try:
        return measure()
    except Exception as error:
        words = " ".join(str(error).split())[:120]
        return Measured(name, None, trouble=words or type(error).__name__)


def show(console: Console, check: MachineCheck) -> None:
    """Print the findings, area by area, then the matrix of connections and the summary."""
    width = max(min(console.width, _MOST_WIDTH), _LEAST_WIDTH) if console.is_terminal else console.width
    lines = list(finding_lines(check.findings, width))
    topology = check.environment.topology
    if topology is not None and len(topology) > 1:
        lines += [Text("connections", style="bold"), *(Text(f"  {row}") for row in topology.table())]
    for line in (*lines, Text(""), *map(Text, textwrap.wrap(check.summary, width))):
        line.plain = printable(line.plain)
        console.print(line, soft_wrap=True)
