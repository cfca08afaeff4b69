"""Run a study: from its file to a folder with learning.json and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.learning.findings import Study, TrainingSpeed, findings_of, target_of
from benchmarks.learning.pages import describe_study, study_page
from benchmarks.learning.runs import FILE, TrainedRun, earlier_runs, train_runs
from benchmarks.learning.trials import StudyOptions, TrialRun, open_study, trial_runs_of
from stagewright.bench.anonymous import cleaned, make_cleaner
from stagewright.bench.folder import bench_folder, write_json
from stagewright.bench.predict import predict_config
from stagewright.bench.suite import devices_of
from stagewright.cluster.catalog import open_cluster
from stagewright.errors import UserError
from stagewright.hardware.environment import read_environment
from stagewright.hardware.host import num_cores
from stagewright.metrics import is_percentage
from stagewright.run.report import write_page
from stagewright.voice import Voice

_CLUSTER = "rtx-4090-4"  # times are predicted for it by default
_MOST_ON_GPU = 6  # runs that share one GPU


def run_study(options: StudyOptions, runs: str, command: str, *, anonymise: bool, voice: Voice) -> tuple[Study, Path]:
    """Train every run and write the reports after each; returns the study and its folder."""
    file = open_study(options)
    trial_runs = trial_runs_of(options, file)
    known = earlier_runs(options.reuse, trial_runs)
    speeds = {} if options.is_real else _predicted_speeds(trial_runs, options.cluster or _CLUSTER, voice)
    clean: Callable[[str], str] = make_cleaner() if anonymise else str
    latest: list[Study] = []

    def shown(origin: str) -> str:
        return Path(origin).name if anonymise else origin

    with bench_folder("learning", runs, clean) as folder:

        def keep(trained: Sequence[TrainedRun]) -> None:
            cleaned_runs = [replace(run, settings=clean(run.settings), origin=shown(run.origin)) for run in trained]
            known_speeds = speeds | measured_speeds(trial_runs, trained)
            study = make_study(file.title, clean(command), trial_runs, cleaned_runs, known_speeds, options.target)
            elsewhere = {shown(origin): cleaned(dict(machine), clean) for origin, machine in known.machines.items()}
            latest[:] = [replace(study, machine=cleaned(dict(study.machine), clean), elsewhere=elsewhere)]
            write_json(describe_study(latest[0]), folder / FILE)
            write_page(study_page(latest[0]), folder / "report.html")

        jobs = options.jobs or default_jobs(options, trial_runs)
        train_runs(trial_runs, jobs, folder / "runs", voice, keep, known.runs)
    return latest[0], folder


def make_study(
    title: str,
    command: str,
    trial_runs: Sequence[TrialRun],
    trained: Sequence[TrainedRun],
    speeds: dict[tuple[str, str], TrainingSpeed],
    target: float | None,
) -> Study:
    """What the runs so far show; `target`, in percent of metrics that are, is by default from each group's baseline."""
    baselines = dict.fromkeys((one.key[0] for one in trial_runs), "")  # --only may exclude the baseline
    baselines |= {one.key[0]: one.key[1] for one in trial_runs if one.configuration.is_baseline}
    per_epoch: dict[tuple[str, str], int] = {}
    for run in trained:  # the maximum: one that diverged early has not seen a whole epoch
        per_epoch[run.key] = max(run.per_epoch, per_epoch.get(run.key, 0))
    samples = {one.key: per_epoch.get(one.key, 0) * (one.config.plan.batch or 0) for one in trial_runs}
    findings = findings_of(trained, baselines, samples, speeds)
    targets = {}
    for group in baselines:
        own = [finding for finding in findings if finding.group == group]
        found = target_of(own)
        if target is not None:
            targets[group] = target / 100 if not own or is_percentage(own[0].metric) else target
        elif found is not None:
            targets[group] = found
    machine = dict(read_environment().rows())
    return Study(title, time.strftime("%Y-%m-%d"), command, machine, tuple(findings), targets)


def default_jobs(options: StudyOptions, trial_runs: Sequence[TrialRun]) -> int:
    """Runs at the same time: one per core, fewer where they share a GPU, 1 where times are measured."""
    if options.is_real:
        return 1
    on_gpu = any(trial_run.config.run.device == "cuda" for trial_run in trial_runs)
    return max(1, min(num_cores() // 2, _MOST_ON_GPU) if on_gpu else num_cores())


def _predicted_speeds(trial_runs: Sequence[TrialRun], name: str, voice: Voice) -> dict[tuple[str, str], TrainingSpeed]:
    """The simulated speed of each trial; those that cannot be simulated are reported and left out."""
    catalog, cluster = open_cluster(name)
    speeds = {}
    for trial_run in trial_runs:
        if trial_run.key not in speeds and not trial_run.is_plain:  # the simulator knows pipelines
            try:
                prediction = predict_config(trial_run.config, catalog, cluster, loads=False)
            except UserError as error:
                voice.progress(f"{trial_run}: cannot predict its time on {name}: {error}")
                continue
            source = f"predicted by the simulator for {name}"
            speeds[trial_run.key] = TrainingSpeed(prediction.images_per_second, source, prediction.plan.world)
    return speeds


def measured_speeds(
    trial_runs: Sequence[TrialRun], trained: Sequence[TrainedRun]
) -> dict[tuple[str, str], TrainingSpeed]:
    """The median speed of each trial whose ranks were processes."""
    devices = {trial_run.key: len(devices_of(trial_run.config.plan.placement)) for trial_run in trial_runs}
    rates: dict[tuple[str, str], list[float]] = {}
    for run in trained:
        if run.rate is not None:
            rates.setdefault(run.key, []).append(run.rate)
    return {key: TrainingSpeed(median(found), "measured here", devices[key]) for key, found in rates.items()}
