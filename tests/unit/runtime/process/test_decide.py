"""Before every start: start, restart, wait for a machine, or fail. What is decided follows from the values alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.events import Failure
from stagewright.plan.make import make_plan
from stagewright.runtime.faults import Fault, RankExit
from stagewright.runtime.multinode.meeting import MachineReport, StartDecision
from stagewright.runtime.process.decide import Decision, StartState, decide

PLAN = make_plan(parse_placement("0:0-1.0:2", Cluster((Machine(),))), batch=8)
FIRST = StartState(PLAN, "runs/a", keeps_checkpoints=False, max_restarts=2, machines=("machine 0 (a)", "machine 1 (b)"))
AFTER = replace(FIRST, start=2)  # there was a start before, and it ended
WELL = MachineReport({}, (0, 8))
KILLED = replace(WELL, exits=(RankExit(1, -9, "0F3@2", 0),))
ELSEWHERE = replace(WELL, exits=(RankExit(1, -9, "0F99@2", 0),))
LOST = replace(WELL, lost=(1,))
BLIND = replace(WELL, sees_checkpoints=False)
SEED = replace(WELL, values={"run.seed": 1})
CAUSE = "stage 0 replica 1 (rank 1, machine 0) was killed by SIGKILL at 0F3@2"
FAULT = Fault(CAUSE, is_final=False)
GONE = Fault("lost machine 1 (b): no sign of it for 60 s (see --lost-timeout)", is_final=False)
SILENT = Fault("lost machine 1 (b): it did not report what happened", is_final=False)
USERS = Failure(2, "UserError", "UserError: no such file", is_users=True)
BUG = Failure(2, "RuntimeError", "RuntimeError: gave up", "1F4@0", 1)
RAISED = Fault("stage 1 replica 0 (rank 2, machine 0) failed at 1F4@0: RuntimeError: gave up", is_raised=True)


def fails(text: str, fault: Fault | None = None) -> Decision:
    return Decision(StartDecision(failed=text), fault)


def restarts(number: int, fault: Fault, batch: int = 8) -> Decision:
    return Decision(StartDecision(batch, number, fault.text), fault)


TABLE = {
    "the first start waits for every machine": (FIRST, {0: WELL}, 100.0, Decision()),
    "the first start is from the newest batch": (FIRST, {0: WELL, 1: WELL}, 0.0, Decision(StartDecision(8))),
    "the batches of machine 0 count": (FIRST, {0: WELL, 1: MachineReport({}, (3,))}, 0.0, Decision(StartDecision(8))),
    "after a fault, wait for what others know": (AFTER, {0: KILLED}, 7.9, Decision()),
    "after a fault, restart from the newest batch": (AFTER, {0: WELL, 1: KILLED}, 1.0, restarts(1, FAULT)),
    "a second fault that differs restarts too": (
        replace(AFTER, restarts=1, previous=FAULT),
        {0: ELSEWHERE, 1: WELL},
        0.0,
        restarts(2, Fault(CAUSE.replace("0F3", "0F99"), is_final=False)),
    ),
    "the same exception twice is final": (
        replace(AFTER, restarts=1, previous=RAISED, failures=(BUG,)),
        {0: WELL, 1: WELL},
        0.0,
        fails(f"{RAISED.text}, again after 1 restart", RAISED),
    ),
    "the same signal twice is not": (
        replace(AFTER, restarts=1, previous=FAULT),
        {0: KILLED, 1: WELL},
        0.0,
        restarts(2, FAULT),
    ),
    "the last fault is told with the first": (
        replace(AFTER, restarts=2, previous=FAULT, first=RAISED),
        {0: KILLED, 1: WELL},
        0.0,
        fails(f"{CAUSE} (the first fault: {RAISED.text})", FAULT),
    ),
    "after max_restarts a fault is final": (replace(AFTER, restarts=2), {0: KILLED, 1: WELL}, 0.0, fails(CAUSE, FAULT)),
    "without restarts it is final": (replace(AFTER, max_restarts=0), {0: KILLED, 1: WELL}, 0.0, fails(CAUSE, FAULT)),
    "a run that is asked to stop does not restart": (
        replace(AFTER, is_stopping=True),
        {0: KILLED, 1: WELL},
        0.0,
        fails(CAUSE, FAULT),
    ),
    "an error of the user's is final": (
        replace(AFTER, failures=(USERS,)),
        {0: KILLED, 1: WELL},
        0.0,
        fails("no such file", Fault("no such file", is_final=True)),
    ),
    "any other error restarts": (replace(AFTER, failures=(BUG,)), {0: WELL, 1: WELL}, 0.0, restarts(1, RAISED)),
    "a lost machine is named at once, and waited for": (AFTER, {0: LOST}, 0.0, Decision(fault=GONE)),
    "a lost machine that is back restarts": (replace(AFTER, fault=GONE), {0: LOST, 1: WELL}, 200.0, restarts(1, GONE)),
    "a lost machine may be final": (replace(AFTER, max_restarts=0), {0: LOST}, 0.0, fails(GONE.text, GONE)),
    "a machine that does not report in time is lost": (AFTER, {0: WELL}, 8.0, Decision(fault=SILENT)),
    "a fault that is known stays": (replace(AFTER, fault=SILENT), {0: WELL, 1: KILLED}, 20.0, restarts(1, SILENT)),
    "blind machines start from the beginning": (FIRST, {0: WELL, 1: BLIND}, 0.0, Decision(StartDecision(0))),
    "blind machines restart from the beginning": (AFTER, {0: KILLED, 1: BLIND}, 0.0, restarts(1, FAULT, batch=0)),
    "blind machines start where machine 0 does": (
        FIRST,
        {0: MachineReport({}, (8,)), 1: BLIND},
        0.0,
        Decision(StartDecision(8)),
    ),
    "blind machines do not start elsewhere": (
        FIRST,
        {0: MachineReport({}, (8,)), 1: replace(BLIND, batches=(4,))},
        0.0,
        fails(
            "machine 1 (b) starts at batch 4 but machine 0 at 8; give the same checkpoint with --resume on each machine"
        ),
    ),
    "machine 1 waits for machine 0": (replace(AFTER, machine=1), {1: replace(WELL, lost=(0,))}, 0.0, Decision()),
    "machine 1 waits where machine 0 is there": (
        replace(AFTER, machine=1, restarts=2),
        {1: KILLED},
        0.0,
        Decision(),
    ),
    "machine 1 ends where machine 0 is lost and no restart is left": (
        replace(AFTER, machine=1, restarts=2),
        {1: replace(WELL, lost=(0,))},
        0.0,
        fails("lost machine 0 (a): no sign of it for 60 s (see --lost-timeout)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("state", "reports", "waited", "decision"), TABLE.values(), ids=TABLE)
def test_decides(state: StartState, reports: dict[int, MachineReport], waited: float, decision: Decision) -> None:
    assert decide(state, reports, waited) == decision


@pytest.mark.parametrize("state", [FIRST, AFTER], ids=["first", "later"])
def test_fails_at_once_when_options_differ_and_gives_both_values(state: StartState) -> None:
    start = decide(replace(state, machines=("a", "b", "c")), {0: SEED, 2: WELL}, 0.0).start
    assert start is not None and start.failed is not None
    assert start.failed.startswith("c has run.seed = nothing but machine 0 has 1; ")


def test_fails_where_a_machine_can_not_see_the_checkpoints() -> None:
    start = decide(replace(FIRST, keeps_checkpoints=True), {0: WELL, 1: BLIND}, 0.0).start
    assert start is not None and start.failed is not None
    assert start.failed.startswith("machine 1 (b) can't see runs/a, where machine 0 saves checkpoints; ")
