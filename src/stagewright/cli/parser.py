"""Every command, its options and the function that runs it, without importing any of them.

`@_command("plan", "plan:run", ...)` decorates the function that adds the options of `stagewright plan`; its docstring
is the command's description. `plan:run` names the function that runs it: `main` imports it once the command line is
parsed. That is the one lazy import of the package: `stagewright --help` starts without torch, numpy or pydantic.
"""

from __future__ import annotations

import argparse
import difflib
import re
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from stagewright import __version__
from stagewright.config.sections import RENAMED, Option, options

USER_ERROR = 2  # the exit code of every error that a user can fix
_RENAMED_FLAGS = {f"--{old.partition('.')[2]}": f"--{new.partition('.')[2]}" for old, new in RENAMED.items()}
_OPTIONS = {option.flag: option for option in options()}
_PRECISIONS = ("fp64", "fp32", "ieee", "tf32", "bf16", "fp16")
_MODEL = "a zoo name, or package.module:factory"
_DATA = "folder:DIR, tar:GLOB, ofrecord:DIR, or a path"
_RUN = "a run folder, or one of its checkpoints"
_GROUPS = {  # the help and the description of commands that have actions
    "checkpoint": (
        "list, show, verify and export checkpoints",
        "List, show, verify and export the checkpoints of a run.",
    ),
    "data": (
        "inspect, index, convert and time data sets",
        "Inspect, index and convert data sets, and time how fast they load.",
    ),
    "cluster": (
        "list known clusters, or describe a machine in a file",
        "List the clusters, devices and links that the planner knows, or describe a machine in a file.",
    ),
}
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


class _Parser(ArgumentParser):
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


@dataclass(frozen=True, slots=True)
class _Command:
    """A command, or an action of a group of commands."""

    name: str  # of an action: with its group, such as "data index"
    run: str  # the function that runs it, as "module:function"
    help: str
    arguments: str  # what precedes the options in its usage
    has_options: bool
    add_options: Callable[[ArgumentParser], None]

    def add_to(self, commands: Any) -> None:
        """Add this command to what `add_subparsers` returned."""
        usage = " ".join(filter(None, ("stagewright", self.name, self.arguments, "[options]" * self.has_options)))
        parser = commands.add_parser(
            self.name.split()[-1], help=self.help, usage=usage, description=self.add_options.__doc__
        )
        parser.set_defaults(run=self.run)
        self.add_options(parser)
        if self.has_options:
            parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _command(
    name: str, run: str, help: str, arguments: str = "", *, has_options: bool = True
) -> Callable[[Callable[[ArgumentParser], None]], _Command]:
    return lambda add_options: _Command(name, run, help, arguments, has_options, add_options)


def make_parser() -> ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="stagewright",
        usage="stagewright COMMAND [options]",
        description="Plan, run and measure training over unequal pipeline stages.",
        epilog="stagewright COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"stagewright {__version__}")
    groups: dict[str, Any] = {}
    groups[""] = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog=parser.prog)
    for command in _COMMANDS:
        name = command.name.rpartition(" ")[0]
        if name not in groups:
            help, description = _GROUPS[name]
            group = groups[""].add_parser(
                name, help=help, usage=f"stagewright {name} ACTION [options]", description=description
            )
            groups[name] = group.add_subparsers(title="actions", required=True, metavar="ACTION", prog=group.prog)
        command.add_to(groups[name])
    return parser


def _add_options(parser: ArgumentParser, *sections: str) -> None:
    """The options of some sections of the configuration, or of all; only those given are in the parsed arguments."""
    parser.add_argument("--config", metavar="FILE", help="read options from a TOML file")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="set one option by its key: run.seed=3"
    )
    groups: dict[str, Any] = {}
    for option in options(*sections):
        section = option.key.partition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        declared = _declare(option) | {"dest": option.key, "default": argparse.SUPPRESS}
        groups[section].add_argument(option.flag, **declared)


def _add_option(parser: ArgumentParser, flag: str, **changes: Any) -> None:
    """An option that means the same as for a run, except for `changes`."""
    parser.add_argument(flag, **_declare(_OPTIONS[flag], **changes))


def _declare(option: Option, **changes: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for an option of a run; its help ends with its default."""
    if option.type is bool:
        declared: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        shown = "on" if option.default else ""
    else:
        declared = {"type": option.type, "choices": option.choices or None}
        declared["metavar"] = None if option.choices else option.metavar
        shown = changes.get("default", option.default)
    declared |= {"default": option.default, "help": option.help} | changes
    if shown not in (None, ""):
        declared["help"] += f" (default: {shown})"
    return declared | {"help": declared["help"].replace("%", "%%")}


@_command("doctor", "machine:run_doctor", "describe this machine and what will slow training down")
def _doctor(parser: ArgumentParser) -> None:
    """Describe this machine, find what will slow training down, and say what to do about it."""
    parser.add_argument("--data", metavar="PATH", help="also time the disk of this file or folder")
    parser.add_argument("--fast", action="store_true", help="do not measure bandwidths")


@_command("profile", "machine:run_profile", "measure every unit of a model on this device", "MODEL [-o FILE]")
def _profile(parser: ArgumentParser) -> None:
    """Measure the time and bytes of every unit of a model, and the speed of the device and its links."""
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--samples", default="8,16", metavar="N,N", help="microbatch sizes (default: 8,16)")
    _add_option(
        parser, "--precision", metavar="NAMES", help="fp64, fp32, ieee, tf32, bf16 or fp16, or several: fp32,bf16"
    )
    _add_option(parser, "--device")
    _add_option(parser, "--threads")
    parser.add_argument(
        "--together", type=int, default=1, metavar="N", help="processes at once, as ranks would run (default: 1)"
    )
    _add_option(parser, "--image")
    _add_option(parser, "--classes")
    parser.add_argument("--pipedream", metavar="FILE", help="import PipeDream's graph.txt, measured at --samples")


@_command(*("plan", "plan:run", "find the fastest plan of a model on a cluster"), "MODEL --cluster NAME|FILE --batch N")
def _plan(parser: ArgumentParser) -> None:
    """Search for the fastest plan, compare it with data parallelism, and write it for train --plan."""
    _add_setting(parser)
    _add_option(parser, "--batch", required=True, default=None)
    parser.add_argument(
        "--mode", action="append", choices=("sync", "stale", "pipedream"), help="try only this mode; may be repeated"
    )
    _add_option(parser, "--microbatches", help="microbatches per batch (default: try several)")
    _add_option(parser, "--staleness", help="most updates that a stage may lag")
    _add_option(parser, "--lr", default=None, help="warn if this learning rate is unstable at the lag")
    _add_option(parser, "--momentum", help="with --lr: SGD momentum")
    parser.add_argument("--nesterov", action="store_true", help="with --lr: Nesterov momentum")
    parser.add_argument("--predict", action="store_true", help="with --lr: extrapolated weights, as train --predict")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan for train --plan")
    parser.add_argument("--explain", metavar="UNIT", help="show what a unit costs and where the plan puts it")


@_command(
    "simulate", "simulate:run", "predict the speed and memory of a plan on a cluster", "MODEL --cluster NAME|FILE"
)
def _simulate(parser: ArgumentParser) -> None:
    """Predict the speed, memory and idle time of a plan, on hardware that you need not have."""
    _add_setting(parser)
    _add_option(parser, "--mode", default=None, help="how far weights may lag (default: stale; dp for one stage)")
    _add_option(
        parser, "--placement", default=None, help="devices of each stage: 0:0-6.0:7 (default: one stage on all)"
    )
    _add_option(parser, "--shares")
    _add_option(parser, "--cut")
    _add_option(parser, "--batch", default=None)
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples per microbatch, instead of --batch")
    _add_option(parser, "--microbatches", help="microbatches per batch")
    _add_option(parser, "--staleness")
    _add_option(parser, "--plan", help="a plan file, instead of the options above")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline for Perfetto or chrome://tracing")
    parser.add_argument("--report", metavar="FILE", help="write an .html page with the timeline and the memory")


@_command(
    "value", "plan:run_value", "compare clusters by images per second, dollar and watt", "MODEL --cluster A --cluster B"
)
def _value(parser: ArgumentParser) -> None:
    """Compare clusters by the best plan on each: its speed, its price and its power."""
    _add_setting(parser, several=True)
    _add_option(parser, "--batch", default=256)
    parser.add_argument(
        "--price", action="append", default=[], metavar="DEVICE=USD", help="price of a device; may be repeated"
    )


def _add_setting(parser: ArgumentParser, *, several: bool = False) -> None:
    """The options that say what is planned: the model, the cluster, the precision, the software and the data."""
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument(
        "--cluster",
        action="append" if several else "store",
        metavar="NAME|FILE",
        help=f"a cluster of the catalog, or a cluster file{'; may be repeated' if several else ''}",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="use only the first N devices of the cluster")
    _add_option(parser, "--precision", choices=_PRECISIONS, metavar="NAME")
    parser.add_argument(
        "--software",
        default="stagewright",
        metavar="NAME",
        help="whose efficiency to assume: stagewright, pytorch, oneflow or pipedream (default: stagewright)",
    )
    parser.add_argument(
        "--data", choices=("synthetic", "imagenet"), default="synthetic", help="data to load (default: synthetic)"
    )
    _add_option(parser, "--optimizer", help="optimizer, for its memory")
    _add_option(parser, "--image")
    _add_option(parser, "--classes")
    parser.add_argument("--profile", metavar="FILE", help="measured units, instead of the catalog's figures")


@_command("schedule", "schedule:run", "draw what each rank does when")
def _schedule(parser: ArgumentParser) -> None:
    """Draw the programs of a plan: one row per rank, time from left to right."""
    _add_options(parser, "plan")
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="batches to show (default: 2)")
    parser.add_argument("--forward", metavar="TIMES", help="time of a forward by stage: 1,1 (default: 1 each)")
    parser.add_argument("--backward", metavar="TIMES", help="time of a backward by stage: 2,2 (default: 1 each)")
    parser.add_argument("--transfer", type=float, default=0.0, metavar="TIME", help="time of a message (default: 0)")
    parser.add_argument("--programs", action="store_true", help="also print the actions of every rank as text")


@_command("train", "train:run", "train a model over stages")
def _train(parser: ArgumentParser) -> None:
    """Train a model over stages. Every option is also a key of a TOML file for --config."""
    _add_options(parser)


@_command("watch", "runs:run_watch", "follow a run in the terminal, or in a browser with --serve", "[RUN]")
def _watch(parser: ArgumentParser) -> None:
    """Follow a run until it ends: as a live screen in a terminal, as lines anywhere else."""
    parser.add_argument("folder", metavar="RUN", nargs="?", help="a run folder (default: the newest in runs/)")
    parser.add_argument("--once", action="store_true", help="show the current state and exit")
    parser.add_argument(
        "--serve", metavar="PORT", type=int, nargs="?", const=0, help="serve the report to browsers on this machine"
    )


@_command("report", "runs:run_report", "write the report of a run, or one that compares several", "RUN... [-o FILE]")
def _report(parser: ArgumentParser) -> None:
    """Write report.html (one file, works offline) and report.md of a run, or of several side by side."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the .html file (default: in the run folder; for several, in .)"
    )


@_command("compare", "compare:run_compare", "say whether two runs or two benches differ in speed", "A B")
def _compare(parser: ArgumentParser) -> None:
    """Compare the throughput of two runs or two benches with confidence intervals, and say whether they differ, or
    why they can't be compared."""
    parser.add_argument("first", metavar="A", help="a run folder or a bench folder")
    parser.add_argument("second", metavar="B", help="another folder of the same kind")


@_command("checkpoint list", "checkpoint:run_list", "list the checkpoints of a run", "RUN")
def _checkpoint_list(parser: ArgumentParser) -> None:
    """List the checkpoints of a run."""
    parser.add_argument("path", metavar="RUN", help=_RUN)


@_command("checkpoint show", "checkpoint:run_show", "show what a checkpoint holds", "RUN")
def _checkpoint_show(parser: ArgumentParser) -> None:
    """Show what a checkpoint holds."""
    parser.add_argument("path", metavar="RUN", help=_RUN)


@_command("checkpoint verify", "checkpoint:run_verify", "compare every file of a checkpoint with its hash", "RUN")
def _checkpoint_verify(parser: ArgumentParser) -> None:
    """Compare every file of a checkpoint with its hash."""
    parser.add_argument("path", metavar="RUN", help=_RUN)


@_command("checkpoint export", "checkpoint:run_export", "write the weights as one safetensors file", "RUN FILE")
def _checkpoint_export(parser: ArgumentParser) -> None:
    """Write the weights as one safetensors file that the plain model loads."""
    parser.add_argument("path", metavar="RUN", help="a run folder (its newest checkpoint), or one checkpoint")
    parser.add_argument("target", metavar="FILE", help="the .safetensors file to write")


@_command("data inspect", "data:run_inspect", "count classes, sizes and bad records; draw samples", "PATH")
def _data_inspect(parser: ArgumentParser) -> None:
    """Count the records, classes, sizes and bad records of a data set, and draw a sheet of samples."""
    parser.add_argument("path", metavar="PATH", help=_DATA)
    _add_option(parser, "--class-names")
    parser.add_argument(
        "--most", type=int, default=10_000, metavar="N", help="most records to decode (0: all) (default: 10000)"
    )
    parser.add_argument(
        "--sheet", default="contact-sheet.png", metavar="FILE", help="picture to write (default: contact-sheet.png)"
    )
    parser.add_argument(
        "--image", type=int, default=0, metavar="N", help="side of a sample (default: 224, or 32 for small images)"
    )
    _add_option(parser, "--crop")
    _add_option(parser, "--jitter")
    _add_option(parser, "--cutout", help="side of a black square in each sample")
    _add_option(parser, "--seed", help="seed of the crops")


@_command("data index", "data:run_index", "find every record and store where it is", "PATH")
def _data_index(parser: ArgumentParser) -> None:
    """Find every record of a data set, and store where it is, so that training starts at once."""
    parser.add_argument("path", metavar="PATH", help=_DATA)
    _add_option(parser, "--class-names")


@_command("data convert", "data:run_convert", "write a data set in another format", "SRC DST")
def _data_convert(parser: ArgumentParser) -> None:
    """Write a data set in another format."""
    parser.add_argument("source", metavar="SRC", help=_DATA)
    parser.add_argument("target", metavar="DST", help="folder:DIR, tar:DIR or ofrecord:DIR; DIR is new or empty")
    _add_option(parser, "--class-names")
    _add_option(parser, "--limit", help="convert only this many records, evenly spread")
    parser.add_argument(
        "--per-part", type=int, default=5000, metavar="N", help="records per part or shard (default: 5000)"
    )


@_command("data bench", "data:run_bench", "compare this loader with stock ones")
def _data_bench(parser: ArgumentParser) -> None:
    """Measure the images per second of this loader and of stock ones, in turns."""
    parser.add_argument("--repeats", type=int, metavar="N", help="repeats per loader (default: 30)")
    parser.add_argument("--images", type=int, metavar="N", help="images per repeat (default: 64)")
    parser.add_argument("--threads", type=int, metavar="N", help="most loader threads (default: 2)")


@_command("cluster list", "cluster:run_list", "list the clusters, devices and links of the catalog")
def _cluster_list(parser: ArgumentParser) -> None:
    """List what --cluster and cluster files can name: the clusters, devices and links of the catalog."""


@_command(
    "cluster import",
    "cluster:run_import",
    "make a cluster file of a machine",
    "--topo FILE --smi FILE [options]\n       stagewright cluster import --here",
)
def _cluster_import(parser: ArgumentParser) -> None:
    """Make a cluster file from the output of nvidia-smi topo -m and nvidia-smi, or of this machine."""
    parser.add_argument("--topo", metavar="FILE", help="output of nvidia-smi topo -m (- for standard input)")
    parser.add_argument("--smi", metavar="FILE", help="output of nvidia-smi; may be the same file")
    parser.add_argument("--here", action="store_true", help="describe this machine instead, through its driver")
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument("--name", metavar="NAME", help="name of the cluster (default: the file's)")
    parser.add_argument("--device", metavar="NAME", help="the catalog's name of the GPUs (default: by theirs)")
    parser.add_argument("--gpus", metavar="0-3,6", help="use only these GPUs")
    parser.add_argument("--pcie", type=int, metavar="N", help="PCIe generation (default: the GPU's)")
    parser.add_argument("--cores", type=int, metavar="N", help="CPU cores that decode images")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="number of such machines (default: 1)")
    parser.add_argument("--network", metavar="LINK", help="link between machines: net-1g, net-10g, ... net-400g")


@_command("bench", "bench:run", "measure configurations, compare with stock PyTorch", "SUITE|FILE.toml")
def _bench(parser: ArgumentParser) -> None:
    """Measure a suite of configurations, compare with stock PyTorch, or time parts."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _SUITES
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
    _add_option(parser, "--runs")
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


@_command("demo", "demo:run", "train a small VGG in two ways and compare them", has_options=False)
def _demo(parser: ArgumentParser) -> None:
    """Train a small VGG over 2+1 stale stages and on one process, and write a page that compares them."""


_COMMANDS = (
    *(_doctor, _profile, _plan, _simulate, _train, _watch, _report),
    *(_checkpoint_list, _checkpoint_show, _checkpoint_verify, _checkpoint_export),
    *(_schedule, _data_inspect, _data_index, _data_convert, _data_bench),
    *(_bench, _compare, _value, _cluster_list, _cluster_import, _demo),
)
