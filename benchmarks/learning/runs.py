"""Train the runs of a study as commands, several at the same time, and read what they reached.

Runs of earlier studies with equal settings are reused (`earlier_runs`).
"""

from __future__ import annotations

import json
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from benchmarks.learning.trials import TrialRun
from stagewright.bench.folder import LOGS
from stagewright.bench.machine import shared_gpu
from stagewright.config.toml import as_toml, make_config, with_new_names, without_unused
from stagewright.errors import UserError
from stagewright.events import Evaluated, Record, Step, read_records
from stagewright.files import read_text
from stagewright.metrics import LOSS, format_metric, headline_metrics, metric_label
from stagewright.report.read import read_lines
from stagewright.runtime.process.children import Children
from stagewright.voice import Voice

After = Callable[[Sequence["TrainedRun"]], None]
FILE = "learning.json"
POLL_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0  # between lines about how far the runs are
# The errors of `runtime.stage` and `run.train` that mean divergence: a result of the study, not a failure.
DIVERGED = re.compile(
    r"the loss of batch \d+ is (nan|-?inf)|gradients overflow fp16 at any loss scale|the loss grew from \S+ to [^\s,]+"
)


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """What one run reached. Its fields are the keys of a run in learning.json."""

    group: str
    trial: str
    seed: int
    scores: tuple[tuple[int, float], ...]  # batches trained, and the metric after them
    per_epoch: int  # batches
    rate: float | None = None  # images per second; None where the ranks were emulated
    diverged: str = ""  # the error, where the loss or the gradients became infinite or NaN
    settings: str = ""  # as `TrialRun.settings`
    origin: str = ""  # the folder of the earlier study that trained it, where it is reused
    metric: str = "top1"  # that the scores are of
    is_plain: bool = False  # a plain PyTorch loop trained it

    @property
    def key(self) -> tuple[str, str]:
        return (self.group, self.trial)


def _identity(run: TrainedRun | TrialRun) -> tuple[bool, str]:
    """What decides the result of a run: who trains it, and its settings."""
    return run.is_plain, run.settings


def train_runs(
    trial_runs: Sequence[TrialRun],
    jobs: int,
    folder: Path,
    voice: Voice,
    after: After,
    known: Sequence[TrainedRun],
) -> None:
    """Train every run that is not known, `jobs` at the same time; any failure other than divergence ends them all.

    `after` is called with all finished runs, first with the known ones and then whenever another finishes.
    """
    on_gpu = any(trial_run.config.run.device == "cuda" for trial_run in trial_runs)
    found = list(known)
    done = set(map(_identity, known))
    waiting = [(number, trial_run) for number, trial_run in enumerate(trial_runs) if _identity(trial_run) not in done]
    if found:
        voice.progress(f"{len(found)} of {len(trial_runs)} runs are reused")
        after(found)
    running: list[_Running] = []
    with shared_gpu(voice) if on_gpu and jobs > 1 else nullcontext(), Children() as children:
        shown = time.monotonic()
        while waiting or running:
            while waiting and len(running) < jobs:
                number, trial_run = waiting.pop(0)
                running.append(_Running(trial_run, folder / f"{number}", children))
            time.sleep(POLL_SECONDS)
            for run in [run for run in running if run.is_over]:
                running.remove(run)
                found.append(run.result())
                after(found)
                shown = 0.0
            if time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                newest = "; ".join(run.progress for run in running[:2])
                voice.progress(f"{len(found)} of {len(trial_runs)} runs; {newest}")


class _Running:
    """The command that trains one run."""

    def __init__(self, trial_run: TrialRun, folder: Path, children: Children) -> None:
        folder.mkdir(parents=True)
        self._trial_run = trial_run
        self._folder = folder
        config = replace(trial_run.config, run=replace(trial_run.config.run, runs=str(folder / "runs")))
        (folder / "trial.toml").write_text(as_toml(config))
        file = str(folder / "trial.toml")
        words = ["benchmarks.learning.plain", file]
        if not trial_run.is_plain:
            words = ["stagewright", "train", "--config", file, "--json"]
        threads = {"OMP_NUM_THREADS": str(config.run.threads)}
        command = [sys.executable, "-m", *words]
        self._process = children.start(command, threads, stdout=folder / "out.json", stderr=folder / "errors.txt")

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def progress(self) -> str:
        metric, scores = read_scores(self._folder)
        if not scores:
            return f"{self._trial_run}: started"
        batch, value = scores[-1]
        return f"{self._trial_run}: {metric_label(metric)} {format_metric(metric, value)} after batch {batch}"

    def result(self) -> TrainedRun:
        code, trial_run = self._process.wait(), self._trial_run
        errors = (self._folder / "errors.txt").read_text(errors="replace").strip().splitlines() or ["no message"]
        per_epoch = batches_per_epoch(self._folder)
        metric, scores = read_scores(self._folder)
        trained = TrainedRun(
            *trial_run.key,
            trial_run.seed,
            scores,
            per_epoch,
            settings=trial_run.settings,
            metric=metric,
            is_plain=trial_run.is_plain,
        )
        if code == 0:
            summary = json.loads((self._folder / "out.json").read_text())
            rate = None if trial_run.config.run.emulate else summary["images_per_second"]
            return replace(trained, rate=rate)
        if found := DIVERGED.search(errors[-1]):
            return replace(trained, diverged=found[0])
        logs = self._folder.parent.parent / LOGS
        raise UserError(
            f"{trial_run}: {errors[-1].removeprefix('stagewright: ')}; its files are {logs}:{self._folder.name}"
        )


def _records(folder: Path) -> Iterator[Record]:
    """The run's metrics so far."""
    for path in folder.glob("runs/*/metrics.jsonl"):
        yield from (record for _, record in read_records(read_lines(path)))


def read_scores(folder: Path) -> tuple[str, tuple[tuple[int, float], ...]]:
    """The metric that a run is judged by, its first one or the loss, and its value after each evaluation."""
    found = [record for record in _records(folder) if isinstance(record, Evaluated)]
    metric = next(iter(headline_metrics(found[0].metrics)), LOSS) if found else "top1"
    if metric == LOSS:
        return metric, tuple((record.batch, record.loss) for record in found)
    return metric, tuple((record.batch, record.metrics[metric]) for record in found if metric in record.metrics)


def batches_per_epoch(folder: Path) -> int:
    """Batches per epoch, or those trained so far where the first epoch is not over."""
    steps = [record for record in _records(folder) if isinstance(record, Step)]
    first = next((step for step in steps if step.epoch == 1), None)
    return first.batch if first is not None else 1 + max((step.batch for step in steps), default=0)


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """Runs of earlier studies, and the machines that trained them, by the study's folder."""

    runs: list[TrainedRun]
    machines: Mapping[str, Mapping[str, str]]


def earlier_runs(folders: Sequence[str], trial_runs: Sequence[TrialRun]) -> EarlierRuns:
    """The runs of earlier studies with exactly the settings of `trial_runs`, under the names that these have.

    Anonymised settings match nothing, since they do not tell one data set from another.
    """
    asked = set(map(_identity, trial_runs))
    reusable: dict[tuple[bool, str], TrainedRun] = {}
    machines: dict[str, Mapping[str, str]] = {}
    for folder in folders:
        earlier = _read(Path(folder))
        equal = {_identity(run): run for run in earlier.runs if _identity(run) in asked}
        if not equal:
            raise UserError(
                f"--reuse {folder}: none of its {len(earlier.runs)} runs has the settings of any of the "
                f"{len(trial_runs)} asked for; make the settings equal or leave --reuse out"
            )
        reusable |= equal
        machines |= earlier.machines
    found = []
    for trial_run in trial_runs:
        if (run := reusable.get(_identity(trial_run))) is not None:
            found.append(replace(run, group=trial_run.key[0], trial=trial_run.key[1]))
    return EarlierRuns(found, {run.origin: machines[run.origin] for run in found if run.origin in machines})


def _read(folder: Path) -> EarlierRuns:
    """The runs of a study; those that it reused itself keep their origin."""
    path = folder / FILE
    try:
        tables: Any = json.loads(read_text(path))
        learnt = [run for finding in tables["findings"] for run in finding["learnt"]]
        machines = {str(folder): tables["machine"], **tables.get("elsewhere", {})}
        earlier = TypeAdapter(EarlierRuns).validate_python({"runs": learnt, "machines": machines})
        runs = [replace(r, origin=r.origin or str(folder), settings=_in_full(r.settings)) for r in earlier.runs]
        return replace(earlier, runs=runs)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a folder of learning") from error
    except (ValueError, KeyError, TypeError, ValidationError, RecursionError) as error:
        raise UserError(f"{path} was not written by a study; give the folder of one") from error


def _in_full(settings: str) -> str:
    """Settings with the defaults of options that did not exist when they were written."""
    try:
        return as_toml(without_unused(make_config(with_new_names(tomllib.loads(settings)), given=())))
    except ValueError:  # they have options that no longer exist: they match nothing
        return settings
