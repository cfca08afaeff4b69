"""The decision before every start of a run: start, restart, wait for more machines, or fail.

It is a function of values, so that a table can test it; `supervisor` observes, asks it, and acts.

A run is restarted up to `--max-restarts` times, but not after a user's mistake or a loss that is not finite
(`Fault.is_final`), nor after an exception that comes twice in a row in the same words (`Fault.is_raised`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stagewright.errors import counted
from stagewright.events import Failure
from stagewright.plan.plan import Plan
from stagewright.runtime.faults import Fault, describe_fault
from stagewright.runtime.multinode.consistency import first_difference
from stagewright.runtime.multinode.meeting import MachineReport, StartDecision

_REPORT_SECONDS = 8.0  # for the other machines to report what happened to them


@dataclass(frozen=True, slots=True)
class StartState:
    """What one machine's supervisor knows before a start, beside the machines' reports."""

    plan: Plan
    folder: str  # of the run
    keeps_checkpoints: bool
    max_restarts: int
    machines: tuple[str, ...]  # their names
    machine: int = 0  # this one
    silence: float = 60.0  # seconds without a sign, after which a machine counts as lost
    start: int = 1  # number of the start to decide about
    restarts: int = 0  # so far
    is_stopping: bool = False  # the user asked for it
    failures: tuple[Failure, ...] = ()  # that ranks of the start before sent
    fault: Fault | None = None  # of the start before, once it is known
    previous: Fault | None = None  # the fault before that
    first: Fault | None = None  # of the run

    def lost_text(self, machine: int) -> str:
        return f"lost {self.machines[machine]}: no sign of it for {self.silence:g} s (see --lost-timeout)"


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to start or why not, None to wait for more reports; and the fault that ended the start before."""

    start: StartDecision | None = None
    fault: Fault | None = None


def decide(state: StartState, reports: Mapping[int, MachineReport], waited: float) -> Decision:
    """Decide about a start, given the reports of machines so far and the seconds that machine 0 has waited for more.

    Machine 0 decides for all. Another machine decides only where machine 0 is lost: whether to wait for it.
    """
    if state.machine:
        lost = reports[state.machine].lost
        is_over = lost and state.restarts >= state.max_restarts
        return Decision(StartDecision(failed=state.lost_text(lost[0]))) if is_over else Decision()
    for machine, report in reports.items():
        if differs := first_difference(reports[0].values, report.values):
            name, here, there = differs
            return _fail(
                f"{state.machines[machine]} has {name} = {there} but machine 0 has {here}; "
                "run the same command, with the same code and data, on each machine"
            )
    missing = set(range(len(state.machines))) - reports.keys()
    fault = state.fault
    if state.start > 1 and fault is None:
        lost_machines = {machine for report in reports.values() for machine in report.lost}
        if missing - lost_machines and waited < _REPORT_SECONDS:
            return Decision()
        fault = _find_fault(state, reports, sorted(missing))
    if fault is not None and (failed := _final(state, fault)):
        return _fail(failed, fault)
    if missing:
        return Decision(fault=fault)
    blind = [machine for machine, report in reports.items() if not report.sees_checkpoints]
    if blind and state.keeps_checkpoints:
        return _fail(
            f"{state.machines[blind[0]]} can't see {state.folder}, where machine 0 saves "
            "checkpoints; choose --runs on a shared file system, or leave out --checkpoint-every",
            fault,
        )
    batches = reports[0].batches
    batch = min(batches) if blind else max(batches)
    if apart := [machine for machine in blind if batch not in reports[machine].batches]:
        return _fail(
            f"{state.machines[apart[0]]} starts at batch {min(reports[apart[0]].batches)} but machine 0 at {batch}; "
            "give the same checkpoint with --resume on each machine",
            fault,
        )
    if fault is None:
        return Decision(StartDecision(batch))
    return Decision(StartDecision(batch, state.restarts + 1, fault.text), fault)


def _fail(failed: str, fault: Fault | None = None) -> Decision:
    return Decision(StartDecision(failed=failed), fault)


def _find_fault(state: StartState, reports: Mapping[int, MachineReport], silent: list[int]) -> Fault:
    """What went wrong, from the reports, the ranks' failures and the machines that do not report."""
    return describe_fault(
        state.plan,
        state.failures,
        [ended for report in reports.values() for ended in report.exits],
        [hung for report in reports.values() for hung in report.hung],
        [state.lost_text(machine) for report in reports.values() for machine in report.lost]
        + [f"lost {state.machines[machine]}: it did not report what happened" for machine in silent],
    )


def _final(state: StartState, fault: Fault) -> str | None:
    """The error message of a fault without another restart; None where there is one."""
    is_same = fault.is_raised and state.previous is not None and fault.text == state.previous.text
    if not (fault.is_final or is_same or state.is_stopping or state.restarts >= state.max_restarts):
        return None
    again = f", again after {counted(state.restarts, 'restart')}" if is_same else ""
    first = f" (the first fault: {state.first.text})" if state.first and state.first.text != fault.text else ""
    return f"{fault.text}{again}{first}"
