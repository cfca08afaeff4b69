"""What a study trains: each of its trials once per seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.learning.plain import require_plain
from stagewright.bench.suite import Configuration, Suite, SuiteOptions, Tables, configurations_of, read_suite
from stagewright.config.sections import Config
from stagewright.config.toml import as_toml, make_config, without_unused
from stagewright.errors import UserError

_STUDIES = Path(__file__).parents[1] / "studies"


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """The options of `learning`."""

    study: str | None = None  # a shipped one by name, or a file
    data: str | None = None
    val: str | None = None
    seeds: int = 3
    jobs: int | None = None  # runs at the same time
    target: float | None = None  # of the metric; of accuracies, in percent
    cluster: str | None = None  # times are predicted for it
    is_real: bool = False  # ranks are processes and their time is measured; otherwise runs are emulated
    only: str | None = None
    overrides: Sequence[Tables] = ()
    reuse: Sequence[str] = ()  # folders of earlier studies whose runs are reused


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One trial with one seed, to be trained."""

    configuration: Configuration
    seed: int
    config: Config

    @property
    def key(self) -> tuple[str, str]:
        return (self.configuration.group.name, self.configuration.trial.name)

    @property
    def is_plain(self) -> bool:
        """Whether a plain PyTorch loop trains it."""
        return self.configuration.trial.plain

    @property
    def settings(self) -> str:
        """Every option that decides the result, as text."""
        return as_toml(self.config)

    def __str__(self) -> str:
        return f"{self.configuration.group.name}, {self.configuration.trial.name}, seed {self.seed}"


def open_study(options: StudyOptions) -> Suite:
    """A shipped study, or the file that the user gives."""
    return read_suite(options.study or "learning", _STUDIES, "study")


def trial_runs_of(options: StudyOptions, study: Suite) -> list[TrialRun]:
    """Every trial with every seed, seed by seed, so that runs at the same time are of different trials."""
    _refuse_unused(options, study)
    data = {name: value for name, value in (("source", options.data), ("val", options.val)) if value}
    own: Tables = {"data": data, "run": {"steps": None, "emulate": not options.is_real}}
    of_suite = SuiteOptions(1, study.steps, None, options.only, (*options.overrides, own))
    trial_runs = [
        TrialRun(configuration, seed, _config(configuration, seed))
        for seed in range(options.seeds)
        for configuration in configurations_of(study, of_suite)
    ]
    for trial_run in trial_runs:
        given = trial_run.config.data
        if given.source == "synthetic" and options.data is None:
            raise UserError(
                "learning needs training and validation data; give --data and --val, "
                "such as --data ofrecord:DIR --val ofrecord:DIR, or --data synthetic"
            )
        if given.val is None and given.source != "synthetic":
            raise UserError(f"--data {given.source} gives training data only; give --val as well, for validation data")
        if trial_run.is_plain:
            require_plain(trial_run.config)
    return trial_runs


def _refuse_unused(options: StudyOptions, study: Suite) -> None:
    """Reject what a study would ignore."""
    for name, instead in (("repeats", "--seeds"), ("steps", "run.epochs"), ("limit", "run.epochs")):
        if (value := getattr(study, name)) != getattr(Suite, name):
            raise UserError(f"{name} is {value}, but a study trains whole epochs with seeds 0, 1, ...; use {instead}")
    groups = [group.options for group in study.group]
    trials = [trial.options for group in study.group for trial in group.trial]
    for tables in (*options.overrides, study.options, *groups, *trials):
        for name, instead in (("steps", "run.epochs"), ("seed", "--seeds")):
            if name in tables.get("run", {}):
                given = f"run.{name} is {tables['run'][name]}"
                raise UserError(f"{given}, but a study trains whole epochs with seeds 0, 1, ...; use {instead}")
    for group in study.group:
        if "real" in group.data:
            raise UserError(f"group {group.name} has data {', '.join(group.data)}, but a study takes --data and --val")
        for trial in group.trial:
            if trial.devices is not None or trial.batch_a_device is not None:
                raise UserError(
                    f"{group.name}, {trial.name}: devices and batch_a_device are for suites; "
                    "a study takes plan.placement and plan.batch"
                )


def _config(configuration: Configuration, seed: int) -> Config:
    config = make_config(configuration.tables, given=())
    val = config.data.val or (config.data.source if config.data.source == "synthetic" else None)
    return without_unused(replace(config, data=replace(config.data, val=val), run=replace(config.run, seed=seed)))
