"""Every command, its options and the function that runs it, without importing any of them.

`set_defaults(run="plan:run")` names a function of a module of this folder; `main` imports it once the command line is
parsed. That is the one lazy import of the package: `stagewright --help` starts without torch, numpy or pydantic.
"""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

from stagewright import __version__
from stagewright.config.sections import RENAMED, options

USER_ERROR = 2  # the exit code of whatever a user can put right
_RENAMED_FLAGS = {f"--{old.partition('.')[2]}": f"--{new.partition('.')[2]}" for old, new in RENAMED.items()}
_Commands = Any  # what argparse.add_subparsers returns; its type has no public name
_PRECISIONS = ("fp64", "fp32", "ieee", "tf32", "bf16", "fp16")
_PLACE = "folder:DIR, tar:GLOB, ofrecord:DIR, or a path"
_RUN = "a run folder, or one of its checkpoints"
_SUITES = """suites of configurations, trained in turns; a folder with reports is left:
  quick       small VGG on CPU, two ranks, under two minutes
  stages      dp, sync, stale and pipedream: VGG-16, AlexNet, ResNet-50 as published
  scaling     ResNet-50 on 1, 2, 4, ... ranks
  homelab     ResNet-50 on all GPUs of one box, fp16 and fp32
  FILE.toml   your own; the shipped ones are in stagewright/bench/suites
what lag costs in accuracy: learning
contests with stock PyTorch: overhead, peers, gpu
by themselves: published, planner, own, checkpoint, monitor, data"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; options are written out, never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"allow_abbrev": False}))
        self.set_defaults(parser=self)  # of a command's own parser, where `main` looks for unknown options

    def refuse_option(self, flag: str) -> NoReturn:
        """End with an error about an option that the command does not have, and the one that may have been meant."""
        known = [word for names in re.findall(r"^  (-.*?)(?:  |$)", self.format_help(), re.M) for word in names.split()]
        known = [word.rstrip(",") for word in known if word.startswith("--")]
        name = flag.partition("=")[0]
        if (new := _RENAMED_FLAGS.get(name)) in known:
            self.error(f"option {name} is now {new}")
        near = difflib.get_close_matches(name, known, 1)
        self.error(f"unknown option {name}" + (f", did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: {message}{'' if message.endswith('?') else f'; see {self.prog} --help'}\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(prog="stagewright", description="Plan, run and measure training over unequal stages.")
    parser.add_argument("--version", action="version", version=f"stagewright {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    for add in _COMMANDS:
        add(commands)
    return parser


def _add_doctor(commands: _Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine is, and what will hurt",
        description="Say what this machine is, what will hurt, and what to do about it.",
    )
    parser.add_argument("--data", metavar="PATH", help="a file or folder of data whose disk is to be timed")
    parser.add_argument("--fast", action="store_true", help="only look: measure no bandwidths")
    _add_json(parser)
    parser.set_defaults(run="machine:run_doctor")


def _add_profile(commands: _Commands) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure every unit of a model on this device",
        usage="stagewright profile MODEL [-o FILE] [options]",
        description="Measure forward, backward and bytes of every unit, the device's ceilings and its links.",
    )
    _add_json(parser)
    parser.add_argument("model", help="zoo name, or package.module:factory")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--samples", default="8,16", metavar="N,N", help="microbatch sizes (default: 8,16)")
    parser.add_argument(
        "--precision", default="fp32", help="fp64, fp32, ieee, tf32, bf16 or fp16, or several: fp32,bf16"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="kind of device (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of a CPU rank (default: 1)")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="processes at once, as ranks would run")
    parser.add_argument("--image", type=int, metavar="N", help="side of the images (default: the model's own)")
    parser.add_argument("--classes", type=int, metavar="N", help="outputs of a zoo model (default: its own)")
    parser.add_argument("--pipedream", metavar="FILE", help="import PipeDream's graph.txt, taken at --samples")
    parser.set_defaults(run="machine:run_profile")


def _add_plan(commands: _Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="find the fastest layout of a model on a cluster",
        usage="stagewright plan MODEL --cluster NAME|FILE --batch N [options]",
        description="Search layouts, simulate the best, compare with plain data parallel, write the plan to run.",
    )
    _add_setting(parser)
    parser.add_argument(
        "--batch", type=int, required=True, metavar="N", help="samples of one update (the global batch)"
    )
    parser.add_argument("--mode", action="append", choices=("sync", "stale", "pipedream"), help="only these modes")
    parser.add_argument("--microbatches", type=int, metavar="N", help="pieces of a batch (default: several are tried)")
    parser.add_argument("--staleness", type=int, metavar="N", help="most updates a stage lags")
    parser.add_argument("--lr", type=float, metavar="RATE", help="largest learning rate: is it too much for the lag?")
    parser.add_argument("--momentum", type=float, default=0.9, help="SGD momentum, with --lr (default: 0.9)")
    parser.add_argument("--nesterov", action="store_true", help="as train --nesterov, with --lr")
    parser.add_argument("--predict", action="store_true", help="as train --predict, with --lr")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan for train --plan")
    parser.add_argument("--explain", metavar="UNIT", help="what one unit costs and where the plan puts it")
    parser.set_defaults(run="plan:run")


def _add_simulate(commands: _Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict a plan's speed and memory on a cluster",
        usage="stagewright simulate MODEL --cluster NAME|FILE [options]",
        description="Predict images a second, memory and waiting of a plan, on hardware that need not be there.",
    )
    _add_setting(parser)
    parser.add_argument(
        "--mode",
        choices=("dp", "sync", "stale", "pipedream"),
        help="how weights may lag (default: stale, or dp of one stage)",
    )
    parser.add_argument(
        "--placement", metavar="TEXT", help="devices of each stage: 0:0-6.0:7 (default: all, one stage)"
    )
    parser.add_argument("--shares", metavar="TEXT", help="each stage's share of the operations: 11:7")
    parser.add_argument("--cut", metavar="NAMES", help="first unit of each later stage (default: the planner's)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples of one update (the global batch)")
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples of a microbatch, instead of --batch")
    parser.add_argument("--microbatches", type=int, metavar="N", help="pieces of a batch")
    parser.add_argument("--staleness", type=int, metavar="N", help="most updates a stage lags in mode stale")
    parser.add_argument("--plan", metavar="FILE", help="a plan file instead of all these")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for Perfetto or chrome://tracing")
    parser.add_argument("--report", metavar="FILE", help="write a page with the timeline and the memory (.html)")
    parser.set_defaults(run="simulate:run_simulate")


def _add_value(commands: _Commands) -> None:
    parser = commands.add_parser(
        "value",
        help="compare clusters by images a second, a dollar and a watt",
        usage="stagewright value MODEL --cluster A --cluster B [options]",
        description="Compare clusters: the best plan on each, what it costs and what it draws.",
    )
    _add_setting(parser, several=True)
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="samples of one update (default: 256)")
    parser.add_argument("--price", action="append", default=[], metavar="DEVICE=USD", help="your own price of a device")
    parser.set_defaults(run="value:run")


def _add_schedule(commands: _Commands) -> None:
    parser = commands.add_parser(
        "schedule",
        help="draw who does what when in a plan",
        usage="stagewright schedule [options]",
        description="Draw the programs of a plan, one row a rank, time to the right; --programs prints them as text.",
    )
    _add_options(parser, "plan")
    parser.add_argument("--batches", type=int, default=2, help="batches to show (default: 2)")
    parser.add_argument("--forward", default=None, help="time of a forward by stage: 1,1 (default: 1 each)")
    parser.add_argument("--backward", default=None, help="time of a backward by stage: 2,2 (default: 1 each)")
    parser.add_argument("--transfer", type=float, default=0.0, help="time of a message (default: 0)")
    parser.add_argument("--programs", action="store_true", help="every rank's actions as text, behind the picture")
    parser.set_defaults(run="simulate:run_schedule")


def _add_setting(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """The model, the cluster, the precision, the software and the data."""
    _add_json(parser)
    parser.add_argument("model", help="zoo name, or package.module:factory")
    many = "; once for each" if several else ""
    parser.add_argument(
        "--cluster",
        action="append" if several else "store",
        metavar="NAME|FILE",
        help=f"a cluster of the catalogue, or a file of your own{many}",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="only the first N devices of the cluster")
    parser.add_argument("--precision", choices=_PRECISIONS, default="fp32", help="number format (default: fp32)")
    parser.add_argument(
        "--software", default="stagewright", help="whose efficiency: stagewright, pytorch, oneflow, pipedream"
    )
    parser.add_argument("--data", choices=("synthetic", "imagenet"), default="synthetic", help="what is loaded")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="decides its memory")
    parser.add_argument("--image", type=int, metavar="N", help="side of the images (default: the model's own)")
    parser.add_argument("--classes", type=int, metavar="N", help="outputs of a zoo model (default: its own)")
    parser.add_argument("--profile", metavar="FILE", help="measured units instead of the catalogue's")


def _add_train(commands: _Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model over stages",
        usage="stagewright train [options]",
        description="Train a model over stages.",
    )
    _add_options(parser)
    parser.set_defaults(run="train:run")


def _add_watch(commands: _Commands) -> None:
    parser = commands.add_parser(
        "watch",
        help="follow a run in the terminal, or in a browser with --serve",
        description="Follow a run: a screen in a terminal, lines anywhere else. It ends when the run ends.",
    )
    parser.add_argument("folder", metavar="RUN", nargs="?", help="a run folder (default: the newest in runs/)")
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")
    parser.add_argument(
        "--serve", metavar="PORT", type=int, nargs="?", const=0, help="serve the run's page to this machine's browsers"
    )
    _add_json(parser)
    parser.set_defaults(run="runs:run_watch")


def _add_report(commands: _Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="write the page of a run, or one that compares several",
        description="Write report.html (one file, works offline) and report.md of a run, or of several side by side.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the .html file (default: in the run's folder; several: .)"
    )
    _add_json(parser)
    parser.set_defaults(run="runs:run_report")


def _add_compare(commands: _Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="say whether two runs or two benches differ",
        usage="stagewright compare A B [options]",
        description="Compare the throughput of two run folders or two bench folders, with intervals, and say whether "
        "they differ, or why they can't be compared.",
    )
    parser.add_argument("first", metavar="A", help="a run folder or a bench folder")
    parser.add_argument("second", metavar="B", help="another of the same kind")
    _add_json(parser)
    parser.set_defaults(run="compare:run_compare")


def _add_checkpoint(commands: _Commands) -> None:
    parser = commands.add_parser("checkpoint", help="list, look at, verify and export what a run has kept")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, run, help in (
        ("list", "run_list", "the checkpoints of a run"),
        ("show", "run_show", "what a checkpoint holds"),
        ("verify", "run_verify", "whether every file is there, with its hash"),
    ):
        action = actions.add_parser(name, help=help)
        action.add_argument("path", metavar="RUN", help=_RUN)
        _add_json(action)
        action.set_defaults(run=f"checkpoint:{run}")
    export = actions.add_parser("export", help="write the weights as safetensors that the plain model loads")
    export.add_argument("path", metavar="RUN", help=f"{_RUN}; of a run, the newest whole one")
    export.add_argument("target", metavar="FILE", help="the .safetensors file to write")
    _add_json(export)
    export.set_defaults(run="checkpoint:run_export")


def _add_data(commands: _Commands) -> None:
    parser = commands.add_parser("data", help="look at a data set, index it, convert it, measure its loading")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_inspect(actions)
    index = actions.add_parser("index", help="find every record and keep where they are")
    index.add_argument("path", help=_PLACE)
    index.add_argument("--class-names", help="file with one class name a line, in label order")
    _add_json(index)
    index.set_defaults(run="data:run_index")
    convert = actions.add_parser("convert", help="write a data set in another format")
    convert.add_argument("source", metavar="SRC", help=_PLACE)
    convert.add_argument("target", metavar="DST", help="folder:DIR, tar:DIR or ofrecord:DIR; DIR empty or new")
    convert.add_argument("--class-names", help="file with one class name a line, in label order")
    convert.add_argument("--limit", type=int, help="so many records, evenly spread")
    convert.add_argument("--per-part", type=int, default=5000, help="records of a part or shard (default: 5000)")
    _add_json(convert)
    convert.set_defaults(run="data:run_convert")
    bench = actions.add_parser("bench", help="images a second of this loader and of stock ones, in one run")
    bench.add_argument("--repeats", type=int, default=30, help="interleaved repeats of every side (default: 30)")
    bench.add_argument("--images", type=int, default=64, help="images of one repeat (default: 64)")
    bench.add_argument("--threads", type=int, default=2, help="most loader threads to measure (default: 2)")
    _add_json(bench)
    bench.set_defaults(run="data:run_bench")


def _add_inspect(actions: _Commands) -> None:
    parser = actions.add_parser("inspect", help="counts, classes, sizes, bad records, and a sheet of samples")
    parser.add_argument("path", help=_PLACE)
    parser.add_argument("--class-names", help="file with one class name a line, in label order")
    parser.add_argument("--most", type=int, default=10_000, help="records to decode (default: 10000; 0: all)")
    parser.add_argument("--sheet", default="contact-sheet.png", help="picture to write (default: contact-sheet.png)")
    parser.add_argument("--image", type=int, default=0, help="side of its samples (default: 224; 32 for small images)")
    parser.add_argument("--crop", choices=("auto", "resized", "padded"), default="auto", help="random crop")
    parser.add_argument("--jitter", type=float, default=0.0, help="change of colours, as a share")
    parser.add_argument("--cutout", type=int, default=0, help="side of a black square in them")
    parser.add_argument("--seed", type=int, default=0, help="of the crops")
    _add_json(parser)
    parser.set_defaults(run="data:run_inspect")


def _add_cluster(commands: _Commands) -> None:
    parser = commands.add_parser("cluster", help="describe a machine to the planner, list those it knows")
    parts = parser.add_subparsers(title="what to do", required=True, metavar="import|list")
    listing = parts.add_parser(
        "list",
        help="clusters, devices and links of the catalogue",
        description="List what --cluster and cluster files can name: clusters, devices and links of the catalogue.",
    )
    _add_json(listing)
    listing.set_defaults(run="machine:run_list")
    importing = parts.add_parser(
        "import",
        help="a cluster file from nvidia-smi's texts, or of this machine",
        description="Make a cluster file from the texts of nvidia-smi topo -m and nvidia-smi, or of this machine.",
    )
    importing.add_argument("--topo", metavar="FILE", help="text of nvidia-smi topo -m (- for standard input)")
    importing.add_argument("--smi", metavar="FILE", help="text of nvidia-smi; may be the same file")
    importing.add_argument("--here", action="store_true", help="this machine instead, asked through its driver")
    importing.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    importing.add_argument("--name", help="name of the cluster (default: the file's)")
    importing.add_argument("--device", metavar="NAME", help="the catalogue's name of the cards, instead of theirs")
    importing.add_argument("--gpus", metavar="0-3,6", help="only these of them")
    importing.add_argument("--pcie", type=int, metavar="N", help="generation of the slots (default: the card's best)")
    importing.add_argument("--cores", type=int, metavar="N", help="cores that decode images")
    importing.add_argument("--count", type=int, default=1, metavar="N", help="machines like this one (default: 1)")
    importing.add_argument("--network", metavar="LINK", help="between them: net-1g, net-10g, ... net-400g")
    _add_json(importing)
    importing.set_defaults(run="machine:run_import")


def _add_bench(commands: _Commands) -> None:
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
    _add_json(parser)
    parser.set_defaults(run="bench:run")


def _add_demo(commands: _Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small VGG over 2+1 stale stages beside one process, and compare them on a page",
        usage="stagewright demo",
        description="Train a small VGG over 2+1 stale stages and on one process, and write a page that compares them.",
    )
    parser.set_defaults(run="demo:run")


def _add_options(parser: argparse.ArgumentParser, *sections: str) -> None:
    """The options of some sections of the configuration, or of all."""
    _add_json(parser)
    parser.add_argument("--config", metavar="FILE", help="options as TOML")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="one option: run.seed=3")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options(*sections):
        section = option.key.partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        group = groups[section]
        shared: dict[str, Any] = {"dest": option.key, "default": argparse.SUPPRESS}
        if option.type is bool:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=option.help, **shared)
            continue
        shown = "" if option.default in (None, "") else f" (default: {option.default})"
        metavar = None if option.choices else option.type.__name__.upper().replace("STR", "TEXT").replace("INT", "N")
        group.add_argument(
            option.flag,
            type=option.type,
            choices=option.choices or None,
            metavar=metavar,
            help=(option.help + shown).replace("%", "%%"),
            **shared,
        )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


_COMMANDS = (
    *(_add_doctor, _add_profile, _add_plan, _add_simulate, _add_train, _add_watch, _add_report, _add_checkpoint),
    *(_add_schedule, _add_data, _add_bench, _add_compare, _add_value, _add_cluster, _add_demo),
)
