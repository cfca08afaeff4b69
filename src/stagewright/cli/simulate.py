"""`stagewright simulate`: predict what a plan would do on a cluster, before it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

from rich.console import Console

from stagewright.cluster.placement import format_devices
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.metrics import MIB, format_rate
from stagewright.plan.estimate import Estimate
from stagewright.plan.plan import Stage
from stagewright.planning.compare import interval, setting_evidence
from stagewright.planning.predict import Prediction
from stagewright.planning.question import Asked, Question
from stagewright.report.columns import Column
from stagewright.report.live.terminal import open_console, print_table, say, speaking
from stagewright.report.words import format_duration
from stagewright.run.plan import simulate
from stagewright.run.report import make_prediction_page, write_page


def run(parsed: argparse.Namespace) -> None:
    with speaking(f"simulating {parsed.model}", as_json=parsed.json) as voice:
        question = Question.of("simulate", vars(parsed))
        draws = bool(parsed.trace or parsed.report)
        prediction, asked = simulate(question, voice, draws=draws)
    setting, measured = asked.setting, asked.is_measured
    own = interval(prediction, setting, asked.catalog, measured=measured)
    evidence = setting_evidence(setting, measured=measured)
    if parsed.trace:
        write_text(parsed.trace, json.dumps(prediction.steady.timeline.chrome_trace()))
    if parsed.report:
        name = f"{parsed.model} on {setting.cluster.name}, {setting.precision}"
        write_page(make_prediction_page(name, prediction), Path(parsed.report))
    if parsed.json:
        bounds = {"low": own.low, "high": own.high, "evidence": str(evidence)}
        print(json.dumps({"model": parsed.model, "cluster": setting.cluster.name, **prediction.describe(), **bounds}))
        return
    console = open_console()
    show_prediction(console, asked, prediction)
    say(console, f"nine of ten such predictions are within {own} {asked.rate} (evidence: {evidence})")


def show_prediction(console: Console, asked: Asked, prediction: Prediction) -> None:
    """Print a prediction."""
    plan, setting = prediction.plan, asked.setting
    where = f"{asked.question.model} on {setting.cluster.name}, {setting.precision}, {plan.mode}"
    say(console, f"{where}: batch {plan.batch} in {plan.microbatches} microbatches")

    def fullest(stage: Stage) -> int:
        return max(stage.ranks, key=lambda rank: prediction.memory[rank].total)

    columns: tuple[Column[Stage], ...] = (
        Column("stage", lambda stage: stage.index, wraps=True),
        Column("devices", lambda stage: plan.placement[stage.index], format_devices, is_text=True, wraps=True),
        Column("from", lambda stage: plan.cuts[stage.index - 1] if stage.index else "", is_text=True, wraps=True),
        Column("lag", lambda stage: stage.versions - 1, wraps=True),
        Column("busy", lambda stage: fmean(prediction.steady.busy[rank] for rank in stage.ranks), "{:.0%}", wraps=True),
        Column("memory MiB", lambda stage: prediction.memory[fullest(stage)].total / MIB, "{:,.0f}", wraps=True),
        Column("of", lambda stage: prediction.limits[fullest(stage)] / MIB, "{:,.0f}", wraps=True),
        Column("mostly", lambda stage: prediction.memory[fullest(stage)].largest, is_text=True, wraps=True),
    )
    print_table(console, columns, plan.stages)
    speed = f"{format_rate(prediction.images_per_second)} {asked.rate}"
    if asked.rate == "images/s":
        speed += f", an ImageNet epoch in {format_duration(prediction.epoch_seconds)}"
    say(console, f"{speed}; devices wait {prediction.steady.bubble:.0%} of the time; bound by {prediction.bound}")
    if not prediction.fits:
        try:
            Estimate(plan, setting).require_fit()
        except UserError as error:
            say(console, f"does not fit: {error}")
