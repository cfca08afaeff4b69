"""`stagewright doctor`: what this machine is, and what will hurt."""

from __future__ import annotations

import argparse
import json
import os

from stagewright.commands.options import Commands, add_json


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine is, and what will hurt",
        description="Say what this machine is, what will hurt, and what to do about it.",
    )
    parser.add_argument("--data", metavar="PATH", help="a file or folder of data whose disk is to be timed")
    parser.add_argument("--fast", action="store_true", help="only look: measure no bandwidths")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch comes: its remarks are not for users
    from rich.console import Console

    from stagewright.doctor.examine import examine
    from stagewright.doctor.show import show

    errors = Console(stderr=True)
    with errors.status("looking") as status:
        found = examine(parsed.data, measures=not parsed.fast, tell=status.update)
    if parsed.json:
        print(json.dumps(found.describe()))
    else:
        show(Console(), found)
