"""`stagewright simulate`: predict what a plan would do on a cluster, before it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from stagewright.cli.plan import read_setting
from stagewright.cluster.placement import format_devices, format_placement
from stagewright.config.sections import PlanConfig
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.metrics import MIB
from stagewright.model.cut import Chain
from stagewright.plan.estimate import Estimate, Setting
from stagewright.plan.plan import Plan
from stagewright.planning.build import Warn, build_plan
from stagewright.planning.compare import interval, setting_evidence
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.traced import rate_of
from stagewright.report.live.terminal import plain_table, say
from stagewright.run.report import make_prediction_page, write_page


def run(parsed: argparse.Namespace) -> None:
    model, catalog, setting = read_setting(parsed, parsed.cluster)
    console = Console(stderr=parsed.json)
    plan = _plan(
        parsed, None if model is None else model.chain, setting, lambda warning: say(console, f"warning: {warning}")
    )
    prediction = predict(plan, setting, draws=bool(parsed.trace or parsed.report))
    measured = parsed.profile is not None and parsed.cluster is None
    own, evidence = (
        interval(prediction, setting, catalog, measured=measured),
        setting_evidence(setting, measured=measured),
    )
    if parsed.trace:
        write_text(parsed.trace, json.dumps(prediction.steady.timeline.chrome_trace()))
    if parsed.report:
        name = f"{parsed.model} on {setting.cluster.name}, {setting.precision}"
        write_page(make_prediction_page(name, prediction), Path(parsed.report))
    if parsed.json:
        bounds = {"low": own.low, "high": own.high, "evidence": str(evidence)}
        print(json.dumps({"model": parsed.model, "cluster": setting.cluster.name, **prediction.describe(), **bounds}))
        return
    show_prediction(console, parsed.model, prediction, setting)
    say(console, f"nine of ten such predictions are within {own} {rate_of(parsed.model)} ({evidence})")


def _plan(parsed: argparse.Namespace, chain: Chain | None, setting: Setting, warn: Warn) -> Plan:
    """The plan of a plan file or of the options: on all devices by default; mode stale if there are several stages."""
    if parsed.plan:
        return build_plan(PlanConfig(file=parsed.plan), setting.cluster, chain, warn=warn)
    everywhere = format_placement((setting.cluster.devices,))
    placement = everywhere if parsed.placement is None else parsed.placement
    mode = parsed.mode or ("stale" if "." in placement else "dp")
    if parsed.batch is None and parsed.microbatch is None:
        raise UserError("give either --batch (samples per update) or --microbatch (samples per microbatch)")
    given = {name: getattr(parsed, name) for name in ("cut", "shares", "batch", "microbatches", "staleness")}
    given = {name: value for name, value in given.items() if value is not None}
    return build_plan(
        make_config({"plan": given | {"placement": placement, "mode": mode}}).plan,
        setting.cluster,
        chain,
        lambda placement: setting,
        microbatch=parsed.microbatch,
        one_each=setting.software.whole_batches,
        warn=warn,
    )


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
    rate = rate_of(model)
    speed = f"{prediction.images_per_second:,.0f} {rate}"
    if rate == "images/s":
        speed += f", an ImageNet epoch in {prediction.epoch_seconds:,.1f} s"
    say(console, f"{speed}; devices wait {prediction.steady.bubble:.1%}; bound by {prediction.bound}")
    if not prediction.fits:
        try:
            Estimate(plan, setting).require_fit()
        except UserError as error:
            say(console, f"does not fit: {error}")
