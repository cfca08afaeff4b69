"""Training under a schedule of faults, measured and compared with an undisturbed run; or for long without any."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from tests.soak import check
from tests.soak.faults import apply
from tests.soak.processes import Soak, SoakFailed, opened
from tests.soak.progress import Progress, longest_gap, read_losses
from tests.soak.sample import Growth, Sampler, growth
from tests.soak.schedule import CHECKPOINT_EVERY, Fault, Schedule, SoakPlan


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault that happened, and what it cost."""

    fault: Fault
    at: int  # steps in the metrics
    standstill: float  # seconds
    repeated: int  # steps
    starts: int  # of ranks that it caused


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that ended: what is wrong with it, what happened, and what its processes used."""

    wrong: tuple[str, ...]
    happened: tuple[Happened, ...]
    used: tuple[Growth, ...]
    most_partial: int
    steps: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an undisturbed run of the same plan left."""

    losses: check.Losses
    weights: Path


def endure(soak: Soak, fault: Fault) -> Happened:
    """Wait for a fault's batch, make it happen, and wait until training is past the step at which it happened."""
    progress = soak.progress
    soak.wait(lambda: progress.steps >= fault.batch and progress.has_checkpoint(), f"step {fault.batch}")
    if soak.is_over():
        raise SoakFailed(f"the run ended before {fault} could happen")
    at, starts, began = progress.most, len(progress.starts), time.monotonic()
    apply(soak, fault)
    if not fault.kind.restarts:
        enough = progress.steps + CHECKPOINT_EVERY  # messages that were under way may bring the first steps
        soak.wait(lambda: progress.steps >= enough or soak.is_over(), f"new steps after {fault}")
    soak.wait(lambda: soak.is_over() or _is_past(progress, starts, at, fault), f"a new step after {fault}")
    standstill, caused = time.monotonic() - began, progress.starts[starts:]
    if not caused and progress.run is not None:
        standstill = longest_gap(progress.run, at)
    repeated = max((start.before - start.steps for start in caused), default=0)
    return Happened(fault, at, standstill, repeated, len(caused))


def _is_past(progress: Progress, starts: int, at: int, fault: Fault) -> bool:
    """Whether there is a step that is new since a fault, in the start that it caused, if it causes one."""
    caused = progress.starts[starts:]
    return progress.steps > max(at, *(start.before for start in caused), 0) and bool(caused) >= fault.kind.restarts


def record(plan: SoakPlan, folder: Path, steps: int) -> Recorded:
    """Train a plan without faults, in one process: with two replicas at most, its bits are those of real ranks."""
    with opened(plan, folder, steps) as soak:
        soak.start(0, is_emulated=True)
        soak.wait(soak.is_over, "the undisturbed run")
        assert soak.progress.run is not None
        return Recorded(read_losses(soak.progress.run), soak.exported)


def run(
    plan: SoakPlan, schedule: Schedule, recorded: Recorded, folder: Path, steps: int, say: Callable[[str], None] = print
) -> Outcome:
    """Train a plan under a schedule of faults, and compare with the undisturbed run."""
    happened: list[Happened] = []
    wrong: list[str] = []
    with opened(plan, folder, steps) as soak, Sampler(soak.processes, lambda: soak.progress.steps) as sampler:
        try:
            soak.start_all()
            for fault in schedule:
                happened.append(endure(soak, fault))
                say(describe(happened[-1]))
            soak.wait(soak.is_over, "the end of the run")
            wrong += compare(soak, recorded) + soak.leftovers()
        except SoakFailed as error:
            wrong.append(str(error))
        used = growth(sampler.samples)
        wrong += check.check_bounds(used, soak.progress.most_partial)
    return Outcome(tuple(wrong), tuple(happened), used, soak.progress.most_partial, soak.progress.most)


def compare(soak: Soak, recorded: Recorded) -> list[str]:
    """What differs from the undisturbed run."""
    assert soak.progress.run is not None
    wrong = check.check_steps(read_losses(soak.progress.run), recorded.losses)
    if not soak.exported.exists():
        return [*wrong, "no weights were exported"]
    return wrong + check.check_weights(load_file(soak.exported), load_file(recorded.weights))


def run_for(plan: SoakPlan, minutes: float, folder: Path, say: Callable[[str], None] = print) -> Outcome:
    """Train without faults for so long, then stop by SIGTERM: whether anything grows."""
    wrong: list[str] = []
    with opened(plan, folder, 10**8) as soak, Sampler(soak.processes, lambda: soak.progress.steps) as sampler:
        try:
            soak.start_all()
            soak.wait(lambda: soak.progress.steps > 0, "the first step")
            end = time.monotonic() + 60 * minutes
            soak.wait(lambda: time.monotonic() > end, "the time to pass")
            began = time.monotonic()
            soak.terminate(0)
            say(f"stopped {time.monotonic() - began:.1f} s after SIGTERM")
            wrong += soak.leftovers()
        except SoakFailed as error:
            wrong.append(str(error))
        used = growth(sampler.samples)
        wrong += check.check_bounds(used, soak.progress.most_partial, slopes=True)
    return Outcome(tuple(wrong), (), used, soak.progress.most_partial, soak.progress.most)


def describe(happened: Happened) -> str:
    return (
        f"step {happened.at:5}  {happened.fault!s:28}  stood still {happened.standstill:6.2f} s  "
        f"{happened.repeated:3} steps repeated  {happened.starts} starts"
    )
