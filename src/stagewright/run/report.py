"""Reports of runs: reads run folders and plans, makes pages of them, and writes those as HTML and Markdown.

The report folder does not know plans: `read_rank_map` tells it which ranks and stages a run has. Imports neither torch
nor numpy nor pydantic, because `stagewright watch` must start quickly.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from stagewright.cluster.placement import format_devices
from stagewright.cluster.topology import Cluster, Machine
from stagewright.errors import UserError, counted, printable
from stagewright.files import read_text
from stagewright.metrics import MIB, format_rate
from stagewright.plan.make import read_plan
from stagewright.plan.plan import Plan
from stagewright.report.compare import comparison_page
from stagewright.report.html import as_html
from stagewright.report.live.listing import Entry, listing_page, read_figures, read_state, select
from stagewright.report.live.watch import Snapshot, Watch
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Page, Pipeline, Stack, Stacks, Summary, Table, Tile, Tiles
from stagewright.report.read import RankMap, Run, as_number, read_object, read_plan_fields, read_run
from stagewright.report.run import run_page
from stagewright.report.timeline import action_words
from stagewright.report.words import format_number, format_share, upper_first
from stagewright.run.folder import all_runs, is_locked, read_fault, read_label, size_on_disk, started
from stagewright.runtime.status_file import RankState, RankStatus, read_status, status_path
from stagewright.schedule.action import TRANSFERS, Op

if TYPE_CHECKING:
    from stagewright.planning.predict import Prediction  # imports torch

_MOST_STAGES_NAMED = 3
_EVALUATES = (Op.FORWARD, Op.RECV_ACT, Op.SEND_ACT)  # what ranks do while they evaluate
_BETWEEN_READS = 0.005  # seconds
_POLL_LIST = 5.0  # of the list of runs, whose sizes take longer to add up
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


def make_page(folders: Sequence[Path]) -> Page:
    """The page of one run, or one that compares several."""
    runs = [open_run(folder) for folder in folders]
    return run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)


def make_prediction_page(name: str, prediction: Prediction) -> Page:
    """The page of a plan that has not run: predicted speed, memory by part and timeline."""
    plan, ranks, limits = prediction.plan.describe(), _rank_map(prediction.plan).labels, prediction.limits
    totals, steady = [memory.total for memory in prediction.memory], prediction.steady
    most, rate = max(range(len(ranks)), key=totals.__getitem__), prediction.images_per_second
    worst = max(range(len(ranks)), key=lambda rank: totals[rank] / limits[rank])
    busiest = max(range(len(ranks)), key=steady.busy.__getitem__)
    computes = f"of the ranks' time; {ranks[busiest]} computes most: {format_share(steady.busy[busiest])}"
    memory = f"needs {format_number(totals[worst] / MIB)} MiB of {format_number(limits[worst] / MIB)}"
    of = f"{ranks[most]}, of {format_number(limits[most] / MIB)} MiB"
    tiles = Tiles(
        (
            Tile("Throughput", format_rate(rate), "images/s", "predicted, not measured"),
            Tile("Step", f"{1e3 * prediction.plan.batch / rate:,.0f}", "ms", f"a batch of {plan['batch']:,} images"),
            Tile("Memory", format_number(totals[most] / MIB), "MiB", of),
            Tile("Waiting", format_share(steady.bubble), "", computes),
        )
    )
    sentences = (
        f"Predicted: {format_rate(rate)} images/s; devices wait {format_share(steady.bubble)} of the time; bound by "
        f"{prediction.bound}.",
        f"{upper_first(ranks[most])} needs the most memory: {format_number(totals[most] / MIB)} MiB."
        if prediction.fits
        else f"It does not fit: {ranks[worst]} {memory}.",
    )
    stacks = tuple(
        Stack(label, tuple((part, size / MIB) for part, size in asdict(memory).items() if size), limit / MIB)
        for label, memory, limit in zip(ranks, prediction.memory, limits, strict=True)
    )
    rows = tuple(
        (field, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for field, value in plan.items()
        if not isinstance(value, bool)
    )
    note = "What each rank would do while the pipeline fills, runs and drains."
    shares = tuple(steady.busy)
    return Page(
        f"{name}: {plan['mode']} {plan['placement']}, predicted",
        (
            tiles,
            Summary(sentences),
            Pipeline("Timeline", steady.timeline, ranks, is_predicted=True, shares=shares, note=note),
            Stacks("Memory by part", "MiB", stacks, "Predicted; a dashed line is the limit of the device."),
            Table("Plan", ("what", "value"), rows),
        ),
    )


def take_snapshot(watch: Watch, folder: Path) -> Snapshot:
    """The state of a watched run, with the current action of each rank while it runs."""
    label = read_label(folder).name
    if not is_locked(folder):
        return replace(watch.snapshot(False), label=label)
    statuses = _read_statuses(folder)
    snapshot = watch.snapshot(True, tuple(map(_action_of, statuses)), what_it_does(folder, statuses))
    return replace(snapshot, label=label)


def _read_statuses(folder: Path) -> list[RankStatus]:
    """What every rank does; read again while all of them only transfer, which tells nothing of what the run does."""
    ranks = range(len(read_rank_map(folder).labels))
    for wait in (*(_BETWEEN_READS,) * 10, 0.0):
        statuses = [read_status(status_path(folder, rank), rank) for rank in ranks]
        actions = [status.action for status in statuses if status.action is not None]
        if not actions or any(action.op not in TRANSFERS for action in actions):
            break
        time.sleep(wait)
    return statuses


def _action_of(status: RankStatus) -> str:
    waits = "waits for " if status.state is RankState.WAITING else ""
    return status.state.name.lower() if status.action is None else f"{waits}{status.action}"


def what_it_does(folder: Path, statuses: Sequence[RankStatus]) -> str:
    """What a run does now, in words: a forward without a version of the weights is one of an evaluation."""
    if any(status.state is RankState.SAVING for status in statuses):
        return "writing a checkpoint"
    actions = [status.action for status in statuses if status.action is not None]
    if not actions:
        return f"starting {counted(len(statuses), 'rank')}"
    scored = [a.microbatch for a in actions if a.op is Op.FORWARD and a.version is None and a.microbatch is not None]
    if not scored or any(action.op not in _EVALUATES or action.version is not None for action in actions):
        return "training"
    plan, job = read_plan_fields(folder), read_object(folder / "job.json") or {}
    evaluation = job.get("evaluation")
    samples = as_number(evaluation.get("samples") if isinstance(evaluation, dict) else None)
    per_microbatch = int(plan.get("batch") or 0) // max(1, int(plan.get("microbatches") or 1))
    if not samples:
        return "evaluating"
    done = min(int(samples), (max(scored) + 1) * per_microbatch)
    return f"evaluating {done:,} of {int(samples):,}"


def list_runs(runs: Path) -> list[Entry]:
    """Every run of a folder of runs, as the list of runs shows it."""
    return [_entry(folder) for folder in all_runs(runs)]


def _entry(folder: Path) -> Entry:
    label, fault = read_label(folder), read_fault(folder)
    return Entry(
        folder,
        label.name,
        label.tags,
        read_state(folder, is_running=is_locked(folder), has_failed=bool(fault)),
        started(folder),
        size_on_disk(folder),
        mode=printable(str(read_plan_fields(folder).get("mode", ""))),
        shape=_shape(folder),
        fault=fault,
        **read_figures(folder),
    )


def _shape(folder: Path) -> str:
    """Replicas of each stage, as in 7-1; empty where the plan can't be read."""
    try:
        return "-".join(str(len(ranks)) for ranks in read_rank_map(folder).stages)
    except UserError:
        return ""


def runs_page(runs: Path, path: str) -> str | None:
    """What a server of all runs shows: their list, or below it by its id the page of one; None for another path."""
    if path == "/":
        return as_html(listing_page(select(list_runs(runs), (), "started"), f"{runs}/"), poll=_POLL_LIST)
    known = {f"/{quote(folder.name)}/": folder for folder in all_runs(runs)}
    return live_page(known[path], is_listed=True) if path in known else None


def live_page(folder: Path, *, is_listed: bool = False) -> str:
    """The page of a run as it is now; while the run lasts, one that asks for updates.

    `is_listed`: a list of all runs is served above it.
    """
    run = open_run(folder)
    page = run_page(run)
    if label := read_label(folder).name:
        page = replace(page, title=f"{label}: {page.title}")
    if not is_locked(folder):
        return as_html(page, is_listed=is_listed)
    statuses = _read_statuses(folder)
    rows = tuple(
        (label, words, "" if action == words else action)
        for label, action in zip(run.rank_map.labels, map(_action_of, statuses), strict=True)
        for words in (_decoded(action),)
    )
    doing = what_it_does(folder, statuses)
    now = Table("Now", ("rank", "action", "code"), rows, f"The run is {doing}. The page updates every two seconds.")
    after = 1 + next(number for number, block in enumerate(page.blocks) if isinstance(block, Summary))
    return as_html(
        replace(page, blocks=(*page.blocks[:after], now, *page.blocks[after:])), poll=_POLL, is_listed=is_listed
    )


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
