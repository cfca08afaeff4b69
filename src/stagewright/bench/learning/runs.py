"""Runs lessons as commands of their own, several at a time, and reads what they learnt. Runs that earlier studies made, which need not be made again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from stagewright.bench.learning.trials import Lesson
from stagewright.bench.machine import shared_gpu
from stagewright.bench.pages import LOGS
from stagewright.config.toml import as_toml, make_config, with_new_names

Tell = Callable[[str], None]
After = Callable[[Sequence["Learnt"]], None]
_LOOK = 0.5  # seconds between looks at the runs
_TELL = 10.0  # seconds between lines on how far they are
_DIVERGED = re.compile(r"the loss of batch \d+ is (nan|-?inf)|gradients overflow fp16 at any loss scale")


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one lesson came to: top-1 after so many batches, and how fast its ranks were, where they were real."""

    group: str
    trial: str
    seed: int
    scores: tuple[tuple[int, float], ...]
    per_epoch: int  # batches
    rate: float | None = None  # images a second
    diverged: str = ""  # the loss left the numbers, and when
    settings: str = ""  # of the lesson
    origin: str = ""  # the folder of the study that made it, where it is taken over

    @property
    def key(self) -> tuple[str, str]:
        return (self.group, self.trial)


def run_lessons(
    lessons: Sequence[Lesson], jobs: int, folder: Path, tell: Tell, after: After, known: Sequence[Learnt]
) -> None:
    """Every lesson that is not known, `jobs` at a time; one that fails for another reason than its lag ends them all.

    `after` hears of all that are over, the known ones first, and whenever one is.
    """
    on_gpu = any(lesson.config.run.device == "cuda" for lesson in lessons)
    found = list(known)
    settled = {run.settings for run in known}
    waiting = [(number, lesson) for number, lesson in enumerate(lessons) if lesson.settings not in settled]
    if found:
        tell(f"{len(found)} of {len(lessons)} runs are known")
        after(found)
    with shared_gpu(tell) if on_gpu and jobs > 1 else nullcontext(), _ended() as running:
        told = time.monotonic()
        while waiting or running:
            while waiting and len(running) < jobs:
                number, lesson = waiting.pop(0)
                running.append(_Running(lesson, folder / f"{number}"))
            time.sleep(_LOOK)
            for run in [run for run in running if run.is_over]:
                running.remove(run)
                found.append(run.learnt())
                after(found)
                told = 0.0
            if time.monotonic() - told > _TELL:
                told = time.monotonic()
                tell(f"{len(found)} of {len(lessons)} runs; {'; '.join(run.progress for run in running[:2])}")


@contextmanager
def _ended() -> Iterator[list[_Running]]:
    """Runs that are ended when the context is left, however it is."""
    running: list[_Running] = []
    try:
        yield running
    finally:
        for run in running:
            run.end()


class _Running:
    """One lesson's command."""

    def __init__(self, lesson: Lesson, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._lesson = lesson
        self._folder = folder
        config = replace(lesson.config, run=replace(lesson.config.run, runs=str(folder / "runs")))
        (folder / "lesson.toml").write_text(as_toml(config))
        with (folder / "out.json").open("w") as out, (folder / "errors.txt").open("w") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "stagewright.cli.main",
                    "train",
                    "--config",
                    str(folder / "lesson.toml"),
                    "--json",
                ],
                stdout=out,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": str(config.run.threads)},
            )

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def progress(self) -> str:
        scores = list(_scores(self._folder))
        return f"{self._lesson}: {f'{scores[-1][1]:.1%} after batch {scores[-1][0]}' if scores else 'begun'}"

    def learnt(self) -> Learnt:
        code, lesson = self._process.wait(), self._lesson
        said = (self._folder / "errors.txt").read_text(errors="replace").strip().splitlines() or ["no message"]
        per_epoch, scores = _per_epoch(self._folder), tuple(_scores(self._folder))
        if code == 0:
            summary = json.loads((self._folder / "out.json").read_text())
            rate = None if lesson.config.run.emulate else summary["images_per_second"]
            return Learnt(*lesson.key, lesson.seed, scores, per_epoch, rate, settings=lesson.settings)
        if found := _DIVERGED.search(said[-1]):
            return Learnt(*lesson.key, lesson.seed, scores, per_epoch, None, found[0], lesson.settings)
        logs = self._folder.parent.parent / LOGS
        raise ValueError(
            f"{lesson}: {said[-1].removeprefix('stagewright: ')}; its files are {logs}:{self._folder.name}"
        )

    def end(self) -> None:
        """Ask it to stop, then see to it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _records(folder: Path) -> Iterator[dict[str, object]]:
    """The lines of the run's metrics so far; the last may be half a line."""
    for path in folder.glob("runs/*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def _scores(folder: Path) -> Iterator[tuple[int, float]]:
    for record in _records(folder):
        if "top1" in record:
            yield int(str(record["batch"])), float(str(record["top1"]))


def _per_epoch(folder: Path) -> int:
    """Batches of an epoch, as far as the run came."""
    first = next((record for record in _records(folder) if record.get("epoch") == 1), None)
    if first is not None:
        return int(str(first["batch"]))
    return 1 + max((int(str(record["batch"])) for record in _records(folder) if "epoch" in record), default=0)


FILE = "learning.json"


@dataclass(frozen=True, slots=True)
class Earlier:
    """Runs of an earlier study, and the machines that made them, by the study's folder."""

    runs: list[Learnt] = field(default_factory=list)
    machines: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def earlier_runs(folders: Sequence[str], lessons: Sequence[Lesson]) -> Earlier:
    """What studies in `folders` learnt of these lessons: of runs with exactly their settings, under their names here.

    Settings that were anonymised are equal to none: they do not tell one data set from another.
    """
    asked = {lesson.settings for lesson in lessons}
    made: dict[str, Learnt] = {}
    machines: dict[str, Mapping[str, str]] = {}
    for folder in folders:
        earlier = _read(Path(folder))
        runs = earlier.runs
        equal = {run.settings: run for run in runs if run.settings in asked}
        if not equal:
            raise ValueError(
                f"--reuse {folder}: none of its {len(runs)} runs has the settings of one of the {len(lessons)} "
                f"asked for{_first_difference(runs, lessons)}; make the settings equal or leave --reuse out"
            )
        made |= equal
        machines |= earlier.machines
    found = [
        replace(made[lesson.settings], group=lesson.key[0], trial=lesson.key[1])
        for lesson in lessons
        if lesson.settings in made
    ]
    return Earlier(found, {run.origin: machines[run.origin] for run in found if run.origin in machines})


def _read(folder: Path) -> Earlier:
    """A study's runs; those that it took over itself keep their origin."""
    path = folder / FILE
    try:
        tables: Any = json.loads(path.read_text())
        runs = TypeAdapter(list[Learnt]).validate_python(
            [run for finding in tables["findings"] for run in finding["learnt"]]
        )
        machines = TypeAdapter(dict[str, dict[str, str]]).validate_python(
            {str(folder): tables["machine"], **tables.get("elsewhere", {})}
        )
        return Earlier(
            [replace(run, origin=run.origin or str(folder), settings=_in_full(run.settings)) for run in runs], machines
        )
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the folder of a bench learning") from error
    except (ValueError, KeyError, TypeError, ValidationError, RecursionError) as error:
        raise ValueError(f"{path} is no file of a bench learning; give the folder of one") from error


def _in_full(settings: str) -> str:
    """Settings with what was not an option yet when they were written, which had its default."""
    try:
        return as_toml(make_config(with_new_names(tomllib.loads(settings))))
    except ValueError:  # options that are none any more: equal to nothing
        return settings


def _first_difference(runs: Sequence[Learnt], lessons: Sequence[Lesson]) -> str:
    """The first setting in which a run differs from the lesson of its name."""
    named = {(*lesson.key, lesson.seed): lesson for lesson in lessons}
    for run in runs:
        if lesson := named.get((*run.key, run.seed)):
            theirs, ours = _flat(run.settings), _flat(lesson.settings)
            for name in sorted(theirs.keys() | ours.keys()):
                there, here = theirs.get(name, "not set"), ours.get(name, "not set")
                if there != here:
                    return f" (first: {name} is {there} there, {here} here)"
    return ""


def _flat(settings: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(settings)
    except tomllib.TOMLDecodeError:
        return {}
    return {f"{section}.{name}": value for section, values in tables.items() for name, value in values.items()}
