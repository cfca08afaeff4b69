"""Runs that earlier studies made, which need not be made again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stagewright.bench.learning.lesson import Lesson
from stagewright.bench.learning.runs import Learnt
from stagewright.config import as_toml, make_config

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
    from pydantic import TypeAdapter, ValidationError

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
        return as_toml(make_config(tomllib.loads(settings)))
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
