"""Reports of runs: reads run folders and plans, makes pages of them, and writes those as HTML and Markdown.

The report folder does not know plans: `read_rank_map` tells it which ranks and stages a run has. Imports neither torch
nor numpy nor pydantic, because `stagewright watch` must start quickly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cluster.placement import format_devices
from stagewright.cluster.topology import Cluster, Machine
from stagewright.errors import UserError
from stagewright.files import read_text
from stagewright.metrics import MIB, format_rate
from stagewright.plan.make import read_plan
from stagewright.plan.plan import Plan
from stagewright.report.charts import format_number, format_share
from stagewright.report.compare import comparison_page
from stagewright.report.figures import upper_first
from stagewright.report.html import as_html
from stagewright.report.live.watch import Snapshot, Watch
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Page, Pipeline, Stack, Stacks, Summary, Table, Tile, Tiles
from stagewright.report.read import RankMap, Run, read_run
from stagewright.report.run import run_page
from stagewright.report.timeline import action_words
from stagewright.run.folder import is_locked
from stagewright.runtime.status_file import State, read_status, status_path

if TYPE_CHECKING:
    from stagewright.planning.predict import Prediction  # imports torch

_MOST_STAGES_NAMED = 3
_POLL = 2.0  # seconds between updates of a live page


def open_run(folder: Path) -> Run:
    """Read a run folder; a UserError where it is not one."""
    return read_run(folder, read_rank_map(folder))


def read_rank_map(folder: Path) -> RankMap:
    """Which ranks and stages a run has, by its plan.json."""
    path = folder / "plan.json"
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{folder} is not a run folder: plan.json: {reason}; give a folder that train wrote") from error
    numbers = re.findall(r"\b([0-9]{1,4}):[0-9]", text)  # of the machines that its placement may name
    machines = Cluster((Machine(),) * (1 + max(map(int, numbers), default=0)), "the run's machines")
    try:
        return _rank_map(read_plan(text, str(path), machines))
    except UserError as error:
        message = str(error) if str(path) in str(error) else f"plan {path}: {error}"
        raise UserError(f"{message}; give a folder whose plan.json is unchanged since train wrote it") from error


def _rank_map(plan: Plan) -> RankMap:
    labels = []
    for rank in range(plan.world):
        stages = [str(stage.index) for stage in plan.stages_of(rank)]
        few = ", ".join(stages[:_MOST_STAGES_NAMED]) + ("..." if len(stages) > _MOST_STAGES_NAMED else "")
        labels.append(f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {few})")
    devices = tuple(format_devices(placed) for placed in plan.placement)
    return RankMap(tuple(labels), tuple(stage.ranks for stage in plan.stages), devices)


def make_page(folders: Sequence[Path], names: Sequence[str] = ()) -> Page:
    """The page of one run, or one that compares several under these names."""
    runs = [open_run(folder) for folder in folders]
    return run_page(runs[0]) if len(runs) == 1 else comparison_page(runs, names)


def make_prediction_page(name: str, prediction: Prediction) -> Page:
    """The page of a plan that has not run: predicted speed, memory by part and timeline."""
    plan, ranks = prediction.plan.describe(), _rank_map(prediction.plan).labels
    stacks = tuple(
        Stack(label, tuple((part, size / MIB) for part, size in asdict(memory).items() if size), limit / MIB)
        for label, memory, limit in zip(ranks, prediction.memory, prediction.limits, strict=True)
    )
    rows = tuple(
        (field, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for field, value in plan.items()
        if not isinstance(value, bool)
    )
    return Page(
        f"{name}: {plan['mode']} {plan['placement']}, predicted",
        (
            _prediction_tiles(prediction, ranks),
            Summary(tuple(_summarize_prediction(prediction, ranks))),
            Pipeline(
                "Timeline",
                prediction.steady.timeline,
                ranks,
                is_predicted=True,
                shares=tuple(prediction.steady.busy),
                note="What each rank would do while the pipeline fills, runs and drains.",
            ),
            Stacks("Memory by part", "MiB", stacks, "Predicted; a dashed line is the limit of the device."),
            Table("Plan", ("what", "value"), rows),
        ),
    )


def _prediction_tiles(prediction: Prediction, ranks: Sequence[str]) -> Tiles:
    """The figures that the page of a prediction begins with."""
    totals, busy = [memory.total for memory in prediction.memory], prediction.steady.busy
    most = max(range(len(ranks)), key=lambda rank: totals[rank])
    fullest = f"{ranks[most]}, of {format_number(prediction.limits[most] / MIB)} MiB"
    busiest = max(range(len(ranks)), key=lambda rank: busy[rank])
    return Tiles(
        (
            Tile("Throughput", format_rate(prediction.images_per_second), "images/s", "predicted, not measured"),
            Tile("Batch", f"{1e3 * prediction.plan.batch / prediction.images_per_second:,.0f}", "ms", "per step"),
            Tile("Memory", format_number(totals[most] / MIB), "MiB", fullest),
            Tile(
                "Waiting",
                format_share(prediction.steady.bubble),
                "",
                f"of the ranks' time; {ranks[busiest]} computes most: {format_share(busy[busiest])}",
            ),
        )
    )


def _summarize_prediction(prediction: Prediction, ranks: Sequence[str]) -> Iterator[str]:
    yield (
        f"Predicted: {format_rate(prediction.images_per_second)} images/s; "
        f"devices wait {format_share(prediction.steady.bubble)} of the time; bound by {prediction.bound}."
    )
    totals, limits = [memory.total for memory in prediction.memory], prediction.limits
    if prediction.fits:
        most = max(range(len(ranks)), key=lambda rank: totals[rank])
        yield f"{upper_first(ranks[most])} needs the most memory: {format_number(totals[most] / MIB)} MiB."
    else:
        worst = max(range(len(ranks)), key=lambda rank: totals[rank] / limits[rank])
        yield (
            f"It does not fit: {ranks[worst]} needs {format_number(totals[worst] / MIB)} MiB "
            f"of {format_number(limits[worst] / MIB)}."
        )


def take_snapshot(watch: Watch, folder: Path) -> Snapshot:
    """The state of a watched run, with the current action of each rank while it runs."""
    is_running = is_locked(folder)
    return watch.snapshot(is_running, current_actions(folder) if is_running else ())


def current_actions(folder: Path) -> tuple[str, ...]:
    """The current action of each rank, from its status file."""
    actions = []
    for rank in range(len(read_rank_map(folder).labels)):
        status = read_status(status_path(folder, rank), rank)
        waits = "waits for " if status.state is State.WAITING else ""
        actions.append(status.state.name.lower() if status.action is None else f"{waits}{status.action}")
    return tuple(actions)


def live_page(folder: Path) -> str:
    """The page of a run as it is now; while the run lasts, one that asks for updates."""
    run = open_run(folder)
    page = run_page(run)
    if not is_locked(folder):
        return as_html(page)
    rows = tuple(
        (label, words, "" if action == words else action)
        for label, action in zip(run.rank_map.labels, current_actions(folder), strict=True)
        for words in (_decoded(action),)
    )
    now = Table("Now", ("rank", "action", "code"), rows, "The page updates every two seconds.")
    after = 1 + next(number for number, block in enumerate(page.blocks) if isinstance(block, Summary))
    return as_html(replace(page, blocks=(*page.blocks[:after], now, *page.blocks[after:])), poll=_POLL)


def _decoded(action: str) -> str:
    """What a rank does now, in words."""
    _, waits, code = action.rpartition("waits for ")
    return f"{'waits to start: ' if waits else ''}{action_words(code)}"


def write_page(page: Page, target: Path) -> tuple[Path, Path]:
    """Write a page as HTML and, beside it, as Markdown; each file appears complete or not at all."""
    written = target.with_suffix(".html"), target.with_suffix(".md")
    for path, text in zip(written, (as_html(page), as_markdown(page)), strict=True):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8", errors="backslashreplace")  # what runs name may be no text
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise UserError(f"can't write {path}: {error.strerror}; choose another place with -o FILE") from error
    return written
