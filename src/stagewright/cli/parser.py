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

USER_ERROR = 2  # the exit code of every error that a user can fix
_RENAMED_FLAGS = {f"--{old.partition('.')[2]}": f"--{new.partition('.')[2]}" for old, new in RENAMED.items()}
_Commands = Any  # what argparse.add_subparsers returns; its type has no public name
_PRECISIONS = ("fp64", "fp32", "ieee", "tf32", "bf16", "fp16")
_MODEL = "a zoo name, or package.module:factory"
_IMAGE = "side of the images in pixels (default: the model's)"
_CLASSES = "outputs of a zoo model (default: the model's)"
_BATCH = "samples per update (the global batch)"
_DATA = "folder:DIR, tar:GLOB, ofrecord:DIR, or a path"
_CLASS_NAMES = "file with one class name per line, in label order"
_RUN = "a run folder, or one of its checkpoints"
_SUITES = """suites of configurations, measured in turns; they leave a folder with reports:
  quick       small VGG on CPU, two ranks, under two minutes
  stages      dp, sync, stale and pipedream: VGG-16, AlexNet, ResNet-50
  scaling     ResNet-50 on 1, 2, 4, ... ranks
  homelab     ResNet-50 on all GPUs of one machine, fp16 and fp32
  FILE.toml   your own; for examples see stagewright/bench/suites
accuracy at each lag, over several seeds:
  learning
comparisons with stock PyTorch:
  overhead, peers, gpu
parts of Stagewright:
  published, planner, own, checkpoint, monitor, data"""


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line; takes options only in full, never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"allow_abbrev": False}))
        self.set_defaults(parser=self)  # the parser of the command, which `main` asks about unknown options

    def refuse_option(self, flag: str) -> NoReturn:
        """End with an error about an option that this command does not have; suggest the nearest that it has."""
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
    parser = _Parser(
        prog="stagewright",
        usage="stagewright COMMAND [options]",
        description="Plan, run and measure training over unequal pipeline stages.",
        epilog="stagewright COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"stagewright {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog=parser.prog)
    for add in _COMMANDS:
        add(commands)
    return parser


def _add(
    commands: _Commands, name: str, run: str, help: str, usage: str, description: str, **more: Any
) -> argparse.ArgumentParser:
    """A command; `usage` is what follows its name, and `run` the function that runs it."""
    command: argparse.ArgumentParser = commands.add_parser(
        name.split()[-1], help=help, usage=f"stagewright {name} {usage}".rstrip(), description=description, **more
    )
    command.set_defaults(run=run)
    return command


def _add_group(commands: _Commands, name: str, help: str, description: str) -> _Commands:
    """A command that has actions."""
    group = commands.add_parser(name, help=help, usage=f"stagewright {name} ACTION [options]", description=description)
    return group.add_subparsers(title="actions", required=True, metavar="ACTION", prog=group.prog)


def _add_doctor(commands: _Commands) -> None:
    parser = _add(
        commands,
        "doctor",
        "machine:run_doctor",
        help="describe this machine and what will slow training down",
        usage="[options]",
        description="Describe this machine, find what will slow training down, and say what to do about it.",
    )
    parser.add_argument("--data", metavar="PATH", help="also time the disk of this file or folder")
    parser.add_argument("--fast", action="store_true", help="do not measure bandwidths")
    _add_json(parser)


def _add_profile(commands: _Commands) -> None:
    parser = _add(
        commands,
        "profile",
        "machine:run_profile",
        help="measure every unit of a model on this device",
        usage="MODEL [-o FILE] [options]",
        description="Measure the time and bytes of every unit of a model, and the speed of the device and its links.",
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--samples", default="8,16", metavar="N,N", help="microbatch sizes (default: 8,16)")
    parser.add_argument(
        "--precision",
        default="fp32",
        metavar="NAMES",
        help="fp64, fp32, ieee, tf32, bf16 or fp16, or several: fp32,bf16 (default: fp32)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="kind of device (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads per CPU rank (default: 1)")
    parser.add_argument(
        "--together", type=int, default=1, metavar="N", help="processes at once, as ranks would run (default: 1)"
    )
    parser.add_argument("--image", type=int, metavar="N", help=_IMAGE)
    parser.add_argument("--classes", type=int, metavar="N", help=_CLASSES)
    parser.add_argument("--pipedream", metavar="FILE", help="import PipeDream's graph.txt, measured at --samples")
    _add_json(parser)


def _add_plan(commands: _Commands) -> None:
    parser = _add(
        commands,
        "plan",
        "plan:run",
        help="find the fastest plan of a model on a cluster",
        usage="MODEL --cluster NAME|FILE --batch N [options]",
        description="Search for the fastest plan, compare it with data parallelism, and write it for train --plan.",
    )
    _add_setting(parser)
    parser.add_argument("--batch", type=int, required=True, metavar="N", help=_BATCH)
    parser.add_argument(
        "--mode", action="append", choices=("sync", "stale", "pipedream"), help="try only this mode; may be repeated"
    )
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches per batch (default: try several)")
    parser.add_argument("--staleness", type=int, metavar="N", help="most updates that a stage may lag")
    parser.add_argument("--lr", type=float, metavar="RATE", help="warn if this learning rate is unstable at the lag")
    parser.add_argument(
        "--momentum", type=float, default=0.9, metavar="FLOAT", help="with --lr: SGD momentum (default: 0.9)"
    )
    parser.add_argument("--nesterov", action="store_true", help="with --lr: Nesterov momentum")
    parser.add_argument("--predict", action="store_true", help="with --lr: extrapolated weights, as train --predict")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan for train --plan")
    parser.add_argument("--explain", metavar="UNIT", help="show what a unit costs and where the plan puts it")
    _add_json(parser)


def _add_simulate(commands: _Commands) -> None:
    parser = _add(
        commands,
        "simulate",
        "simulate:run",
        help="predict the speed and memory of a plan on a cluster",
        usage="MODEL --cluster NAME|FILE [options]",
        description="Predict the speed, memory and idle time of a plan, on hardware that you need not have.",
    )
    _add_setting(parser)
    parser.add_argument(
        "--mode",
        choices=("dp", "sync", "stale", "pipedream"),
        help="how far weights may lag (default: stale; dp for one stage)",
    )
    parser.add_argument(
        "--placement", metavar="TEXT", help="devices of each stage: 0:0-6.0:7 (default: one stage on all)"
    )
    parser.add_argument("--shares", metavar="TEXT", help="each stage's share of the operations: 11:7")
    parser.add_argument("--cut", metavar="NAMES", help="first unit of each later stage (default: the planner's choice)")
    parser.add_argument("--batch", type=int, metavar="N", help=_BATCH)
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples per microbatch, instead of --batch")
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches per batch")
    parser.add_argument("--staleness", type=int, metavar="N", help="most updates that a stage may lag in mode stale")
    parser.add_argument("--plan", metavar="FILE", help="a plan file, instead of the options above")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for Perfetto or chrome://tracing")
    parser.add_argument("--report", metavar="FILE", help="write an .html page with the timeline and the memory")
    _add_json(parser)


def _add_value(commands: _Commands) -> None:
    parser = _add(
        commands,
        "value",
        "value:run",
        help="compare clusters by images per second, dollar and watt",
        usage="MODEL --cluster A --cluster B [options]",
        description="Compare clusters by the best plan on each: its speed, its price and its power.",
    )
    _add_setting(parser, several=True)
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="samples per update (default: 256)")
    parser.add_argument(
        "--price", action="append", default=[], metavar="DEVICE=USD", help="price of a device; may be repeated"
    )
    _add_json(parser)


def _add_schedule(commands: _Commands) -> None:
    parser = _add(
        commands,
        "schedule",
        "schedule:run",
        help="draw what each rank does when",
        usage="[options]",
        description="Draw the programs of a plan: one row per rank, time from left to right.",
    )
    _add_options(parser, "plan")
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="batches to show (default: 2)")
    parser.add_argument("--forward", metavar="TIMES", help="time of a forward by stage: 1,1 (default: 1 each)")
    parser.add_argument("--backward", metavar="TIMES", help="time of a backward by stage: 2,2 (default: 1 each)")
    parser.add_argument("--transfer", type=float, default=0.0, metavar="TIME", help="time of a message (default: 0)")
    parser.add_argument("--programs", action="store_true", help="also print the actions of every rank as text")


def _add_setting(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """The options that say what is planned: the model, the cluster, the precision, the software and the data."""
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument(
        "--cluster",
        action="append" if several else "store",
        metavar="NAME|FILE",
        help=f"a cluster of the catalog, or a cluster file{'; may be repeated' if several else ''}",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="use only the first N devices of the cluster")
    parser.add_argument(
        "--precision",
        choices=_PRECISIONS,
        default="fp32",
        metavar="NAME",
        help="fp64, fp32, ieee, tf32, bf16 or fp16 (default: fp32)",
    )
    parser.add_argument(
        "--software",
        default="stagewright",
        metavar="NAME",
        help="whose efficiency to assume: stagewright, pytorch, oneflow or pipedream (default: stagewright)",
    )
    parser.add_argument(
        "--data", choices=("synthetic", "imagenet"), default="synthetic", help="data to load (default: synthetic)"
    )
    parser.add_argument(
        "--optimizer", choices=("sgd", "adamw"), default="sgd", help="optimizer, for its memory (default: sgd)"
    )
    parser.add_argument("--image", type=int, metavar="N", help=_IMAGE)
    parser.add_argument("--classes", type=int, metavar="N", help=_CLASSES)
    parser.add_argument("--profile", metavar="FILE", help="measured units, instead of the catalog's figures")


def _add_train(commands: _Commands) -> None:
    parser = _add(
        commands,
        "train",
        "train:run",
        help="train a model over stages",
        usage="[options]",
        description="Train a model over stages. Every option is also a key of a TOML file for --config.",
    )
    _add_options(parser)


def _add_watch(commands: _Commands) -> None:
    parser = _add(
        commands,
        "watch",
        "runs:run_watch",
        help="follow a run in the terminal, or in a browser with --serve",
        usage="[RUN] [options]",
        description="Follow a run until it ends: as a live screen in a terminal, as lines anywhere else.",
    )
    parser.add_argument("folder", metavar="RUN", nargs="?", help="a run folder (default: the newest in runs/)")
    parser.add_argument("--once", action="store_true", help="show the current state and exit")
    parser.add_argument(
        "--serve", metavar="PORT", type=int, nargs="?", const=0, help="serve the report to browsers on this machine"
    )
    _add_json(parser)


def _add_report(commands: _Commands) -> None:
    parser = _add(
        commands,
        "report",
        "runs:run_report",
        help="write the report of a run, or one that compares several",
        usage="RUN... [-o FILE] [options]",
        description="Write report.html (one file, works offline) and report.md of a run, or of several side by side.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the .html file (default: in the run folder; for several, in .)"
    )
    _add_json(parser)


def _add_compare(commands: _Commands) -> None:
    parser = _add(
        commands,
        "compare",
        "compare:run_compare",
        help="say whether two runs or two benches differ in speed",
        usage="A B [options]",
        description="Compare the throughput of two runs or two benches with confidence intervals, and say whether they "
        "differ, or why they can't be compared.",
    )
    parser.add_argument("first", metavar="A", help="a run folder or a bench folder")
    parser.add_argument("second", metavar="B", help="another folder of the same kind")
    _add_json(parser)


def _add_checkpoint(commands: _Commands) -> None:
    actions = _add_group(
        commands,
        "checkpoint",
        help="list, show, verify and export checkpoints",
        description="List, show, verify and export the checkpoints of a run.",
    )
    for name, help in (
        ("list", "list the checkpoints of a run"),
        ("show", "show what a checkpoint holds"),
        ("verify", "compare every file of a checkpoint with its hash"),
    ):
        action = _add(
            actions, f"checkpoint {name}", f"checkpoint:run_{name}", help, "RUN [options]", f"{help.capitalize()}."
        )
        action.add_argument("path", metavar="RUN", help=_RUN)
        _add_json(action)
    export = _add(
        actions,
        "checkpoint export",
        "checkpoint:run_export",
        help="write the weights as one safetensors file",
        usage="RUN FILE [options]",
        description="Write the weights as one safetensors file that the plain model loads.",
    )
    export.add_argument("path", metavar="RUN", help="a run folder (its newest checkpoint), or one checkpoint")
    export.add_argument("target", metavar="FILE", help="the .safetensors file to write")
    _add_json(export)


def _add_data(commands: _Commands) -> None:
    actions = _add_group(
        commands,
        "data",
        help="inspect, index, convert and time data sets",
        description="Inspect, index and convert data sets, and time how fast they load.",
    )
    _add_inspect(actions)
    index = _add(
        actions,
        "data index",
        "data:run_index",
        help="find every record and store where it is",
        usage="PATH [options]",
        description="Find every record of a data set, and store where it is, so that training starts at once.",
    )
    index.add_argument("path", metavar="PATH", help=_DATA)
    index.add_argument("--class-names", metavar="FILE", help=_CLASS_NAMES)
    _add_json(index)
    convert = _add(
        actions,
        "data convert",
        "data:run_convert",
        help="write a data set in another format",
        usage="SRC DST [options]",
        description="Write a data set in another format.",
    )
    convert.add_argument("source", metavar="SRC", help=_DATA)
    convert.add_argument("target", metavar="DST", help="folder:DIR, tar:DIR or ofrecord:DIR; DIR is new or empty")
    convert.add_argument("--class-names", metavar="FILE", help=_CLASS_NAMES)
    convert.add_argument("--limit", type=int, metavar="N", help="convert only this many records, evenly spread")
    convert.add_argument(
        "--per-part", type=int, default=5000, metavar="N", help="records per part or shard (default: 5000)"
    )
    _add_json(convert)
    bench = _add(
        actions,
        "data bench",
        "data:run_bench",
        help="compare this loader with stock ones",
        usage="[options]",
        description="Measure the images per second of this loader and of stock ones, in turns.",
    )
    bench.add_argument("--repeats", type=int, metavar="N", help="repeats per loader (default: 30)")
    bench.add_argument("--images", type=int, metavar="N", help="images per repeat (default: 64)")
    bench.add_argument("--threads", type=int, metavar="N", help="most loader threads (default: 2)")
    _add_json(bench)


def _add_inspect(actions: _Commands) -> None:
    parser = _add(
        actions,
        "data inspect",
        "data:run_inspect",
        help="count classes, sizes and bad records; draw samples",
        usage="PATH [options]",
        description="Count the records, classes, sizes and bad records of a data set, and draw a sheet of samples.",
    )
    parser.add_argument("path", metavar="PATH", help=_DATA)
    parser.add_argument("--class-names", metavar="FILE", help=_CLASS_NAMES)
    parser.add_argument(
        "--most", type=int, default=10_000, metavar="N", help="most records to decode (0: all) (default: 10000)"
    )
    parser.add_argument(
        "--sheet", default="contact-sheet.png", metavar="FILE", help="picture to write (default: contact-sheet.png)"
    )
    parser.add_argument(
        "--image", type=int, default=0, metavar="N", help="side of a sample (default: 224, or 32 for small images)"
    )
    parser.add_argument(
        "--crop", choices=("auto", "resized", "padded"), default="auto", help="random crop (default: auto)"
    )
    parser.add_argument("--jitter", type=float, default=0.0, metavar="FLOAT", help="change of colours, as a fraction")
    parser.add_argument("--cutout", type=int, default=0, metavar="N", help="side of a black square in each sample")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the crops (default: 0)")
    _add_json(parser)


def _add_cluster(commands: _Commands) -> None:
    actions = _add_group(
        commands,
        "cluster",
        help="list known clusters, or describe a machine in a file",
        description="List the clusters, devices and links that the planner knows, or describe a machine in a file.",
    )
    listing = _add(
        actions,
        "cluster list",
        "machine:run_list",
        help="list the clusters, devices and links of the catalog",
        usage="[options]",
        description="List what --cluster and cluster files can name: the clusters, devices and links of the catalog.",
    )
    _add_json(listing)
    importing = _add(
        actions,
        "cluster import",
        "machine:run_import",
        help="make a cluster file of a machine",
        usage="--topo FILE --smi FILE [options]\n       stagewright cluster import --here [options]",
        description="Make a cluster file from the output of nvidia-smi topo -m and nvidia-smi, or of this machine.",
    )
    importing.add_argument("--topo", metavar="FILE", help="output of nvidia-smi topo -m (- for standard input)")
    importing.add_argument("--smi", metavar="FILE", help="output of nvidia-smi; may be the same file")
    importing.add_argument("--here", action="store_true", help="describe this machine instead, through its driver")
    importing.add_argument("-o", "--output", metavar="FILE", help="file to write (default: standard output)")
    importing.add_argument("--name", metavar="NAME", help="name of the cluster (default: the file's)")
    importing.add_argument("--device", metavar="NAME", help="the catalog's name of the GPUs (default: by theirs)")
    importing.add_argument("--gpus", metavar="0-3,6", help="use only these GPUs")
    importing.add_argument("--pcie", type=int, metavar="N", help="PCIe generation (default: the GPU's)")
    importing.add_argument("--cores", type=int, metavar="N", help="CPU cores that decode images")
    importing.add_argument("--count", type=int, default=1, metavar="N", help="number of such machines (default: 1)")
    importing.add_argument("--network", metavar="LINK", help="link between machines: net-1g, net-10g, ... net-400g")
    _add_json(importing)


def _add_bench(commands: _Commands) -> None:
    parser = _add(
        commands,
        "bench",
        "bench:run",
        help="measure configurations, compare with stock PyTorch",
        usage="SUITE|FILE.toml [options]",
        description="Measure a suite of configurations, compare with stock PyTorch, or time parts.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_SUITES,
    )
    parser.add_argument("suite", metavar="SUITE", help="what to measure; see below")
    parser.add_argument("--repeats", type=int, metavar="N", help="repeats per side (default: the suite's)")
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="batches per repeat (default: the suite's)")
    parser.add_argument("--only", metavar="TEXT", help="only configurations or cases whose name contains this")
    parser.add_argument("--data", metavar="SOURCE", help="real data for suites that take it: folder:DIR, tar:GLOB, ...")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="an option for every configuration: run.seed=3"
    )
    parser.add_argument("--simulate", action="store_true", help="predict what does not fit on this machine")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="predict everything for this cluster")
    parser.add_argument(
        "--anonymise", action="store_true", help="leave out host names, user names, paths and addresses"
    )
    parser.add_argument("--runs", metavar="DIR", default="runs", help="folder that holds run folders (default: runs)")
    _add_json(parser)
    learning = parser.add_argument_group("learning")
    learning.add_argument("--val", metavar="SOURCE", help="data to evaluate on")
    learning.add_argument("--study", metavar="FILE.toml", help="your own study, like bench/studies/learning.toml")
    learning.add_argument("--seeds", type=int, metavar="N", help="runs per mode (default: 3)")
    learning.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: by the number of cores)")
    learning.add_argument(
        "--target", type=float, metavar="PERCENT", help="top-1 to reach (default: 1 below that of sync)"
    )
    learning.add_argument("--real", action="store_true", help="run ranks as processes, not emulated; also report time")
    learning.add_argument(
        "--reuse",
        metavar="FOLDER",
        action="append",
        default=[],
        help="reuse the runs of an earlier study that have equal settings",
    )


def _add_demo(commands: _Commands) -> None:
    _add(
        commands,
        "demo",
        "demo:run",
        help="train a small VGG in two ways and compare them",
        usage="",
        description="Train a small VGG over 2+1 stale stages and on one process, and write a page that compares them.",
    )


def _add_options(parser: argparse.ArgumentParser, *sections: str) -> None:
    """The options of some sections of the configuration, or of all."""
    _add_json(parser)
    parser.add_argument("--config", metavar="FILE", help="read options from a TOML file")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="set one option by its key: run.seed=3"
    )
    groups: dict[str, Any] = {}
    for option in options(*sections):
        section = option.key.partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        group = groups[section]
        shared: dict[str, Any] = {"dest": option.key, "default": argparse.SUPPRESS}
        if option.type is bool:
            shown = " (default: on)" if option.default else ""
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=option.help + shown, **shared)
            continue
        shown = "" if option.default in (None, "") else f" (default: {option.default})"
        group.add_argument(
            option.flag,
            type=option.type,
            choices=option.choices or None,
            metavar=None if option.choices else option.metavar,
            help=(option.help + shown).replace("%", "%%"),
            **shared,
        )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


_COMMANDS = (
    *(_add_doctor, _add_profile, _add_plan, _add_simulate, _add_train, _add_watch, _add_report, _add_checkpoint),
    *(_add_schedule, _add_data, _add_bench, _add_compare, _add_value, _add_cluster, _add_demo),
)
