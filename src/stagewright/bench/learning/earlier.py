"""Runs that earlier studies made, which need not be made again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stagewright.bench.anonymise import make_cleaner
from stagewright.bench.learning.lesson import Lesson
from stagewright.bench.learning.runs import Learnt

FILE = "learning.json"


def earlier_runs(folders: Sequence[str], lessons: Sequence[Lesson]) -> list[Learnt]:
    """What studies in `folders` learnt of these lessons: of runs with exactly their settings, under their names here.

    Settings that were anonymised are compared as this machine would anonymise its own.
    """
    clean = make_cleaner()
    asked = {text: lesson for lesson in lessons for text in (clean(lesson.settings), lesson.settings)}
    made: dict[str, Learnt] = {}
    for folder in folders:
        runs = _read(Path(folder) / FILE)
        equal = {asked[run.settings].settings: run for run in runs if run.settings in asked}
        if not equal:
            raise ValueError(
                f"--reuse {folder}: none of its {len(runs)} runs has the settings of one of the {len(lessons)} "
                f"asked for{_first_difference(runs, lessons)}; make the settings equal or leave --reuse out"
            )
        made |= {settings: replace(run, settings=settings, origin=folder) for settings, run in equal.items()}
    return [
        replace(made[lesson.settings], group=lesson.key[0], trial=lesson.key[1])
        for lesson in lessons
        if lesson.settings in made
    ]


def _read(path: Path) -> list[Learnt]:
    from pydantic import TypeAdapter, ValidationError

    try:
        tables: Any = json.loads(path.read_text())
        return TypeAdapter(list[Learnt]).validate_python(
            [run for finding in tables["findings"] for run in finding["learnt"]]
        )
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the folder of a bench learning") from error
    except (ValueError, KeyError, TypeError, ValidationError, RecursionError) as error:
        raise ValueError(f"{path} is no file of a bench learning; give the folder of one") from error


def _first_difference(runs: Sequence[Learnt], lessons: Sequence[Lesson]) -> str:
    """The first setting in which a run differs from the lesson of its name."""
    named = {(*lesson.key, lesson.seed): lesson for lesson in lessons}
    for run in runs:
        if lesson := named.get((*run.key, run.seed)):
            theirs, ours = run.settings.splitlines(), lesson.settings.splitlines()
            for line in theirs:
                if line not in ours:
                    name = line.partition(" = ")[0]
                    here = next((other for other in ours if other.partition(" = ")[0] == name), "not set")
                    return f" (first: {line}, here {here.removeprefix(f'{name} = ')})"
    return ""
