"""`stagewright bench`: measure, side by side with stock PyTorch."""

from __future__ import annotations

import argparse

from stagewright.commands.options import Commands, add_json

SUITES = ("overhead", "peers", "gpu", "published", "planner", "own", "checkpoint", "monitor")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure: overhead and peers beside stock PyTorch, published runs, the planner, checkpoints",
    )
    parser.add_argument("suite", choices=SUITES, help="what to measure")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats of both sides (default: 7)")
    parser.add_argument("--steps", type=int, default=0, help="batches of one repeat (default: by the suite)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from stagewright import bench

    bench.run_suite(parsed.suite, repeats=parsed.repeats, steps=parsed.steps, as_json=parsed.json)
