"""Every command: its options, its arguments and the function that runs it, without importing any of them.

`command` says what a command is; its options are in `command/options`. Bounds and rules hold for every command, before
it runs.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from stagewright import __version__
from stagewright.cli.command.command import MODEL, RUN, Argument, Command, Parser
from stagewright.cli.command.options import take
from stagewright.cli.command.screen import first_screen, group_screen
from stagewright.config.commands import CONFIGURED, FUNCTIONS, take_sections

_GROUPS = {  # the help and the description of commands that have actions
    "runs": (
        "list runs; name, tag and delete them",
        "List the runs in a folder, newest first; name, tag and delete them. Without an action: list.",
    ),
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
AREAS = {  # of the first screen, with the commands of each
    "train": "train run demo",
    "plan": "plan simulate value schedule inspect",
    "look at runs": "runs watch report compare checkpoint",
    "measure": "doctor selftest profile bench",
    "set up": "data cluster completion",
}
_USAGE = "stagewright COMMAND [options]"
_EXAMPLES = (
    "demo",
    "train --model resnet18 --data folder:pictures --epochs 10",
    "plan resnet50 --cluster titan-v-8 --batch 256",
    "watch last",
    "report last",
    "runs --sort speed --filter model=resnet18",
)
_SUITES = """suites of configurations, measured in turns; all leave a folder with reports:
  quick       small VGG on CPU, two ranks, under two minutes
  stages      dp, sync, stale and pipedream: VGG-16, AlexNet, ResNet-50
  scaling     ResNet-50 on 1, 2, 4, ... ranks
  homelab     ResNet-50 on all GPUs of one machine, fp16 and fp32
  FILE.toml   your own; for examples see stagewright/bench/suites"""
_IN_A_CHECKOUT = {
    *("checkpoint", "data", "engine", "gpu", "growth", "learning", "models", "monitor", "overhead", "own", "peers"),
    *("planner", "published", "shared", "startup", "transformers"),
}


def moved_bench(suite: str) -> str | None:
    """Where a benchmark of Stagewright itself is; None for what this package measures."""
    if suite not in _IN_A_CHECKOUT:
        return None
    return f"bench {suite} measures Stagewright itself: run python -m benchmarks {suite} in a checkout"


def make_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(prog="stagewright", usage=_USAGE)
    parser.screen = lambda: first_screen(_USAGE, _areas(), _EXAMPLES)
    parser.add_argument("--version", action="version", version=f"stagewright {__version__}", help=argparse.SUPPRESS)
    parser.flags += ["--version"]
    groups: dict[str, Any] = {}
    groups[""] = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog=parser.prog)
    for command in COMMANDS:
        name = command.name.rpartition(" ")[0]
        if name not in groups:
            help, description = _GROUPS[name]
            parser.parsers[name] = group = groups[""].add_parser(
                name, help=help, usage=f"stagewright {name} ACTION [options]", description=description
            )
            group.screen = partial(group_screen, group.usage, description, _actions(name))
            groups[name] = group.add_subparsers(title="actions", required=True, metavar="ACTION", prog=group.prog)
        command.add_to(groups[name], parser.parsers[name] if name else parser)
    return parser


def _actions(group: str) -> dict[str, str]:
    """The help of every action of a group."""
    return {
        name.removeprefix(group).strip(): command.help
        for command in COMMANDS
        if (name := command.name).startswith(f"{group} ")
    }


def _areas() -> dict[str, dict[str, str]]:
    """The help of every command, by area."""
    helps = {command.name: command.help for command in COMMANDS} | {name: help for name, (help, _) in _GROUPS.items()}
    return {area: {name: helps[name] for name in names.split()} for area, names in AREAS.items()}


_FOLDER = take("--runs")
_MODEL = Argument(
    "model", "MODEL", "a zoo name, timm:NAME, torchvision:NAME, hf:CONFIG, or package.module:factory", kind=MODEL
)
_NAMED = "a run: its name or id in runs/, the beginning of one, 'last', or a path"
_RUN = Argument("path", "RUN", "a run by name, id or path; RUN/best; or one of its checkpoints", kind=RUN)
_DATA = "folder:DIR, tar:GLOB, ofrecord:DIR, or a path"
_SHEET_SIDE = {"least": 0, "most": 2048}  # pixels of a sample; 0: the default
_RECORDS = Argument("path", "PATH", _DATA)

COMMANDS = (
    Command(
        *("doctor", "machine:run_doctor", "inspect this machine for what slows training down"),
        "Describe this machine, find what slows training down, and say what to do about it.",
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
        FUNCTIONS["profile"],
    ),
    Command(
        *("inspect", "machine:run_inspect", "show how a model can be cut, and prove a cut"),
        "Show the units of a model, how it can be cut and where it can't, and prove a cut into stages.",
        "MODEL",
        (_MODEL,),
        FUNCTIONS["inspect"],
    ),
    Command(
        *("plan", "plan:run", "find the fastest plan of a model, here or on a cluster"),
        "Search for the fastest plan, compare it with data parallelism, and write it for train --plan. Without "
        "--cluster and --profile it answers for this machine, by a short profile that is measured once.",
        "MODEL [--cluster NAME|FILE] [--batch N]",
        (_MODEL,),
        FUNCTIONS["plan"],
        first="--cluster --devices --batch --precision --mode --profile --output --report --try --explain --json",
        examples=(
            "plan resnet50",
            "plan vgg16 --cluster rtx-4090-4 --batch 256 -o plan.json",
            "plan resnet50 --try 3",
        ),
    ),
    Command(
        *("simulate", "simulate:run", "predict the speed and memory of a plan on a cluster"),
        "Predict the speed, memory and idle time of a plan, on hardware that you need not have.",
        "MODEL --cluster NAME|FILE",
        (_MODEL,),
        FUNCTIONS["simulate"],
        first="--cluster --devices --batch --precision --mode --placement --cut --microbatches --plan --report --json",
        examples=(
            "simulate vgg16 --cluster titan-v-8 --batch 256",
            "simulate vgg16 --cluster titan-v-8 --placement 0:0-6.0:7",
        ),
    ),
    Command(
        *("train", "train:run", "train a model by the fastest plan for this machine, or by yours"),
        "Train a model by the fastest plan for this machine, or by yours. Options are also keys of --config files.",
        options=FUNCTIONS["train"],
        first="--model --data --val --epochs --steps --batch --lr --device --precision --placement --mode --plan "
        "--checkpoint-every --resume --config --runs --explain",
        examples=(
            "train --model resnet18 --data folder:pictures --epochs 10",
            "train --model vgg16 --placement 0:0-2.0:3 --mode stale --batch 256",
            "train --plan plan.json --data folder:pictures",
            "train --resume last --epochs 20",
        ),
    ),
    Command(
        *("run", "train:run_script", "run a script whose stagewright.Engine trains over stages"),
        usage="SCRIPT [-- ARGUMENT ...]",
        arguments=(Argument("script", "SCRIPT", "a Python file; its own arguments follow --"),),
        options=(*CONFIGURED, *take_sections("plan", "checkpoint", "run", "nodes")),
        has_json=False,
        first="--placement --mode --batch --microbatches --plan --device --precision --checkpoint-every --resume "
        "--config --runs",
        examples=("run train.py --placement 0:0.0:1 --batch 64", "run train.py --device cuda -- --lr 0.1"),
    ),
    Command(
        *("watch", "runs:run_watch", "follow a run in the terminal, or in a browser with --serve"),
        "Follow a run until it ends: as a live screen in a terminal, as lines anywhere else.",
        "[RUN]",
        (Argument("folder", "RUN", f"{_NAMED} (default: the newest; of --serve: all)", "?", RUN),),
        (*take("--once"), *take("--serve", bare=0)),
        examples=("watch", "watch baseline --once", "watch --serve 8000"),
    ),
    Command(
        *("report", "runs:run_report", "write the report of a run, or one that compares several"),
        "Write report.html (one file, works offline) and report.md of a run, or of several side by side.",
        "RUN... [-o FILE]",
        (Argument("runs", "RUN", _NAMED, "+", RUN),),
        take("--output", short="-o", help="the .html file (default: in the run folder; for several, in .)"),
        examples=("report last", "report baseline wider -o both.html"),
    ),
    Command(
        *("runs list", "runs:run_list", "list runs, newest first, with their disk use"),
        options=(
            *take("--sort", choices=("started", "name", "model", "state", "speed", "metric", "size"), metavar=""),
            *take("--filter", is_repeated=True, default=None),
            *_FOLDER,
        ),
        examples=("runs", "runs --sort size", "runs --filter model=vgg16 --filter state=finished"),
    ),
    Command(
        *("runs name", "runs:run_name", "give a run a name"),
        "Give a run a name that commands take in its place; '' takes it away. Its folder keeps its id.",
        "RUN NAME",
        (Argument("run", "RUN", _NAMED, kind=RUN), Argument("name", "NAME", "1 to 64 of a-z, A-Z, 0-9, . _ -")),
        _FOLDER,
        examples=("runs name last baseline", "runs name baseline ''"),
    ),
    Command(
        *("runs tag", "runs:run_tag", "add tags to a run, or remove some"),
        usage="RUN [+TAG ...] [-TAG ...]",
        arguments=(Argument("run", "RUN", _NAMED, kind=RUN),),
        options=_FOLDER,
        examples=("runs tag last +paper +vgg", "runs tag baseline -paper"),
    ),
    Command(
        *("runs delete", "runs:run_delete", "delete runs and all that is in their folders"),
        "Delete runs and all that is in their folders, checkpoints too. It asks first, and refuses runs in training.",
        "RUN...",
        (Argument("run", "RUN", _NAMED, "+", RUN),),
        (*take("--yes"), *_FOLDER),
        examples=("runs delete 20260314-0926", "runs delete baseline wider --yes"),
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
            Argument("path", "RUN", "a run (its newest checkpoint), RUN/best, or one checkpoint", kind=RUN),
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
            *CONFIGURED,
            *take_sections("plan"),
            *take("--batches --forward --backward --transfer --programs"),
        ),
        first="--placement --mode --batch --microbatches --batches --forward --backward --programs --config",
        examples=(
            "schedule --placement 0:0.0:1 --mode sync",
            "schedule --placement 0:0-2.0:3 --mode stale --programs",
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
            *take("--per-part --side --raw --tokenizer --val-fraction"),
        ),
    ),
    Command(
        *("data bench", "bench:run_data", "measure how fast this loader is here"),
        "Measure the images per second of one decoding thread, and of this loader by threads and processes.",
        options=(
            *take("--repeats", help="repeats per way to decode (default: 15)"),
            *take("--images"),
            *take("--threads", default=None, help="most loader threads, and processes (default: 2)"),
        ),
    ),
    Command(
        *("bench", "bench:run", "measure configurations in turns"),
        "Measure a suite of configurations in turns, and say which is faster.",
        "SUITE|FILE.toml",
        (Argument("suite", "SUITE", "what to measure; see below"),),
        (
            *take("--repeats"),
            *take("--steps", default=0, bounds={"least": 0}, help="batches per repeat (default: the suite's)"),
            *take("--only"),
            *take("--data", default=None, help="real data for suites that take it: folder:DIR, tar:GLOB, ..."),
            *take("--set", is_repeated=True, help="an option for every configuration: run.seed=3"),
            *take("--simulate"),
            *take("--cluster", help="predict everything for this cluster, with --simulate"),
            *take("--row --anonymise --runs"),
        ),
        _SUITES,
        first="--repeats --steps --only --data --set --simulate --cluster --runs --json",
        examples=("bench quick", "bench stages --repeats 5", "bench stages --simulate --cluster titan-v-8"),
    ),
    Command(
        *("compare", "compare:run_compare", "say whether two runs or two benches differ in speed"),
        "Compare the throughput of two runs or two benches with confidence intervals, and say whether they differ, or "
        "why they can't be compared.",
        "A B",
        (
            Argument("first", "A", "a run by name, id or path, or a bench folder", kind=RUN),
            Argument("second", "B", "another one of the same kind", kind=RUN),
        ),
    ),
    Command(
        *("value", "value:run", "compare clusters by images per second, dollar and watt"),
        "Compare clusters by the best plan on each: its speed, its price and its power.",
        "MODEL --cluster A --cluster B",
        (_MODEL,),
        FUNCTIONS["value"],
        first="--cluster --devices --precision --batch --price --kwh --json",
        examples=(
            "value resnet50 --cluster rtx-4090-4 --cluster titan-v-8",
            "value vgg16 --cluster rtx-4090-4 --kwh 0.3",
        ),
    ),
    Command(
        *("cluster list", "cluster:run_list", "list the clusters, devices and links of the catalog"),
        "List what --cluster and cluster files can name: the clusters, devices and links of the catalog.",
    ),
    Command(
        *("cluster import", "cluster:run_import", "make a cluster file of a machine"),
        "Make a cluster file from the output of nvidia-smi topo -m and nvidia-smi -q -x, or of this machine.",
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
        *("completion", "completion:run", "print a script that completes commands in a shell"),
        "Print a script by which bash, zsh or fish complete commands, options, their choices, models and runs.",
        "SHELL",
        (Argument("shell", "SHELL", "bash, zsh or fish", choices=("bash", "zsh", "fish")),),
        has_json=False,
        examples=(
            "completion bash > ~/.stagewright.bash  # source it in ~/.bashrc",
            "completion zsh > ~/.zfunc/_stagewright  # a folder of $fpath",
            "completion fish > ~/.config/fish/completions/stagewright.fish",
        ),
    ),
    Command(
        *("demo", "bench:run_demo", "train two stages beside stock DDP over a slow network"),
        "Train a small VGG as two stages and by stock DistributedDataParallel, in turns, on two ranks with 1 Gb/s "
        "between them, and write a page that says which is faster and why.",
        options=take("--loopback --runs"),
    ),
)
