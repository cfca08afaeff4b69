"""`stagewright schedule`: draw the programs of a plan, and print them."""

from __future__ import annotations

import argparse
import json
from functools import partial

from stagewright.cli.command.layers import read_layers
from stagewright.config.sections import require_within
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.plan.plan import Plan
from stagewright.planning.build import build_plan, warn_about_lag, with_agreement
from stagewright.planning.simulate import StageCosts, balanced_costs, simulate
from stagewright.report.live.terminal import draw_timeline, drawing_width, has_blocks, open_console, say, voice_of
from stagewright.runtime.multinode.nodes import cluster_of
from stagewright.schedule.check import check
from stagewright.schedule.lower import program

_MOST_MICROBATCHES = 2**14  # to draw
_ACTIONS = (
    "0F3@2: stage 0, forward of microbatch 3 with version 2 of the weights; 0SA3>7: sends its activations to rank 7",
    "B backward; SA, RA send and receive activations, SG, RG their gradients; of an update: R sums gradients, "
    "T those of tied weights, A agrees whether it is skipped, U updates",
)


def run(parsed: argparse.Namespace) -> None:
    """Draw the schedule that the options describe."""
    console = open_console(stderr=parsed.json)
    voice = voice_of(console)
    layers, given = read_layers(parsed)
    config = make_config(*layers, given=given)
    if config.run.resume is not None:
        raise UserError(
            f"run.resume = {config.run.resume} resumes training; draw that run's schedule with --config RUN/config.toml"
        )
    if config.plan.profile is not None:
        raise UserError(
            f"--profile {config.plan.profile} does not set the times of a schedule; give --forward and --backward, "
            "or use stagewright simulate --profile"
        )
    is_timed = parsed.forward is not None or parsed.backward is not None
    costs = partial(_costs, parsed) if is_timed else balanced_costs
    plan = build_plan(config.plan, cluster_of(config), costs=costs, never_waits=config.run.emulate, voice=voice)
    warn_about_lag(config, plan, voice)
    plan = with_agreement(config, plan)
    require_within("--batches", parsed.batches, least=1, most=max(1, _MOST_MICROBATCHES // plan.microbatches))
    times = _costs(parsed, plan)
    check(plan)
    span = range(plan.boundary(parsed.batches))
    programs = {rank: " ".join(map(str, program(plan, rank, span))) for rank in range(plan.world)}
    timeline = simulate(plan, times, span)
    bubble = timeline.bubble(range(plan.world), 0.0, timeline.end)
    if parsed.json:
        print(json.dumps({"plan": plan.describe(), "programs": programs, "time": timeline.end, "bubble": bubble}))
        return
    for row in draw_timeline(timeline, plan.world, drawing_width(console), "·" if has_blocks(console) else "."):
        console.print(row, soft_wrap=True)
    say(console, f"time {timeline.end:g}, bubble {bubble:.1%} with fill and drain")
    if parsed.programs:
        console.print()
        say(console, *_ACTIONS)
        for rank, text in programs.items():
            say(console, f"rank {rank}: {text}", soft_wrap=True)


def _costs(parsed: argparse.Namespace, plan: Plan) -> StageCosts:
    """The given times of a plan's stages."""
    forward, backward = (_times(getattr(parsed, name), name, len(plan.stages)) for name in ("forward", "backward"))
    if not sum(forward) + sum(backward):
        raise UserError("--forward and --backward are 0 for every stage; give at least one a time above 0")
    return StageCosts(forward, backward, parsed.transfer)


def _times(text: str | None, name: str, stages: int) -> list[float]:
    try:
        times = [1.0] * stages if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--{name} must be comma-separated times such as 1,2, got '{text}'") from None
    for time in times:
        require_within(f"--{name}", time, least=0)
    if len(times) != stages:
        raise UserError(
            f"--{name} {text} names {len(times)} stages but the placement has {stages}; give one time per stage"
        )
    return times
