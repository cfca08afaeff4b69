"""Runs configurations in turns, each time in fresh processes: A B C A B C ..."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from stagewright.bench.outcome import Repeat
from stagewright.bench.speed import steady_speed
from stagewright.bench.watch import watched
from stagewright.config.sections import Config
from stagewright.experiment import Result, run
from stagewright.plan.plan import Plan
from stagewright.runtime.job import RunFailed

Tell = Callable[[str], None]
_OUTPUT = "output.txt"


@dataclass
class Turns:
    """What one configuration has done so far."""

    config: Config
    repeats: list[Repeat] = field(default_factory=list)
    plan: Plan | None = None
    step_lines: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Length:
    """How often every configuration is run: so many rounds, fewer where they take longer than there is time."""

    repeats: int
    limit: float | None = None  # seconds

    def allows(self, done: int, spent: float) -> bool:
        """Whether one more round of the same length begins."""
        return done < self.repeats and (not done or self.limit is None or spent * (done + 1) / done <= self.limit)


def run_rounds(
    configs: Mapping[str, Config],
    length: Length,
    folder: Path,
    tell: Tell,
    after: Callable[[Mapping[str, Turns]], None],
) -> dict[str, Turns]:
    """Every configuration once a round; one that fails is left out of later rounds. `after` hears of every run."""
    turns = {name: Turns(config) for name, config in configs.items()}
    began, done = time.monotonic(), 0
    while length.allows(done, time.monotonic() - began):
        done += 1
        for name, turn in turns.items():
            if not turn.failure:
                tell(f"round {done} of {length.repeats}: {name}")
                _take(turn, done, folder)
                after(turns)
    return turns


def _take(turn: Turns, number: int, folder: Path) -> None:
    config = replace(turn.config, run=replace(turn.config.run, runs=str(folder)))
    output = folder / f"{_OUTPUT}.draft"
    folder.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        try:
            result = run(config, Console(file=file, width=120))
        except (ValueError, RunFailed) as error:
            turn.failure = f"round {number}: {error}"
            return
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # by probing the model; the next ranks need the memory
                torch.cuda.empty_cache()
    output.replace(result.folder / _OUTPUT)
    turn.plan = result.plan
    turn.repeats.append(_repeat(result))
    if number == 1:
        lines = (result.folder / _OUTPUT).read_text().splitlines()
        turn.step_lines = tuple(line for line in lines if line.startswith("epoch "))


def _repeat(result: Result) -> Repeat:
    speed = steady_speed(result.steps, result.plan.batch)
    return Repeat(
        rate=speed.rate,
        warmup=speed.warmup,
        is_steady=speed.is_steady,
        times=speed.times,
        loss=result.steps[-1].loss,
        run=result.folder.name,
        **asdict(watched(result.folder, result.plan)),
    )
