"""`stagewright simulate`: what a plan would do on a cluster, before it runs. `stagewright schedule`: draw a plan's programs, and print them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from stagewright.cli.setting import read_setting
from stagewright.cli.train import read_config
from stagewright.cluster.placement import format_devices, parse_placement
from stagewright.cluster.specs import MIB
from stagewright.config.sections import require_options, require_within
from stagewright.plan.estimate import Estimate
from stagewright.plan.make import default_microbatches, make_plan, read_plan, require_divisible
from stagewright.plan.plan import Mode
from stagewright.plan.search import best_cuts
from stagewright.planning.build import build_plan, idle_warning, waiting_warning, with_plan_file
from stagewright.planning.planner import bubble_in, choose_lag
from stagewright.planning.predict import predict
from stagewright.planning.simulate import StageCosts, simulate
from stagewright.report.live.terminal import draw_timeline, has_blocks
from stagewright.run.report import page_of_prediction, write_page
from stagewright.schedule.check import check
from stagewright.schedule.lower import program

if TYPE_CHECKING:
    from stagewright.cluster.placement import Placement
    from stagewright.plan.estimate import Setting
    from stagewright.plan.plan import Plan
    from stagewright.planning.predict import Prediction
    from stagewright.planning.setting import TracedModel


def run_simulate(parsed: argparse.Namespace) -> None:
    require_options(batch=parsed.batch, microbatches=parsed.microbatches, staleness=parsed.staleness)
    if parsed.microbatch is not None:
        require_within("--microbatch", parsed.microbatch, least=1)
    model, setting = read_setting(parsed, parsed.cluster)
    plan = _plan(parsed, model, setting)
    console = Console(stderr=parsed.json)
    for remark in _remarks(parsed, plan, setting):
        console.print(f"warning: {remark}", highlight=False, markup=False)
    prediction = predict(plan, setting)
    if parsed.trace:
        Path(parsed.trace).write_text(json.dumps(prediction.steady.timeline.chrome_trace()))
    if parsed.report:
        name = f"{parsed.model} on {setting.cluster.name}, {setting.precision}"
        write_page(page_of_prediction(name, prediction), Path(parsed.report))
    if parsed.json:
        print(json.dumps({"model": parsed.model, "cluster": setting.cluster.name, **prediction.describe()}))
        return
    show_prediction(console, parsed.model, prediction, setting)


def _remarks(parsed: argparse.Namespace, plan: Plan, setting: Setting) -> Iterator[str]:
    """Where devices are left idle, and how many microbatches would not."""
    if idle := idle_warning(plan):
        yield idle
    is_free = parsed.staleness is None and not parsed.plan and not setting.software.whole_batches
    if is_free and plan.mode == "stale" and (waiting := waiting_warning(plan, bubble_in(setting))):
        yield waiting


def _plan(parsed: argparse.Namespace, model: TracedModel, setting: Setting) -> Plan:
    if parsed.plan:
        _require_alone(parsed)
        try:
            plan = read_plan(Path(parsed.plan).read_text(encoding="utf-8"), parsed.plan, setting.cluster)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"plan {parsed.plan}: {reason}; give a file that stagewright plan -o wrote") from error
        return _require_cuts(plan, parsed, model)
    placement: Placement = (setting.cluster.devices,)
    if parsed.placement is not None:
        placement = parse_placement(parsed.placement, setting.cluster)
    mode = Mode(parsed.mode or ("dp" if len(placement) == 1 else "stale"))
    _require_stages(parsed, mode, placement)
    if mode is Mode.DP:
        placement = (tuple(dict.fromkeys(device for stage in placement for device in stage)),)
    replicas = [len(devices) for devices in placement]
    batch, count = _sizes(parsed, replicas, setting.software.whole_batches)
    if count is None:
        count = default_microbatches(batch, replicas)
    require_divisible(batch, count)
    cuts: tuple[str, ...] = ()
    if len(placement) > 1:
        if parsed.cut is not None and parsed.shares is not None:
            raise ValueError(f"both --cut {parsed.cut} and --shares {parsed.shares} were given; give one")
        if parsed.cut is not None:
            cuts = model.chain.by_names([name.strip() for name in parsed.cut.split(",")])
        elif parsed.shares is not None:
            cuts = model.chain.by_shares(_shares(parsed.shares, len(replicas)))
        else:
            cuts = best_cuts(setting, placement, mode, batch, count)
        if len(cuts) != len(replicas) - 1:
            raise ValueError(f"{len(cuts)} cuts make {len(cuts) + 1} stages but the placement has {len(replicas)}")
    plan = make_plan(placement, batch=batch, microbatches=count, mode=mode, staleness=parsed.staleness, cuts=cuts)
    return choose_lag(plan, setting, parsed.staleness)


def _require_alone(parsed: argparse.Namespace) -> None:
    """An error for what a plan file decides."""
    for name in ("mode", "placement", "shares", "cut", "batch", "microbatch", "microbatches", "staleness"):
        if (value := getattr(parsed, name)) is not None:
            raise ValueError(f"--plan {parsed.plan} was given with --{name} {value}; the file decides that: give one")


def _require_cuts(plan: Plan, parsed: argparse.Namespace, model: TracedModel) -> Plan:
    """A plan whose cuts are units of the model, in the order they run, one for each later stage."""
    units = model.chain.units
    missing = [cut for cut in plan.cuts if cut not in units]
    if missing:
        raise ValueError(
            f"plan {parsed.plan} cuts before '{missing[0]}' but {parsed.model} has no such unit; "
            f"make one of this model: stagewright plan {parsed.model} -o FILE"
        )
    bounds = [0, *map(units.index, plan.cuts)]
    if len(bounds) != len(plan.stages) or bounds != sorted(set(bounds)):
        raise ValueError(
            f"plan {parsed.plan} has {len(plan.stages)} stages, which its cuts ({', '.join(plan.cuts) or 'none'}) "
            f"don't make of {parsed.model}; make one again: stagewright plan {parsed.model} -o FILE"
        )
    return plan


def _require_stages(parsed: argparse.Namespace, mode: str, placement: Placement) -> None:
    """What cuts a model is refused where there is nothing to cut."""
    for flag, value in (("--cut", parsed.cut), ("--shares", parsed.shares)):
        if value is not None and (mode == "dp" or len(placement) == 1):
            why = "mode dp has one stage" if mode == "dp" else "the placement has one stage"
            raise ValueError(
                f"{flag} {value} cuts the model into stages but {why}; "
                f"leave it out, or give --mode stale and --placement such as 0:0-6.0:7"
            )


def _sizes(parsed: argparse.Namespace, replicas: list[int], whole: bool) -> tuple[int, int | None]:
    """The batch and its pieces; a software that passes whole batches cuts one into a piece a replica."""
    if (parsed.batch is None) == (parsed.microbatch is None):
        raise ValueError("give --batch (samples of an update) or --microbatch (samples of a piece), one of them")
    pieces = parsed.microbatches
    if pieces is None and (whole or parsed.batch is None):
        pieces = max(replicas)
    batch = parsed.batch if parsed.batch is not None else parsed.microbatch * pieces
    if pieces is not None and batch % pieces and parsed.microbatches is None:
        pieces = None
    return batch, pieces


def _shares(text: str, stages: int) -> list[int]:
    try:
        shares = [int(part) for part in text.split(":")]
    except ValueError:
        raise ValueError(f"--shares must be ':'-separated integers such as 11:7, got '{text}'") from None
    if len(shares) != stages:
        raise ValueError(f"--shares {text} names {len(shares)} stages but the placement has {stages}")
    return shares


def show_prediction(console: Console, model: str, prediction: Prediction, setting: Setting) -> None:
    """A prediction as a person reads it."""
    plan = prediction.plan
    console.print(
        f"{model} on {setting.cluster.name}, {setting.precision}, {plan.mode}: batch {plan.batch} in "
        f"{plan.microbatches} microbatches",
        highlight=False,
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "devices", "from", "lag", "busy", "memory MiB", "of", "mostly"):
        table.add_column(name, justify="left" if name in ("devices", "from", "mostly") else "right")
    for stage, devices in zip(plan.stages, plan.placement, strict=True):
        rank = max(stage.ranks, key=lambda rank: prediction.memory[rank].total)
        busy = sum(prediction.steady.busy[rank] for rank in stage.ranks) / stage.replicas
        table.add_row(
            str(stage.index),
            format_devices(devices),
            plan.cuts[stage.index - 1] if stage.index else "",
            str(stage.versions - 1),
            f"{busy:.0%}",
            f"{prediction.memory[rank].total / MIB:,.0f}",
            f"{prediction.limits[rank] / MIB:,.0f}",
            prediction.memory[rank].largest,
        )
    console.print(table)
    console.print(
        f"{prediction.images_per_second:,.0f} images/s, an ImageNet epoch in {prediction.epoch_seconds:,.1f} s; "
        f"devices wait {prediction.steady.bubble:.1%}; bound by {prediction.bound}",
        highlight=False,
        markup=False,
    )
    if not prediction.fits:
        try:
            Estimate(plan, setting).require_fit()
        except ValueError as error:
            console.print(f"does not fit: {error}", highlight=False, markup=False)


_MOST_MICROBATCHES = 2**14  # microbatches


def run_schedule(parsed: argparse.Namespace) -> None:
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
    plan = build_plan(config, None, warn, partial(_costs, parsed) if is_timed else None)
    require_within("--batches", parsed.batches, least=1, most=max(1, _MOST_MICROBATCHES // plan.microbatches))
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
