"""The ranks of all sides of a case, which train in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.cases import Side
from stagewright.bench.demo.ranks import HERE, Ranks, Segment
from stagewright.voice import Voice

_WARM_STEPS = 3


def open_ranks(stack: ExitStack, jobs: Mapping[Side, Path], folder: Path, worlds: Mapping[Side, int]) -> list[Ranks]:
    """Start the ranks of all sides at once and wait until they are ready; the stack ends them."""
    started = [
        stack.enter_context(Ranks(side.name, side.kind, job, folder / f"side-{number}", [HERE] * worlds[side]))
        for number, (side, job) in enumerate(jobs.items())
    ]
    for ranks in started:
        ranks.wait_ready()
    return started


def compile_together(sides: Sequence[Ranks]) -> None:
    """Train one batch on all sides at once, so that they compile at the same time."""
    for side in sides:
        side.begin(1)
    for side in sides:
        side.wait()


def take_turn(ranks: Ranks, steps: int, *, on_gpu: bool) -> Segment:
    """Train and time a segment; on a GPU warm up first, and give back memory that the next side may need."""
    if not on_gpu:
        return ranks.train(steps)
    ranks.train(_WARM_STEPS)
    segment = ranks.train(steps)
    ranks.call("rest")
    return segment


def take_turns(turns: Sequence[Callable[[], Segment]], repeats: int, voice: Voice) -> list[list[Segment]]:
    """The segments of each side, timed in the order A B A B ...; the first of each is a warm-up and does not count."""
    segments: list[list[Segment]] = [[] for _ in turns]
    for repeat in range(repeats + 1):
        voice.progress(f"repeat {repeat} of {repeats}" if repeat else "warming up")
        for take_turn, timed in zip(turns, segments, strict=True):
            timed.append(take_turn())
    return [timed[1:] for timed in segments]
