"""`stagewright simulate`: predict what a plan would do on a cluster, before it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from stagewright.cli.setting import read_setting
from stagewright.cluster.placement import Placement, format_devices, parse_placement
from stagewright.config.sections import require_options, require_within
from stagewright.metrics import MIB
from stagewright.plan.estimate import Estimate, Setting
from stagewright.plan.make import default_microbatches, make_plan, read_plan, require_divisible
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.search import best_cuts
from stagewright.planning.build import given_cuts, idle_warning, waiting_warning
from stagewright.planning.planner import bubble_in, choose_lag
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.setting import TracedModel
from stagewright.report.live.terminal import plain_table, say
from stagewright.run.report import make_prediction_page, write_page


def run(parsed: argparse.Namespace) -> None:
    require_options(batch=parsed.batch, microbatches=parsed.microbatches, staleness=parsed.staleness)
    if parsed.microbatch is not None:
        require_within("--microbatch", parsed.microbatch, least=1)
    model, setting = read_setting(parsed, parsed.cluster)
    plan = _plan(parsed, model, setting)
    console = Console(stderr=parsed.json)
    for warning in _warnings(parsed, plan, setting):
        say(console, f"warning: {warning}")
    prediction = predict(plan, setting)
    if parsed.trace:
        Path(parsed.trace).write_text(json.dumps(prediction.steady.timeline.chrome_trace()))
    if parsed.report:
        name = f"{parsed.model} on {setting.cluster.name}, {setting.precision}"
        write_page(make_prediction_page(name, prediction), Path(parsed.report))
    if parsed.json:
        print(json.dumps({"model": parsed.model, "cluster": setting.cluster.name, **prediction.describe()}))
        return
    show_prediction(console, parsed.model, prediction, setting)


def _warnings(parsed: argparse.Namespace, plan: Plan, setting: Setting) -> Iterator[str]:
    """Warnings about idle devices, with the number of microbatches that would keep them busy."""
    if idle := idle_warning(plan):
        yield idle
    is_free = parsed.staleness is None and not parsed.plan and not setting.software.whole_batches
    if is_free and plan.mode == "stale" and (waiting := waiting_warning(plan, bubble_in(setting))):
        yield waiting


def _plan(parsed: argparse.Namespace, model: TracedModel, setting: Setting) -> Plan:
    """The plan of a plan file or of the options."""
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
        given = given_cuts(model.chain, len(placement), parsed.cut, parsed.shares)
        cuts = best_cuts(setting, placement, mode, batch, count) if given is None else given
    plan = make_plan(placement, batch=batch, microbatches=count, mode=mode, staleness=parsed.staleness, cuts=cuts)
    return choose_lag(plan, setting, parsed.staleness)


def _require_alone(parsed: argparse.Namespace) -> None:
    """Raise for options that a plan file decides."""
    for name in ("mode", "placement", "shares", "cut", "batch", "microbatch", "microbatches", "staleness"):
        if (value := getattr(parsed, name)) is not None:
            raise ValueError(f"--plan {parsed.plan} was given with --{name} {value}; the file decides that: give one")


def _require_cuts(plan: Plan, parsed: argparse.Namespace, model: TracedModel) -> Plan:
    """The plan, if its cuts are units of the model in the order they run, one for each later stage."""
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
            f"do not make of {parsed.model}; make one again: stagewright plan {parsed.model} -o FILE"
        )
    return plan


def _require_stages(parsed: argparse.Namespace, mode: str, placement: Placement) -> None:
    """Raise for options that cut the model, if there is only one stage."""
    for flag, value in (("--cut", parsed.cut), ("--shares", parsed.shares)):
        if value is not None and (mode == "dp" or len(placement) == 1):
            why = "mode dp has one stage" if mode == "dp" else "the placement has one stage"
            raise ValueError(
                f"{flag} {value} cuts the model into stages but {why}; "
                f"leave it out, or give --mode stale and --placement such as 0:0-6.0:7"
            )


def _sizes(parsed: argparse.Namespace, replicas: list[int], whole: bool) -> tuple[int, int | None]:
    """The batch and its microbatches, if given or implied: software that passes whole batches has one per replica."""
    if (parsed.batch is None) == (parsed.microbatch is None):
        raise ValueError("give either --batch (samples per update) or --microbatch (samples per microbatch)")
    count = parsed.microbatches
    if count is None and (whole or parsed.batch is None):
        count = max(replicas)
    batch = parsed.batch if parsed.batch is not None else parsed.microbatch * count
    if count is not None and batch % count and parsed.microbatches is None:
        count = None
    return batch, count


def show_prediction(console: Console, model: str, prediction: Prediction, setting: Setting) -> None:
    """Print a prediction."""
    plan = prediction.plan
    where = f"{model} on {setting.cluster.name}, {setting.precision}, {plan.mode}"
    say(console, f"{where}: batch {plan.batch} in {plan.microbatches} microbatches")
    columns = ("stage", "devices", "from", "lag", "busy", "memory MiB", "of", "mostly")
    table = plain_table(*columns, left=("devices", "from", "mostly"))
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
    speed = f"{prediction.images_per_second:,.0f} images/s, an ImageNet epoch in {prediction.epoch_seconds:,.1f} s"
    say(console, f"{speed}; devices wait {prediction.steady.bubble:.1%}; bound by {prediction.bound}")
    if not prediction.fits:
        try:
            Estimate(plan, setting).require_fit()
        except ValueError as error:
            say(console, f"does not fit: {error}")
