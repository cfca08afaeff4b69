"""What is trained: every trial of a study, once a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources

from stagewright.bench.suite import Case, SuiteFile, Tables, Terms, cases_of, read_suite
from stagewright.config.sections import Config
from stagewright.config.toml import as_toml, make_config


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What `bench learning` was asked."""

    study: str | None = None  # a file of one's own, instead of the shipped one
    data: str | None = None
    val: str | None = None
    seeds: int = 3
    jobs: int | None = None  # runs at a time
    target: float | None = None  # top-1 that counts as learnt, in percent
    cluster: str | None = None  # whose time is predicted
    is_real: bool = False  # ranks as processes of their own, whose time is measured
    only: str | None = None
    overrides: Sequence[Tables] = ()
    reuse: Sequence[str] = ()  # folders of studies whose runs need not be made again

    def __post_init__(self) -> None:
        for flag, value in (("--seeds", self.seeds), ("--jobs", self.jobs)):
            if value is not None and value < 1:
                raise ValueError(f"{flag} is {value}; give at least 1")
        if self.is_real and self.jobs is not None and self.jobs > 1:
            raise ValueError(f"--jobs is {self.jobs}, but --real measures times, one run at a time; leave one out")
        if self.reuse and self.is_real:
            raise ValueError(
                f"--reuse {self.reuse[0]} takes over runs of another time, but --real compares times; leave one out"
            )
        if self.target is not None and not 0 < self.target <= 100:
            raise ValueError(f"--target is {self.target:g}; give a top-1 in percent, such as 90")


@dataclass(frozen=True, slots=True)
class Lesson:
    """One trial with one seed."""

    case: Case
    seed: int
    config: Config

    @property
    def key(self) -> tuple[str, str]:
        return (self.case.group.name, self.case.trial.name)

    @property
    def settings(self) -> str:
        """All that decides what is learnt, as text."""
        return as_toml(self.config)

    def __str__(self) -> str:
        return f"{self.case.group.name}, {self.case.trial.name}, seed {self.seed}"


def open_study(inquiry: Inquiry) -> SuiteFile:
    """The shipped study, or a user's own."""
    if inquiry.study is not None:
        return read_suite(inquiry.study)
    with resources.as_file(resources.files("stagewright.bench").joinpath("studies/learning.toml")) as path:
        return read_suite(str(path))


def lessons_of(inquiry: Inquiry, study: SuiteFile) -> list[Lesson]:
    """Every lesson, seed by seed, so that what runs at a time is alike."""
    _refuse_unused(inquiry, study)
    terms = Terms(1, study.steps, None, inquiry.only, inquiry.overrides)
    lessons = [
        Lesson(case, seed, _config(case, seed, inquiry))
        for seed in range(inquiry.seeds)
        for case in cases_of(study, terms)
    ]
    for lesson in lessons:
        data = lesson.config.data
        if data.source == "synthetic" and inquiry.data is None:
            raise ValueError(
                "bench learning needs images to learn from and others to be judged by; give --data and --val, "
                "such as --data ofrecord:DIR --val ofrecord:DIR, or --data synthetic"
            )
        if data.val is None and data.source != "synthetic":
            raise ValueError(
                f"--data {data.source} is what modes learn from; give --val as well: others to be judged by"
            )
    return lessons


def _refuse_unused(inquiry: Inquiry, study: SuiteFile) -> None:
    """An error for what a study would ignore."""
    for name, instead in (("repeats", "--seeds"), ("steps", "run.epochs"), ("limit", "run.epochs")):
        if (value := getattr(study, name)) != getattr(SuiteFile, name):
            raise ValueError(f"{name} is {value}, but a study trains whole epochs with seeds from 0; use {instead}")
    groups = [group.options for group in study.group]
    trials = [trial.options for group in study.group for trial in group.trial]
    for tables in (*inquiry.overrides, study.options, *groups, *trials):
        for name, instead in (("steps", "run.epochs"), ("seed", "--seeds")):
            if name in tables.get("run", {}):
                given = f"run.{name} is {tables['run'][name]}"
                raise ValueError(f"{given}, but a study trains whole epochs with seeds from 0; use {instead}")
    for group in study.group:
        if "real" in group.data:
            raise ValueError(f"group {group.name} has data {', '.join(group.data)}, but a study's is --data and --val")
        for trial in group.trial:
            if trial.devices is not None or trial.batch_a_device is not None:
                raise ValueError(
                    f"{group.name}, {trial.name}: devices and batch_a_device are for suites; "
                    "a study takes plan.placement and plan.batch"
                )


def _config(case: Case, seed: int, inquiry: Inquiry) -> Config:
    config = make_config(case.tables)
    source = inquiry.data or config.data.source
    val = inquiry.val or config.data.val or (source if source == "synthetic" else None)
    data = replace(config.data, source=source, val=val)
    run = replace(config.run, seed=seed, steps=None, emulate=not inquiry.is_real)
    return replace(config, data=data, run=run)
