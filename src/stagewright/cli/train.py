"""`stagewright train`: make a configuration of the options, train it, and print the result."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stagewright.config.sections import Config
from stagewright.config.toml import parse_assignment, read_toml, with_new_names
from stagewright.errors import counted
from stagewright.report.live.terminal import PipeSafeConsole, say
from stagewright.run.folder import is_run
from stagewright.run.resume import resumed_config
from stagewright.run.train import run as train


def run(parsed: argparse.Namespace) -> None:
    """Train, then print where the results are."""
    console = PipeSafeConsole(stderr=parsed.json)
    result = train(read_config(parsed), console)
    if parsed.json:
        print(json.dumps(result.summary))
        return
    if result.summary["machine"]:
        console.print(f"done; metrics and weights are on machine 0, this machine's files in {result.folder}")
        return
    speed = result.summary["images_per_second"]
    lines = [f"done: {counted(result.summary['batches'], 'step')}" + (f", {speed:.0f} images/s" if speed else "")]
    if speed and (predicted := result.summary["predicted_images_per_second"]):
        lines.append(f"predicted: {predicted:.0f} images/s, {predicted / speed - 1:+.1%}")
    if result.exported:
        lines.append(f"weights: {result.exported}")
    lines.append(f"files: {result.folder}")
    if (report := result.folder / "report.html").exists():
        lines.append(f"report: {report}")
    say(console, "\n".join(lines), soft_wrap=True)


def read_config(parsed: argparse.Namespace) -> Config:
    """The configuration of a command line: the run to resume, then --config, then --set, then flags; later ones win."""
    layers = [_read_file(parsed.config)] if parsed.config else []
    layers += [parse_assignment(text) for text in parsed.set]
    for key, value in vars(parsed).items():
        section, dot, name = key.partition(".")
        if dot:
            layers.append({section: {name: value}})
    return resumed_config(*layers)


def _read_file(path: str) -> dict[str, Any]:
    """The tables of a configuration file; one that an older version left in a run folder may have old names."""
    tables = read_toml(path)
    return with_new_names(tables) if is_run(Path(path).parent) else tables
