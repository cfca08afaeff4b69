"""`stagewright train`: make a configuration of the options, train it, and print the result."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from stagewright.cli.command.layers import read_layers
from stagewright.cli.plan import Answer
from stagewright.cli.plan import show as show_candidates
from stagewright.config.sections import Config
from stagewright.errors import RunFailed, UserError, counted
from stagewright.metrics import format_metric, format_rate, metric_label, speed_words
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import open_console, say, voice_of
from stagewright.run.plan import auto_plan_lines
from stagewright.run.prepare import explained
from stagewright.run.resume import resumed_config
from stagewright.run.script import OPTIONS, USER_ERROR
from stagewright.run.train import Result
from stagewright.run.train import run as train


def run(parsed: argparse.Namespace) -> None:
    """Train, then print where the results are."""
    console = open_console(stderr=parsed.json)
    layers, given = read_layers(parsed)
    config = resumed_config(*layers, given=given)
    if parsed.explain:
        _explain(config, open_console())
        return
    with ProgressLine() as progress:
        result = train(config, console, progress=progress, spare=parsed.spare)
    if "rank" in result.summary:
        return  # rank 0 prints
    if parsed.json:
        print(json.dumps(result.summary))
        _require_learnt(result)
        return
    if result.summary["machine"]:
        where = f"this machine's files in {result.folder}"
        say(console, f"done; metrics and weights are on machine 0, {where}")
        return
    speed = result.summary["images_per_second"]
    unit = result.unit
    words = speed_words(speed, result.summary["steady_steps"], unit)
    lines = [f"done: {counted(result.summary['batches'], 'step')}, {words}"]
    if early := result.summary["stopped_early"]:
        lines.append(early)
    if best := result.summary["best"]:
        words = f"{metric_label(best['metric'])} {format_metric(best['metric'], best['value'])}"
        kept = f", checkpoint {best['checkpoint']}" if best["checkpoint"] else ""
        lines.append(f"best: {words} after step {best['batch']}{kept}")
    if speed and (predicted := result.summary["predicted_images_per_second"]):
        apart = f"{abs(predicted / speed - 1):.1%} {'above' if predicted > speed else 'below'} the measured speed"
        lines.append(f"predicted: {format_rate(unit.of(predicted))} {unit.rate}, {apart}")
    if result.exported:
        lines.append(f"weights: {result.exported}")
    lines.append(f"files: {result.folder}")
    if (report := result.folder / "report.html").exists():
        lines.append(f"report: {report}")
    say(console, *lines)
    _require_learnt(result)


def _explain(config: Config, console: Console) -> None:
    """Print every candidate for this machine, and the line that training would begin with."""
    auto = explained(config, voice_of(console))
    if auto.searched is not None:
        searched = auto.searched
        answer = Answer(searched.asked, searched.choice, searched.comparison)
        show_candidates(console, answer, has_command=False)
    say(console, *auto_plan_lines(auto))


def _require_learnt(result: Result) -> None:
    """Fail after the results of a run that diverged, as one fails whose loss is not finite."""
    if diverged := result.summary.get("diverged"):
        raise RunFailed(diverged)


def run_script(parsed: argparse.Namespace) -> None:
    """Run a script whose `stagewright.Engine` takes these options, once per rank."""
    layers, _ = read_layers(parsed)
    tables: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, values in layer.items():
            tables.setdefault(section, {}).update(values)
    os.environ[OPTIONS] = json.dumps(tables)
    script = Path(parsed.script)
    if not script.is_file():
        raise UserError(f"{script}: no such script; give a Python file")
    sys.argv = [str(script), *parsed.rest]
    sys.path.insert(0, str(script.parent.absolute()))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:  # the script's code may raise anything; its engine knows what to do on a rank
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(USER_ERROR if isinstance(error, UserError | RunFailed) else 1)
    engine = sys.modules.get("stagewright.api.engine")  # whose import takes torch
    if engine is None or not engine.Engine.made:
        line = f"warning: {script} made no stagewright.Engine, which alone takes options of stagewright run"
        say(open_console(stderr=True), line)
