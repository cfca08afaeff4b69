"""Checks this machine: reads the facts, grades them as findings, measures bandwidths, and prints all of it."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from stagewright.config.sources import kind_of
from stagewright.errors import counted, printable
from stagewright.hardware.doctor.finding import Finding, Grade, finding_lines
from stagewright.hardware.doctor.gpus import gpu_findings, read_states, topology_findings
from stagewright.hardware.doctor.measure import (
    DiskRead,
    Measured,
    disk_finding,
    measurements,
    read_disk,
    speed_findings,
)
from stagewright.hardware.doctor.system import read_system_state, software_findings, system_findings
from stagewright.hardware.environment import Environment, read_environment
from stagewright.hardware.gpu import visible
from stagewright.runtime.multinode.nodes import DEFAULT_PORT
from stagewright.voice import SILENT, Voice

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
        grades = Counter(found.grade for found in self.findings)
        gpus = len(self.environment.gpus)
        devices = counted(gpus, "GPU") if gpus else "no GPU: train with --device cpu"
        if grades.total() == grades[Grade.FINE]:
            return f"{devices}; no problems found"
        problems, notes = counted(grades[Grade.PROBLEM], "problem"), counted(grades[Grade.NOTE], "note")
        return f"{devices}; {problems}, {notes}, {grades[Grade.FINE]} fine"

    def describe(self) -> dict[str, Any]:
        """Everything as JSON takes it; the summary is called `verdict` there."""
        return {
            "verdict": self.summary,
            "findings": [asdict(found) for found in self.findings],
            "measured": [asdict(one) for one in self.measured],
            "disk": None if self.disk is None else asdict(self.disk),
            "environment": self.environment.describe(),
        }


def check_machine(data: str | None, *, measures: bool, voice: Voice = SILENT) -> MachineCheck:
    """Check this machine; `data` is a file or folder whose disk to time, `measures` asks for bandwidths too."""
    read = None
    if data is not None:
        voice.progress(f"reading {data}")
        kind = kind_of(data)
        is_path = ":" in data and kind is not None and kind.is_path
        read = read_disk(Path(data.partition(":")[2] if is_path else data))
    voice.progress("system and GPUs")
    found = read_environment()
    states, peers = read_states()
    measured = tuple(try_measuring(*each, voice) for each in measurements()) if measures else ()
    findings = [
        *system_findings(found, read_system_state(DEFAULT_PORT)),
        *software_findings(found),
        *gpu_findings(found.gpus, states),
        *topology_findings(found, peers),
        *speed_findings(measured, dict(enumerate(visible(found.gpus)))),
    ]
    findings += [] if read is None else [disk_finding(read)]
    return MachineCheck(found, tuple(findings), measured, read)


def try_measuring(name: str, measure: Callable[[str], Measured], voice: Voice = SILENT) -> Measured:
    """A measurement, or the reason why it failed: the doctor reports faults and never stops at one."""
    voice.progress(name)
    try:
        return measure(name)
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
