"""`stagewright bench`: measure configurations in turns, beside stock PyTorch, or parts by themselves."""

from __future__ import annotations

import argparse

from stagewright.commands.options import Commands, add_json

_SUITES = """suites of configurations, trained in turns; a folder with reports is left:
  quick       small VGG on CPU, two ranks, under two minutes
  stages      dp, sync, stale and pipedream: VGG-16, AlexNet, ResNet-50 as published
  scaling     ResNet-50 on 1, 2, 4, ... ranks
  homelab     ResNet-50 on all GPUs of one box, fp16 and fp32
  FILE.toml   your own; the shipped ones are in stagewright/bench/suites
what lag costs in accuracy: learning
contests with stock PyTorch: overhead, peers, gpu
by themselves: published, planner, own, checkpoint, monitor, data"""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure: suites of configurations, contests with stock PyTorch, learning, the planner, checkpoints, data",
        usage="stagewright bench SUITE|FILE.toml [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_SUITES,
    )
    parser.add_argument("suite", metavar="SUITE", help="what to measure, see below")
    parser.add_argument(
        "--repeats", type=int, help="interleaved repeats of every side (default: the suite's, mostly 7)"
    )
    parser.add_argument("--steps", type=int, default=0, help="batches of one repeat (default: by the suite)")
    parser.add_argument("--only", metavar="TEXT", help="only configurations or heats whose name has this in it")
    parser.add_argument("--data", metavar="SOURCE", help="real data for suites that have it: folder:DIR, tar:GLOB, ...")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="for every configuration")
    parser.add_argument("--simulate", action="store_true", help="predict what does not fit this machine")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="predict everything for this cluster")
    parser.add_argument("--anonymise", action="store_true", help="leave out names of hosts and users, paths, addresses")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="folder that holds run folders (default: runs)")
    learning = parser.add_argument_group("learning")
    learning.add_argument("--val", metavar="SOURCE", help="data to judge by")
    learning.add_argument("--study", metavar="FILE.toml", help="your own, as stagewright/bench/studies/learning.toml")
    learning.add_argument("--seeds", type=int, help="runs of every mode (default: 3)")
    learning.add_argument("--jobs", type=int, help="runs at a time (default: by the cores)")
    learning.add_argument("--target", type=float, help="top-1 in percent to reach (default: a point below sync's)")
    learning.add_argument("--real", action="store_true", help="ranks as processes, and their time, instead of emulated")
    learning.add_argument(
        "--reuse", metavar="FOLDER", action="append", default=[], help="take over its runs that have equal settings"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from stagewright import bench
    from stagewright.config import parse_assignment

    bench.run_suite(
        bench.Request(
            parsed.suite,
            repeats=parsed.repeats,
            steps=parsed.steps,
            only=parsed.only,
            data=parsed.data,
            overrides=[parse_assignment(text) for text in parsed.set],
            simulate=parsed.simulate,
            cluster=parsed.cluster,
            anonymise=parsed.anonymise,
            runs=parsed.runs,
            as_json=parsed.json,
            val=parsed.val,
            study=parsed.study,
            seeds=parsed.seeds,
            jobs=parsed.jobs,
            target=parsed.target,
            real=parsed.real,
            reuse=parsed.reuse,
        )
    )
