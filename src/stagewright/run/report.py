"""Reports of runs: reads their folders, asks the plan who is who, and writes pages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cluster.placement import format_devices
from stagewright.cluster.topology import Cluster, Machine
from stagewright.plan.make import read_plan
from stagewright.report.compare import comparison_page
from stagewright.report.html import as_html
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Table
from stagewright.report.read import RankMap, read_run
from stagewright.report.run import PlanPrediction, prediction_page, run_page
from stagewright.run.folder import is_locked
from stagewright.runtime.status_file import State, read_status, status_path

if TYPE_CHECKING:
    from stagewright.plan.plan import Plan
    from stagewright.planning.predict import Prediction
    from stagewright.report.live.watch import Snapshot, Watch
    from stagewright.report.page import Page
    from stagewright.report.read import Run


_MOST_STAGES_NAMED = 3
_POLL = 2.0  # seconds


def open_run(folder: Path) -> Run:
    """A run by its folder; an error in a line where it is none."""
    return read_run(folder, read_rank_map(folder))


def read_rank_map(folder: Path) -> RankMap:
    """Which ranks a run has, and which stages they carry."""
    path = folder / "plan.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{folder} is no run folder: plan.json: {reason}; give a folder that train made") from error
    machines = Cluster((Machine(),) * (1 + _last_machine(text)), "the run's machines")
    try:
        return _rank_map(read_plan(text, str(path), machines))
    except ValueError as error:
        told = str(error) if str(path) in str(error) else f"plan {path}: {error}"
        raise ValueError(f"{told}; give a folder whose plan.json is as train wrote it") from error


def _rank_map(plan: Plan) -> RankMap:
    labels = []
    for rank in range(plan.world):
        carried = [str(stage.index) for stage in plan.stages_of(rank)]
        few = ", ".join(carried[:_MOST_STAGES_NAMED]) + ("..." if len(carried) > _MOST_STAGES_NAMED else "")
        labels.append(f"rank {rank} (stage{'s' if len(carried) > 1 else ''} {few})")
    devices = tuple(format_devices(placed) for placed in plan.placement)
    return RankMap(tuple(labels), tuple(stage.ranks for stage in plan.stages), devices)


def _last_machine(text: str) -> int:
    """The highest machine that a placement in a text could name."""
    return max((int(number) for number in re.findall(r"\b([0-9]{1,4}):[0-9]", text)), default=0)


def page_of_runs(folders: Sequence[Path], names: Sequence[str] = ()) -> Page:
    """The page of a run, or one that compares several."""
    runs = [open_run(folder) for folder in folders]
    return run_page(runs[0]) if len(runs) == 1 else comparison_page(runs, names)


def page_of_prediction(name: str, prediction: Prediction) -> Page:
    """What a plan would do, before it runs."""
    plan = prediction.plan
    outlook = PlanPrediction(
        name=name,
        rank_map=_rank_map(plan),
        plan=plan.describe(),
        images_per_second=prediction.images_per_second,
        bubble=prediction.steady.bubble,
        bound=prediction.bound,
        busy=prediction.steady.busy,
        memory=tuple(asdict(rank) for rank in prediction.memory),
        limits=prediction.limits,
        timeline=prediction.steady.timeline,
    )
    return prediction_page(outlook)


def take_snapshot(watch: Watch, folder: Path) -> Snapshot:
    """A watched run as it is now, with what each rank is at while it runs."""
    is_running = is_locked(folder)
    return watch.look(is_running, what_ranks_do(folder) if is_running else ())


def what_ranks_do(folder: Path) -> tuple[str, ...]:
    """The current action of each rank, by the small files that they keep."""
    doing = []
    for rank in range(len(read_rank_map(folder).labels)):
        sight = read_status(status_path(folder, rank), rank)
        waits = "waits for " if sight.state is State.WAITING else ""
        doing.append(sight.state.name.lower() if sight.action is None else f"{waits}{sight.action}")
    return tuple(doing)


def live_page(folder: Path) -> str:
    """The page of a run as it is now; while it runs, one that asks for news."""
    run = open_run(folder)
    page = run_page(run)
    if not is_locked(folder):
        return as_html(page)
    rows = tuple(zip(run.rank_map.labels, what_ranks_do(folder), strict=True))
    now = Table("Now", ("rank", "action"), rows, "The page asks for news every two seconds.")
    return as_html(replace(page, blocks=(page.blocks[0], now, *page.blocks[1:])), poll=_POLL)


def write_page(page: Page, target: Path) -> tuple[Path, Path]:
    """A page as HTML and beside it as Markdown; a reader never sees half a file."""
    written = target.with_suffix(".html"), target.with_suffix(".md")
    for path, text in zip(written, (as_html(page), as_markdown(page)), strict=True):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise ValueError(f"can't write {path}: {error.strerror}; choose another place with -o FILE") from error
    return written
