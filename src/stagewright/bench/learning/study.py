"""A study from its file to a folder with reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from stagewright.bench.forecast import devices_of, forecast
from stagewright.bench.learning.findings import Speed, findings_of, target_of
from stagewright.bench.learning.pages import Study, describe_study, study_page
from stagewright.bench.learning.runs import FILE, Learnt, earlier_runs, run_lessons
from stagewright.bench.learning.trials import Inquiry, Lesson, lessons_of, open_study
from stagewright.bench.machine import num_cores
from stagewright.bench.pages import zip_logs
from stagewright.bench.result import cleaned, make_cleaner
from stagewright.cluster.catalog import open_cluster
from stagewright.hardware.environment import environment
from stagewright.run.folder import new_folder
from stagewright.run.report import write_page

_CLUSTER = "rtx-4090-4"  # whose time is predicted, unless told
_MOST_ON_GPU = 6  # runs that share one
Tell = Callable[[str], None]


def run_study(inquiry: Inquiry, runs: str, command: str, *, anonymise: bool, tell: Tell) -> tuple[Study, Path]:
    """Train every lesson, and write the reports after each; what was found, and the folder that holds it."""
    file = open_study(inquiry)
    lessons = lessons_of(inquiry, file)
    known = earlier_runs(inquiry.reuse, lessons)
    speeds = {} if inquiry.is_real else _predicted(lessons, inquiry.cluster or _CLUSTER, tell)
    folder = new_folder(runs, "bench-learning")
    clean: Callable[[str], str] = make_cleaner() if anonymise else str
    latest: list[Study] = []

    def _where(origin: str) -> str:
        return Path(origin).name if anonymise else origin

    def keep(learnt: Sequence[Learnt]) -> None:
        told = [replace(run, settings=clean(run.settings), origin=_where(run.origin)) for run in learnt]
        study = _study(file.title, clean(command), lessons, told, speeds | _measured(lessons, learnt), inquiry.target)
        elsewhere = {_where(origin): cleaned(dict(machine), clean) for origin, machine in known.machines.items()}
        latest[:] = [replace(study, machine=cleaned(dict(study.machine), clean), elsewhere=elsewhere)]
        draft = folder / f"{FILE}.draft"
        draft.write_text(json.dumps(describe_study(latest[0]), indent=1))
        draft.replace(folder / FILE)
        write_page(study_page(latest[0]), folder / "report.html")

    try:
        run_lessons(lessons, inquiry.jobs or _jobs(inquiry, lessons), folder / "runs", tell, keep, known.runs)
    finally:
        zip_logs(folder / "runs", folder, clean)
        if not any(folder.iterdir()):
            folder.rmdir()
    return latest[0], folder


def _study(
    title: str,
    command: str,
    lessons: Sequence[Lesson],
    learnt: Sequence[Learnt],
    speeds: dict[tuple[str, str], Speed],
    target: float | None,
) -> Study:
    baselines = {lesson.case.group.name: lesson.case.trial.name for lesson in lessons if lesson.case.is_baseline}
    per_epoch: dict[tuple[str, str], int] = {}
    for run in learnt:  # one that diverged early has not seen a whole epoch
        per_epoch[run.key] = max(run.per_epoch, per_epoch.get(run.key, 0))
    samples = {lesson.key: per_epoch.get(lesson.key, 0) * lesson.config.plan.batch for lesson in lessons}
    for lesson in lessons:  # --only may leave the baseline out
        baselines.setdefault(lesson.case.group.name, "")
    findings = findings_of(learnt, baselines, samples, speeds)
    targets = {}
    for group in baselines:
        found = target_of([finding for finding in findings if finding.group == group])
        if target is not None or found is not None:
            targets[group] = target / 100 if target is not None else found or 0.0
    machine = dict(environment().rows())
    return Study(title, time.strftime("%Y-%m-%d"), command, machine, tuple(findings), targets)


def _jobs(inquiry: Inquiry, lessons: Sequence[Lesson]) -> int:
    """As many runs at a time as there are cores; on a GPU not more than share it well; one where it is timed."""
    if inquiry.is_real:
        return 1
    on_gpu = any(lesson.config.run.device == "cuda" for lesson in lessons)
    return max(1, min(num_cores() // 2, _MOST_ON_GPU) if on_gpu else num_cores())


def _predicted(lessons: Sequence[Lesson], name: str, tell: Tell) -> dict[tuple[str, str], Speed]:
    """What the simulator says of each trial's plan; a word where it can't."""
    catalogue, cluster = open_cluster(name)
    speeds = {}
    for lesson in lessons:
        if lesson.key not in speeds:
            try:
                prediction = forecast(lesson.config, catalogue, cluster, loads=False)
            except ValueError as error:
                tell(f"{lesson}: its time on {name} is not predicted: {error}")
                continue
            source = f"predicted by the simulator for {name}"
            speeds[lesson.key] = Speed(prediction.images_per_second, source, prediction.plan.world)
    return speeds


def _measured(lessons: Sequence[Lesson], learnt: Sequence[Learnt]) -> dict[tuple[str, str], Speed]:
    devices = {lesson.key: len(devices_of(lesson.config.plan.placement)) for lesson in lessons}
    rates: dict[tuple[str, str], list[float]] = {}
    for run in learnt:
        if run.rate is not None:
            rates.setdefault(run.key, []).append(run.rate)
    return {key: Speed(median(found), "measured here", devices[key]) for key, found in rates.items()}
