"""`stagewright schedule`: draw a plan's programs, and print them."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING

from stagewright.commands.options import Commands, add_options, read_config
from stagewright.config.bounds import require_within

if TYPE_CHECKING:
    from stagewright.plan.plan import Plan
    from stagewright.simulate import StageCosts

_MOST_SHOWN = 2**14  # microbatches


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "schedule",
        help="draw who does what when in a plan",
        usage="stagewright schedule [options]",
        description="Draw the programs of a plan, one row a rank, time to the right; --programs prints them as text.",
    )
    add_options(parser, "plan")
    parser.add_argument("--batches", type=int, default=2, help="batches to show (default: 2)")
    parser.add_argument("--forward", default=None, help="time of a forward by stage: 1,1 (default: 1 each)")
    parser.add_argument("--backward", default=None, help="time of a backward by stage: 2,2 (default: 1 each)")
    parser.add_argument("--transfer", type=float, default=0.0, help="time of a message (default: 0)")
    parser.add_argument("--programs", action="store_true", help="every rank's actions as text, behind the picture")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from stagewright.foresee import with_plan_file
    from stagewright.report.terminal import draw_timeline, has_blocks
    from stagewright.schedule.check import check
    from stagewright.schedule.lower import program
    from stagewright.settle import make_plan_for
    from stagewright.simulate import simulate

    def warn(warning: str) -> None:
        console.print(f"warning: {warning}", markup=False)

    console = Console(soft_wrap=True, stderr=parsed.json)
    config = with_plan_file(read_config(parsed))
    if config.plan.profile is not None:
        raise ValueError(
            f"--profile {config.plan.profile} does not tell a schedule its times; give --forward and --backward, "
            "or use stagewright simulate --profile"
        )
    is_timed = parsed.forward is not None or parsed.backward is not None
    plan = make_plan_for(config, None, warn, partial(_costs, parsed) if is_timed else None)
    require_within("--batches", parsed.batches, least=1, most=max(1, _MOST_SHOWN // plan.microbatches))
    costs = _costs(parsed, plan)
    check(plan)
    span = range(plan.boundary(parsed.batches))
    programs = {rank: " ".join(map(str, program(plan, rank, span))) for rank in range(plan.world)}
    timeline = simulate(plan, costs, span)
    bubble = timeline.bubble(range(plan.world), 0.0, timeline.end)
    if parsed.json:
        print(json.dumps({"plan": plan.describe(), "programs": programs, "time": timeline.end, "bubble": bubble}))
        return
    for row in draw_timeline(timeline, plan.world, console.width, "·" if has_blocks(console) else "."):
        console.print(row)
    console.print(f"time {timeline.end:g}, bubble {bubble:.1%} with fill and drain", highlight=False)
    if parsed.programs:
        console.print()
        for rank, text in programs.items():
            console.print(f"rank {rank}: {text}", markup=False, highlight=False)


def _costs(parsed: argparse.Namespace, plan: Plan) -> StageCosts:
    """The times that were given, of a plan's stages."""
    from stagewright.simulate import StageCosts

    require_within("--transfer", parsed.transfer, least=0)
    forward, backward = (_times(getattr(parsed, name), name, len(plan.stages)) for name in ("forward", "backward"))
    if not sum(forward) + sum(backward):
        raise ValueError("--forward and --backward are 0 for every stage; give at least one a time above 0")
    return StageCosts(forward, backward, parsed.transfer)


def _times(text: str | None, name: str, stages: int) -> list[float]:
    try:
        times = [1.0] * stages if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} '{text}' are not times between ',' (for example 1,2)") from None
    for time in times:
        require_within(f"--{name}", time, least=0)
    if len(times) != stages:
        raise ValueError(f"--{name} {text} names {len(times)} stages but the placement has {stages}; one time a stage")
    return times
