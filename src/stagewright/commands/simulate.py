"""`stagewright simulate`: what a plan would do on a cluster, before it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.commands.options import Commands
from stagewright.commands.setting import add_setting, read_setting
from stagewright.config import require_options
from stagewright.config.bounds import require_within

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.cluster import Placement
    from stagewright.plan.estimate import Setting
    from stagewright.plan.plan import Plan
    from stagewright.predict import Prediction, Study


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict a plan's speed and memory on a cluster",
        usage="stagewright simulate MODEL --cluster NAME|FILE [options]",
        description="Predict images a second, memory and waiting of a plan, on hardware that need not be there.",
    )
    add_setting(parser)
    parser.add_argument(
        "--mode",
        choices=("dp", "sync", "stale", "pipedream"),
        help="how weights may lag (default: stale, or dp of one stage)",
    )
    parser.add_argument(
        "--placement", metavar="TEXT", help="devices of each stage: 0:0-6.0:7 (default: all, one stage)"
    )
    parser.add_argument("--weights", metavar="TEXT", help="share of operations a stage: 11:7")
    parser.add_argument("--cut", metavar="NAMES", help="first unit of each later stage (default: the planner's)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples of one update (the global batch)")
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples of a microbatch, instead of --batch")
    parser.add_argument("--microbatches", type=int, metavar="N", help="pieces of a batch")
    parser.add_argument("--staleness", type=int, metavar="N", help="most updates a stage lags in mode stale")
    parser.add_argument("--plan", metavar="FILE", help="a plan file instead of all these")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for Perfetto or chrome://tracing")
    parser.add_argument("--report", metavar="FILE", help="write a page with the timeline and the memory (.html)")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from stagewright.predict import predict

    require_options(batch=parsed.batch, microbatches=parsed.microbatches, staleness=parsed.staleness)
    if parsed.microbatch is not None:
        require_within("--microbatch", parsed.microbatch, least=1)
    studied, setting = read_setting(parsed, parsed.cluster)
    plan = _plan(parsed, studied, setting)
    prediction = predict(plan, setting)
    if parsed.trace:
        Path(parsed.trace).write_text(json.dumps(prediction.steady.timeline.chrome_trace()))
    if parsed.report:
        from stagewright.reporting import page_of_prediction, write_page

        name = f"{parsed.model} on {setting.cluster.name}, {setting.precision}"
        write_page(page_of_prediction(name, prediction), Path(parsed.report))
    if parsed.json:
        print(json.dumps({"model": parsed.model, "cluster": setting.cluster.name, **prediction.describe()}))
        return
    show(Console(), parsed.model, prediction, setting)


def _plan(parsed: argparse.Namespace, studied: Study, setting: Setting) -> Plan:
    from stagewright.cluster import parse_placement
    from stagewright.plan.partition import best_cuts
    from stagewright.plan.plan import Mode, default_microbatches, make_plan, read_plan, require_pieces

    if parsed.plan:
        _require_alone(parsed)
        try:
            plan = read_plan(Path(parsed.plan).read_text(encoding="utf-8"), parsed.plan, setting.cluster)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"plan {parsed.plan}: {reason}; give a file that stagewright plan -o wrote") from error
        return _require_cuts(plan, parsed, studied)
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
    require_pieces(batch, count)
    cuts: tuple[str, ...] = ()
    if len(placement) > 1:
        if parsed.cut is not None and parsed.weights is not None:
            raise ValueError(f"both --cut {parsed.cut} and --weights {parsed.weights} were given; give one")
        if parsed.cut is not None:
            cuts = studied.chain.by_names([name.strip() for name in parsed.cut.split(",")])
        elif parsed.weights is not None:
            cuts = studied.chain.by_weights(_weights(parsed.weights, len(replicas)))
        else:
            cuts = best_cuts(setting, placement, mode, batch, count)
        if len(cuts) != len(replicas) - 1:
            raise ValueError(f"{len(cuts)} cuts make {len(cuts) + 1} stages but the placement has {len(replicas)}")
    return make_plan(placement, batch=batch, microbatches=count, mode=mode, staleness=parsed.staleness, cuts=cuts)


def _require_alone(parsed: argparse.Namespace) -> None:
    """A plan file decides the layout: an option that does too is refused, not ignored."""
    for name in ("mode", "placement", "weights", "cut", "batch", "microbatch", "microbatches", "staleness"):
        if (value := getattr(parsed, name)) is not None:
            raise ValueError(
                f"--plan {parsed.plan} was given with --{name} {value}; the file decides that, so give one"
            )


def _require_cuts(plan: Plan, parsed: argparse.Namespace, studied: Study) -> Plan:
    """A plan whose cuts are units of the model, in the order they run, one for each later stage."""
    units = studied.chain.units
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
    for flag, value in (("--cut", parsed.cut), ("--weights", parsed.weights)):
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


def _weights(text: str, stages: int) -> list[int]:
    try:
        weights = [int(part) for part in text.split(":")]
    except ValueError:
        raise ValueError(f"--weights '{text}' are not numbers between ':' (for example 11:7)") from None
    if len(weights) != stages:
        raise ValueError(f"--weights {text} names {len(weights)} stages but the placement has {stages}")
    return weights


def show(console: Console, model: str, prediction: Prediction, setting: Setting) -> None:
    """A prediction as a person reads it."""
    from rich.table import Table

    from stagewright.catalog import MIB
    from stagewright.cluster import format_devices

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
        from stagewright.plan.estimate import Estimate

        try:
            Estimate(plan, setting).require_fit()
        except ValueError as error:
            console.print(f"does not fit: {error}", highlight=False, markup=False)
