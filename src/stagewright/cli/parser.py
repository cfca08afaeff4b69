"""Every command: its options, its arguments and the function that runs it, without importing any of them.

A `Command` names the function that runs it, such as `plan:run`: `main` imports it once the command line is parsed. That
is the one lazy import of the package: `stagewright --help` starts without torch, numpy or pydantic. The options are in
`options`; bounds and rules hold for every command, before it runs.
"""

from __future__ import annotations

import argparse
import difflib
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from stagewright import __version__
from stagewright.cli.options import Taken, take, take_sections
from stagewright.config.rules import check_rules
from stagewright.config.sections import RENAMED
from stagewright.errors import UserError, did_you_mean, printable

USER_ERROR = 2  # the exit code of every error that a user can fix
_MOST_SHOWN = 800  # characters of an error
_RENAMED_FLAGS = {f"--{old.partition('.')[2]}": f"--{new.partition('.')[2]}" for old, new in RENAMED.items()}
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
_SUITES = """suites of configurations, measured in turns; all leave a folder with reports:
  quick       small VGG on CPU, two ranks, under two minutes
  stages      dp, sync, stale and pipedream: VGG-16, AlexNet, ResNet-50
  scaling     ResNet-50 on 1, 2, 4, ... ranks
  homelab     ResNet-50 on all GPUs of one machine, fp16 and fp32
  FILE.toml   your own; for examples see stagewright/bench/suites
accuracy at each lag, over several seeds:
  learning
models of libraries, cut and compared with plain PyTorch:
  models
comparisons with stock PyTorch:
  overhead, peers, gpu, transformers, shared
parts of Stagewright:
  published, planner, own, checkpoint, monitor, data"""


def one_line(message: str) -> str:
    """A message as one readable line, without control characters that a terminal would obey."""
    line = " ".join(message.split())
    if len(line) > _MOST_SHOWN:
        line = f"{line[: _MOST_SHOWN // 2]} ... {line[-_MOST_SHOWN // 2 :]}"
    return printable(line)


class _Parser(ArgumentParser):
    """Reports errors in one line; takes options only in full, never abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"allow_abbrev": False}))
        self.set_defaults(parser=self)  # the parser of the command, which `main` asks about unknown options
        self.flags = ["--help"]

    def refuse_option(self, flag: str) -> NoReturn:
        """End with an error about an option that this command does not have; suggest the nearest that it has."""
        name = flag.partition("=")[0]
        if (new := _RENAMED_FLAGS.get(name)) in self.flags:
            self.error(f"option {name} is now {new}")
        near = difflib.get_close_matches(name, self.flags, 1)
        self.error(f"unknown option {name}" + (f", did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        help = "" if message.endswith("?") else f"; see {self.prog} --help"
        self.exit(USER_ERROR, f"{self.prog}: {one_line(message)}{help}\n")


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument of a command."""

    name: str
    metavar: str
    help: str
    count: str | None = None  # argparse's nargs


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or an action of a group of commands."""

    name: str  # of an action: with its group, such as "data index"
    run: str  # the function that runs it, as "module:function"
    help: str
    description: str = ""  # if empty: the help
    usage: str = ""  # what precedes the options in its usage
    arguments: tuple[Argument, ...] = ()
    options: tuple[Taken, ...] = ()
    epilog: str = ""
    has_json: bool = True

    @property
    def takes(self) -> tuple[Taken, ...]:
        """All options."""
        return (*self.options, *(take("--json") if self.has_json else ()))

    def add_to(self, commands: Any) -> None:
        """Add this command to what `add_subparsers` returned."""
        parser = commands.add_parser(
            self.name.split()[-1],
            help=self.help,
            usage=" ".join(filter(None, ("stagewright", self.name, self.usage, "[options]" * bool(self.takes)))),
            description=self.description or f"{self.help[0].upper()}{self.help[1:]}.",
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter if self.epilog else argparse.HelpFormatter,
        )
        parser.set_defaults(command=self)
        for argument in self.arguments:
            parser.add_argument(argument.name, metavar=argument.metavar, help=argument.help, nargs=argument.count)
        groups: dict[str, Any] = {"": parser}
        for option in self.takes:
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            option.add_to(groups[option.group])
            parser.flags += option.flags

    def complete(self, parsed: argparse.Namespace) -> None:
        """Fill in the defaults of options that were not given, and check bounds and rules.

        Options of a configuration stay as they were given: it has their defaults, and checks them with its files.
        """
        own = [option for option in self.takes if option.dest != option.key]
        given = {option.flag for option in own if option.dest in parsed}
        for option in own:
            if option.flag not in given:
                setattr(parsed, option.dest, [] if option.is_repeated else option.default)
            option.check(getattr(parsed, option.dest))
        check_rules({option.flag: getattr(parsed, option.dest) for option in own}, given, self.name)


def completed(name: str, given: Mapping[str, Any]) -> argparse.Namespace:
    """What a command would run with: its arguments, and options by their keywords, which are checked as it does.

    For `stagewright.plan` and the other functions of the API; None stands for an option that was not given.
    """
    command = next(command for command in COMMANDS if command.name == name)
    taken = {option.keyword: option for option in command.takes}
    arguments = {argument.name for argument in command.arguments}
    parsed = argparse.Namespace()
    for keyword, value in given.items():
        if keyword not in arguments and keyword not in taken:
            raise UserError(f"stagewright.{name} has no option '{keyword}'; {did_you_mean(keyword, taken)}")
        if value is not None:
            option = taken.get(keyword)
            setattr(parsed, option.dest if option else keyword, option.converted(value) if option else value)
    command.complete(parsed)
    return parsed


def make_parser() -> ArgumentParser:
    """The parser of the whole command line."""
    parser = _Parser(
        prog="stagewright",
        usage="stagewright COMMAND [options]",
        description="Plan, run and measure training over unequal pipeline stages.",
        epilog="stagewright COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"stagewright {__version__}")
    parser.flags += ["--version"]
    groups: dict[str, Any] = {}
    groups[""] = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog=parser.prog)
    for command in COMMANDS:
        name = command.name.rpartition(" ")[0]
        if name not in groups:
            help, description = _GROUPS[name]
            group = groups[""].add_parser(
                name, help=help, usage=f"stagewright {name} ACTION [options]", description=description
            )
            groups[name] = group.add_subparsers(title="actions", required=True, metavar="ACTION", prog=group.prog)
        command.add_to(groups[name])
    return parser


def _setting(**of_cluster: Any) -> tuple[Taken, ...]:
    """The options that say what is planned: the cluster, the precision, the software and the data."""
    return (
        *take("--cluster", **of_cluster),
        *take("--devices"),
        *take("--precision", choices=("fp64", "fp32", "ieee", "tf32", "bf16", "fp16"), metavar="NAME"),
        *take("--software"),
        *take("--data", choices=("synthetic", "imagenet"), metavar="", help="data to load"),
        *take("--optimizer", help="optimizer, for its memory"),
        *take("--ema", help="count averaged weights too"),
        *take("--image --classes --freeze"),
        *take("--profile", help="measured units, instead of the catalog's figures"),
    )


_CONFIGURED = (*take("--config"), *take("--set", is_repeated=True))
_MODEL = Argument("model", "MODEL", "a zoo name, timm:NAME, torchvision:NAME, hf:CONFIG, or package.module:factory")
_RUN = Argument("path", "RUN", "a run folder, or one of its checkpoints")
_DATA = "folder:DIR, tar:GLOB, ofrecord:DIR, or a path"
_SHEET_SIDE = {"least": 0, "most": 2048}  # pixels of a sample; 0: the default
_RECORDS = Argument("path", "PATH", _DATA)

COMMANDS = (
    Command(
        *("doctor", "machine:run_doctor", "describe this machine and what will slow training down"),
        "Describe this machine, find what will slow training down, and say what to do about it.",
        options=(
            *take("--data", metavar="PATH", default=None, help="also time the disk of this file or folder"),
            *take("--fast"),
        ),
    ),
    Command(
        *("selftest", "machine:run_selftest", "train on this machine's devices, and compare with plain PyTorch"),
        "Check in a few minutes that this machine's devices compute and reach each other as they should: links, small "
        "models against plain PyTorch, rates beside predictions, and a row of them to send.",
        options=(
            *take("--share-gpu", help="put two ranks on this machine's only GPU"),
            *take("--minutes", default=5.0, help="begin no further check after so many minutes"),
            *take("--row", default="selftest-row.toml", help="append the measured rate to this file, to send"),
        ),
    ),
    Command(
        *("profile", "machine:run_profile", "measure every unit of a model on this device"),
        "Measure the time and bytes of every unit of a model, and the speed of the device and its links.",
        "MODEL [-o FILE]",
        (_MODEL,),
        (
            *take("--output", short="-o", help="write the profile as JSON"),
            *take("--samples", type=str, default="8,16", bounds={}, metavar="N,N", help="microbatch sizes"),
            *take("--precision", metavar="NAMES", help="fp64, fp32, ieee, tf32, bf16 or fp16, or several: fp32,bf16"),
            *take("--device --threads --together --image --classes --freeze --pipedream"),
        ),
    ),
    Command(
        *("inspect", "machine:run_inspect", "show how a model can be cut, and prove a cut"),
        "Show the units of a model, how it can be cut and where it can't, and prove a cut into stages.",
        "MODEL",
        (_MODEL,),
        (
            *take("--stages"),
            *take("--cut", default=None, help="prove this cut: the first unit or module of each later stage"),
            *take("--data", default=None, metavar="SOURCE", help="take samples from this data"),
            *take("--inputs --image --classes --init --freeze --seed"),
        ),
    ),
    Command(
        *("plan", "plan:run", "find the fastest plan of a model on a cluster"),
        "Search for the fastest plan, compare it with data parallelism, and write it for train --plan. Without "
        "--cluster and --profile it answers for this machine, by a short profile that is measured once.",
        "MODEL [--cluster NAME|FILE] [--batch N]",
        (_MODEL,),
        (
            *_setting(),
            *take("--batch", default=None, help="samples per update (default: what suits the devices)"),
            *take(
                "--mode",
                is_repeated=True,
                choices=("sync", "stale", "pipedream"),
                default=None,
                help="try only this mode; may be repeated",
            ),
            *take("--microbatches", help="microbatches per batch (default: try several)"),
            *take("--staleness", help="most updates that a stage may lag"),
            *take("--lr", default=None, help="warn if this learning rate is unstable at the lag"),
            *take("--momentum", help="with --lr: SGD momentum"),
            *take("--nesterov", help="with --lr: Nesterov momentum"),
            *take("--predict", help="with --lr: extrapolated weights, as train --predict"),
            *take("--output", short="-o", help="write the plan for train --plan"),
            *take("--report", help="write an .html page with candidates, timeline, memory and links"),
            *take("--try", dest="try_"),
            *take("--minutes"),
            *take("--explain"),
        ),
    ),
    Command(
        *("simulate", "simulate:run", "predict the speed and memory of a plan on a cluster"),
        "Predict the speed, memory and idle time of a plan, on hardware that you need not have.",
        "MODEL --cluster NAME|FILE",
        (_MODEL,),
        (
            *_setting(),
            *take("--mode", default=None, help="how far weights may lag (default: stale; dp for one stage)"),
            *take("--placement", default=None, help="devices of each stage: 0:0-6.0:7 (default: one stage on all)"),
            *take("--shares --cut"),
            *take("--batch", default=None),
            *take("--microbatch"),
            *take("--microbatches", help="microbatches per batch"),
            *take("--staleness"),
            *take("--plan", help="a plan file, instead of the options above"),
            *take("--trace --report"),
        ),
    ),
    Command(
        *("train", "train:run", "train a model over stages"),
        "Train a model over stages. Every option is also a key of a TOML file for --config.",
        options=(*_CONFIGURED, *take_sections()),
    ),
    Command(
        *("run", "train:run_script", "run a script whose stagewright.Engine trains over stages"),
        usage="SCRIPT [-- ARGUMENT ...]",
        arguments=(Argument("script", "SCRIPT", "a Python file; its own arguments follow --"),),
        options=(*_CONFIGURED, *take_sections("plan", "checkpoint", "run", "nodes")),
        has_json=False,
    ),
    Command(
        *("watch", "runs:run_watch", "follow a run in the terminal, or in a browser with --serve"),
        "Follow a run until it ends: as a live screen in a terminal, as lines anywhere else.",
        "[RUN]",
        (Argument("folder", "RUN", "a run folder (default: the newest in runs/)", "?"),),
        (*take("--once"), *take("--serve", bare=0)),
    ),
    Command(
        *("report", "runs:run_report", "write the report of a run, or one that compares several"),
        "Write report.html (one file, works offline) and report.md of a run, or of several side by side.",
        "RUN... [-o FILE]",
        (Argument("runs", "RUN", "run folders", "+"),),
        take("--output", short="-o", help="the .html file (default: in the run folder; for several, in .)"),
    ),
    Command(
        *("checkpoint list", "checkpoint:run_list", "list the checkpoints of a run"), usage="RUN", arguments=(_RUN,)
    ),
    Command(
        *("checkpoint show", "checkpoint:run_show", "show what a checkpoint holds"), usage="RUN", arguments=(_RUN,)
    ),
    Command(
        *("checkpoint verify", "checkpoint:run_verify", "compare every file of a checkpoint with its hash"),
        usage="RUN",
        arguments=(_RUN,),
    ),
    Command(
        *("checkpoint export", "checkpoint:run_export", "write the weights as one safetensors file"),
        "Write the weights as one safetensors file that the plain model loads.",
        "RUN FILE",
        (
            Argument("path", "RUN", "a run folder (its newest checkpoint), RUN/best, or one checkpoint"),
            Argument("target", "FILE", "the .safetensors file to write"),
        ),
        (
            *take("--weights"),
            *take("--best", type=bool, default=False, help="its best checkpoint, not its newest (as RUN/best)"),
        ),
    ),
    Command(
        *("schedule", "schedule:run", "draw what each rank does when"),
        "Draw the programs of a plan: one row per rank, time from left to right.",
        options=(
            *_CONFIGURED,
            *take_sections("plan"),
            *take("--batches --forward --backward --transfer --programs"),
        ),
    ),
    Command(
        *("data inspect", "data:run_inspect", "count classes, sizes and bad records; draw samples"),
        "Count the records, classes, sizes and bad records of a data set, and draw a sheet of samples.",
        "PATH",
        (_RECORDS,),
        (
            *take("--class-names --most --sheet"),
            *take(
                "--image", default=0, bounds=_SHEET_SIDE, help="side of a sample (default: 224, or 32 for small images)"
            ),
            *take("--crop --jitter"),
            *take("--cutout", help="side of a black square in each sample"),
            *take("--seed", help="seed of the crops"),
        ),
    ),
    Command(
        *("data index", "data:run_index", "find every record and store where it is"),
        "Find every record of a data set, and store where it is, so that training starts at once.",
        "PATH",
        (_RECORDS,),
        take("--class-names"),
    ),
    Command(
        *("data convert", "data:run_convert", "write a data set in another format"),
        usage="SRC DST",
        arguments=(
            Argument("source", "SRC", "folder:DIR, tar:GLOB, ofrecord:DIR, or a path; or text:FILE"),
            Argument("target", "DST", "folder:DIR, tar:DIR or ofrecord:DIR; DIR is new or empty; or tokens:FILE"),
        ),
        options=(
            *take("--class-names"),
            *take("--limit", help="convert only this many records, evenly spread"),
            *take("--per-part --tokenizer --val-fraction"),
        ),
    ),
    Command(
        *("data bench", "bench:run_data", "compare this loader with stock ones"),
        "Measure the images per second of this loader and of stock ones, in turns.",
        options=(
            *take("--repeats", help="repeats per loader (default: 30)"),
            *take("--images"),
            *take("--threads", default=None, help="most loader threads (default: 2)"),
        ),
    ),
    Command(
        *("bench", "bench:run", "measure configurations, compare with stock PyTorch"),
        "Measure a suite of configurations, compare with stock PyTorch, or time parts.",
        "SUITE|FILE.toml",
        (Argument("suite", "SUITE", "what to measure; see below"),),
        (
            *take("--repeats"),
            *take("--steps", default=0, bounds={"least": 0}, help="batches per repeat (default: the suite's)"),
            *take("--quick --only"),
            *take("--data", default=None, help="real data for suites that take it: folder:DIR, tar:GLOB, ..."),
            *take("--set", is_repeated=True, help="an option for every configuration: run.seed=3"),
            *take("--simulate"),
            *take("--cluster", help="predict everything for this cluster"),
            *take("--rows --given --row"),
            *take("--anonymise --runs"),
            *take("--val", group="learning", help="data to evaluate on"),
            *take("--study --seeds --jobs --target --real", group="learning"),
            *take("--reuse", group="learning", is_repeated=True),
        ),
        _SUITES,
    ),
    Command(
        *("compare", "compare:run_compare", "say whether two runs or two benches differ in speed"),
        "Compare the throughput of two runs or two benches with confidence intervals, and say whether they differ, or "
        "why they can't be compared.",
        "A B",
        (
            Argument("first", "A", "a run folder or a bench folder"),
            Argument("second", "B", "another folder of the same kind"),
        ),
    ),
    Command(
        *("value", "plan:run_value", "compare clusters by images per second, dollar and watt"),
        "Compare clusters by the best plan on each: its speed, its price and its power.",
        "MODEL --cluster A --cluster B",
        (_MODEL,),
        (
            *_setting(is_repeated=True, help="a cluster of the catalog, or a cluster file; may be repeated"),
            *take("--batch", default=256),
            *take("--price", is_repeated=True),
            *take("--kwh"),
        ),
    ),
    Command(
        *("cluster list", "cluster:run_list", "list the clusters, devices and links of the catalog"),
        "List what --cluster and cluster files can name: the clusters, devices and links of the catalog.",
    ),
    Command(
        *("cluster import", "cluster:run_import", "make a cluster file of a machine"),
        "Make a cluster file from the output of nvidia-smi topo -m and nvidia-smi, or of this machine.",
        "--topo FILE --smi FILE [options]\n       stagewright cluster import --here",
        options=(
            *take("--topo --smi --here"),
            *take("--output", short="-o", help="file to write (default: standard output)"),
            *take("--name"),
            *take(
                "--device",
                choices=(),
                metavar="NAME",
                default=None,
                help="the catalog's name of the GPUs (default: by theirs)",
            ),
            *take("--gpus --pcie --cores --count --network"),
        ),
    ),
    Command(
        *("demo", "bench:run_demo", "train two stages beside stock DDP over a slow network"),
        "Train a small VGG as two stages and by stock DistributedDataParallel, in turns, on two ranks with 1 Gb/s "
        "between them, and write a page that says which is faster and why.",
        options=take("--loopback --runs"),
    ),
)
