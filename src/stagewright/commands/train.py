"""`stagewright train`: train a model over stages."""

from __future__ import annotations

import argparse
import json
import os

from stagewright.commands.options import Commands, add_options, read_config


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model over stages",
        usage="stagewright train [options]",
        description="Train a model over stages.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "FATAL"
    )  # before torch comes: its remarks on sockets are not for users
    from stagewright import experiment
    from stagewright.report.console import LastingConsole

    console = LastingConsole(stderr=parsed.json)
    result = experiment.run(read_config(parsed), console)
    if parsed.json:
        print(json.dumps(result.summary))
        return
    if result.summary["machine"]:
        console.print(f"done; metrics and weights are on machine 0, this machine's files in {result.folder}")
        return
    speed = result.summary["images_per_second"]
    lines = [f"done: {result.summary['batches']} steps" + (f", {speed:.0f} images/s" if speed else "")]
    if speed and (predicted := result.summary["predicted_images_per_second"]):
        lines.append(f"predicted: {predicted:.0f} images/s, {predicted / speed - 1:+.1%}")
    if result.exported:
        lines.append(f"weights: {result.exported}")
    lines.append(f"files: {result.folder}")
    if (report := result.folder / "report.html").exists():
        lines.append(f"report: {report}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
