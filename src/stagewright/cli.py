"""The command line: options from the configuration, errors as one line, `--json` for machines."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from stagewright import __version__
from stagewright.config import Config, make_config, options, parse_assignment, read_toml

_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_ERROR, f"{self.prog}: {message}{'' if message.endswith('?') else f'; see {self.prog} --help'}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what a user did wrong becomes one line and exit code 2."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0], [option.flag for option in options()], 1)
        parser.error(f"unknown option {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
    try:
        parsed.run(parsed)
    except ValueError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; nothing is left running")
    except RuntimeError as error:
        from stagewright.runtime.job import RunFailed

        if not isinstance(error, RunFailed):
            raise
        _fail(str(error))
    except BrokenPipeError:
        sys.exit(_ERROR)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"stagewright: {' '.join(message.split())}\n")
    sys.exit(_ERROR)


def _parser() -> _Parser:
    parser = _Parser(prog="stagewright", description="Plan, run and measure training over unequal stages.")
    parser.add_argument("--version", action="version", version=f"stagewright {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    train = commands.add_parser(
        "train",
        help="train a model over stages",
        usage="stagewright train [options]",
        description="Train a model over stages.",
    )
    _add_options(train)
    train.set_defaults(run=_train)

    schedule = commands.add_parser(
        "schedule",
        help="print a plan's programs and draw them",
        usage="stagewright schedule [options]",
        description="Print the programs of a plan as text, and as a picture: one row a rank, time to the right.",
    )
    _add_options(schedule, "plan")
    schedule.add_argument("--batches", type=int, default=2, help="batches to show (default: 2)")
    schedule.add_argument("--forward", default=None, help="time of a forward by stage: 1,1 (default: 1 each)")
    schedule.add_argument("--backward", default=None, help="time of a backward by stage: 2,2 (default: 1 each)")
    schedule.add_argument("--transfer", type=float, default=0.0, help="time of a message (default: 0)")
    schedule.set_defaults(run=_schedule)

    bench = commands.add_parser("bench", help="measure, side by side with stock PyTorch")
    bench.add_argument("suite", choices=("overhead", "peers"), help="what to measure")
    bench.add_argument("--repeats", type=int, default=7, help="interleaved repeats of both sides (default: 7)")
    bench.add_argument("--steps", type=int, default=0, help="batches of one repeat (default: by the suite)")
    _add_json(bench)
    bench.set_defaults(run=_bench)
    return parser


def _add_options(parser: argparse.ArgumentParser, *sections: str) -> None:
    """The options of some sections of the configuration, or of all."""
    _add_json(parser)
    parser.add_argument("--config", metavar="FILE", help="options as TOML")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="one option: run.seed=3")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options(*sections):
        section = option.key.partition(".")[0]
        group = groups.setdefault(section, parser.add_argument_group(section) if section not in groups else None)  # type: ignore[arg-type]
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


def _config(parsed: argparse.Namespace) -> Config:
    """The file, then --set, then the flags: later ones win."""
    layers = [read_toml(parsed.config)] if parsed.config else []
    layers += [parse_assignment(text) for text in parsed.set]
    for key, value in vars(parsed).items():
        section, dot, name = key.partition(".")
        if dot:
            layers.append({section: {name: value}})
    return make_config(*layers)


def _train(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from stagewright import experiment
    from stagewright.runtime.launch import Interrupted

    console = Console(stderr=parsed.json)
    try:
        result = experiment.run(_config(parsed), console)
    except Interrupted as error:
        _fail(f"interrupted by {error}; all ranks are stopped")
    if parsed.json:
        print(json.dumps(result.summary))
        return
    speed = result.summary["images_per_second"]
    lines = [f"done: {result.summary['batches']} steps" + (f", {speed:.0f} images/s" if speed else "")]
    if result.exported:
        lines.append(f"weights: {result.exported}")
    lines.append(f"files: {result.folder}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _schedule(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from stagewright.report.terminal import draw_timeline
    from stagewright.schedule.check import check
    from stagewright.schedule.lower import program
    from stagewright.settle import make_plan_for
    from stagewright.simulate import StageCosts, simulate

    console = Console(soft_wrap=True)
    plan = make_plan_for(_config(parsed), None, lambda warning: console.print(f"warning: {warning}", markup=False))
    check(plan)
    if parsed.batches < 1:
        raise ValueError(f"--batches is {parsed.batches}; give at least 1")
    span = range(plan.boundary(parsed.batches))
    costs = StageCosts(
        _times(parsed.forward, "forward", len(plan.stages)),
        _times(parsed.backward, "backward", len(plan.stages)),
        parsed.transfer,
    )
    programs = {rank: " ".join(map(str, program(plan, rank, span))) for rank in range(plan.world)}
    timeline = simulate(plan, costs, span)
    bubble = timeline.bubble(range(plan.world), 0.0, timeline.end)
    if parsed.json:
        print(json.dumps({"plan": plan.describe(), "programs": programs, "time": timeline.end, "bubble": bubble}))
        return
    for rank, text in programs.items():
        console.print(f"rank {rank}: {text}", markup=False, highlight=False)
    console.print()
    for row in draw_timeline(timeline, plan.world, console.width):
        console.print(row)
    console.print(f"time {timeline.end:g}, bubble {bubble:.1%} with fill and drain", highlight=False)


def _times(text: str | None, name: str, stages: int) -> list[float]:
    try:
        times = [1.0] * stages if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} '{text}' are not times between ',' (for example 1,2)") from None
    if len(times) != stages or min(times) < 0:
        raise ValueError(f"--{name} {text} names {len(times)} stages but the placement has {stages}; one time a stage")
    return times


def _bench(parsed: argparse.Namespace) -> None:
    from stagewright import bench

    bench.run_suite(parsed.suite, repeats=parsed.repeats, steps=parsed.steps, as_json=parsed.json)


if __name__ == "__main__":
    main()
