"""What is trained and what happens to it: plans, kinds of faults, and schedules of faults made from a seed.

A schedule is a value. It has a text, `120:kill-rank:1,180:cut:1`, by which a run can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

LOST_SECONDS = 10  # --lost-timeout of every run
CHECKPOINT_EVERY = 10  # batches
FIRST_BATCH = 2 * CHECKPOINT_EVERY + 5  # a killed supervisor can be resumed only from a checkpoint
TAIL = 400  # batches after the last fault


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """A plan to train, whose machines are numbered from 0 as in its placement; replicas of a stage are two at most.

    Between machines gloo adds the gradients of three replicas in an order that may change, so their bits would not be
    comparable.
    """

    mode: str
    placement: str
    ranks_by_machine: tuple[int, ...]

    @property
    def machines(self) -> int:
        return len(self.ranks_by_machine)

    @property
    def ranks(self) -> int:
        return sum(self.ranks_by_machine)


PLANS = {
    plan.mode: plan
    for plan in (
        SoakPlan("sync", "0:0-1.0:2", (3,)),
        SoakPlan("stale", "0:0-1.1:0", (2, 1)),
        SoakPlan("pipedream", "0:0.1:0-1", (1, 2)),
    )
}


class Target(Enum):
    """What the number of a fault means, and which numbers are drawn; Kind.target says it per kind."""

    RANK = "rank"
    MACHINE = "machine"
    HOURS = "hours"
    CONNECTIONS = "connections"


class Kind(Enum):
    """A kind of fault: its name, what its number means, and what it does."""

    KILL_RANK = ("kill-rank", Target.RANK, "SIGKILL of a rank")
    KILL_STARTING = ("kill-starting", Target.RANK, "SIGKILL of a rank, and twice more while it starts again")
    KILL_SUPERVISOR = ("kill-supervisor", Target.MACHINE, "SIGKILL of a supervisor; the operator starts it again")
    TERMINATE = ("terminate", Target.MACHINE, "SIGTERM to a supervisor, then --resume on every machine")
    STOP = ("stop", Target.RANK, "SIGSTOP of a rank, SIGCONT before it counts as hung")
    HANG = ("hang", Target.RANK, "SIGSTOP of a rank, and nothing more")
    CUT = ("cut", Target.MACHINE, "a machine's cable is cut, and heals before the machine counts as lost")
    LONG_CUT = ("long-cut", Target.MACHINE, "a machine's cable is cut, and heals after the machine counts as lost")
    FULL_DISK = ("full-disk", Target.MACHINE, "the disk of the run folders is full for a while")
    KILL_WHILE_FULL = ("kill-while-full", Target.RANK, "SIGKILL of a rank while the disk is full")
    CLOCK = ("clock", Target.HOURS, "the wall clock jumps by hours")
    STRANGERS = ("strangers", Target.CONNECTIONS, "connections without the token to the tunnel's port")
    STRANGERS_AT_START = ("strangers-at-start", Target.CONNECTIONS, "the same, while a killed rank starts again")

    def __init__(self, label: str, target: Target, about: str) -> None:
        self.label = label
        self.target = target
        self.about = about

    @property
    def restarts(self) -> bool:
        """Whether ranks start again because of it."""
        return self not in (Kind.STOP, Kind.CUT, Kind.FULL_DISK, Kind.CLOCK, Kind.STRANGERS)

    @property
    def needs_network(self) -> bool:
        """Whether it needs several machines: one alone uses neither cable nor tunnel."""
        return self in (Kind.CUT, Kind.LONG_CUT, Kind.STRANGERS, Kind.STRANGERS_AT_START)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, which happens once so many batches are in the run's metrics."""

    batch: int
    kind: Kind
    number: int  # which rank or machine, how many hours or connections

    def __str__(self) -> str:
        return f"{self.batch}:{self.kind.label}:{self.number}"

    @staticmethod
    def parse(text: str) -> Fault:
        batch, label, number = text.split(":")
        return Fault(int(batch), next(kind for kind in Kind if kind.label == label), int(number))


Schedule = tuple[Fault, ...]


def format_schedule(schedule: Schedule) -> str:
    return ",".join(map(str, schedule))


def parse_schedule(text: str) -> Schedule:
    return tuple(Fault.parse(part) for part in text.split(",") if part)


def steps_of(schedule: Schedule) -> int:
    """How many batches a run needs so that every fault can happen, with some after the last."""
    return max((fault.batch for fault in schedule), default=0) + TAIL


def kinds_for(plan: SoakPlan) -> tuple[Kind, ...]:
    return tuple(kind for kind in Kind if plan.machines > 1 or not kind.needs_network)


def make_schedule(plan: SoakPlan, faults: int, seed: int, kinds: Iterable[Kind] | None = None) -> Schedule:
    """Faults 20 to 120 batches apart: every kind once, in a random order, before any kind comes again."""
    chosen = tuple(kinds_for(plan) if kinds is None else kinds)
    generator = random.Random(f"{plan.mode}/{seed}")
    schedule: list[Fault] = []
    waiting: list[Kind] = []
    batch = FIRST_BATCH
    for _ in range(faults):
        if not waiting:
            waiting = generator.sample(chosen, len(chosen))
        kind = waiting.pop()
        schedule.append(Fault(batch, kind, _draw(kind, plan, generator)))
        batch += generator.randint(20, 120)
    return tuple(schedule)


def _draw(kind: Kind, plan: SoakPlan, generator: random.Random) -> int:
    match kind.target:
        case Target.RANK:
            return generator.randrange(plan.ranks)
        case Target.MACHINE:
            return generator.randrange(plan.machines)
        case Target.HOURS:
            return generator.choice((-1, 1)) * generator.randint(1, 48)
        case Target.CONNECTIONS:
            return generator.randint(20, 400)
