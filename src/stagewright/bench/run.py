"""Runs configurations in turns, each time in fresh processes: A B C A B C ... A suite of configurations from its file to an outcome: measured here in turns, or predicted where it does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from stagewright.bench.forecast import Room, devices_of, forecast, here, published_rows
from stagewright.bench.machine import shared_gpu, watched
from stagewright.bench.result import Outcome, PublishedRow, Repeat, Row
from stagewright.bench.statistics import Interval, median_interval, outliers, paired_ratio, steady_speed
from stagewright.bench.suite import Case, SuiteFile, Terms, cases_of, read_suite, shipped_names
from stagewright.cluster.catalog import open_cluster
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import MIB, Catalogue
from stagewright.cluster.topology import Cluster
from stagewright.config.sections import Config
from stagewright.config.toml import as_tables
from stagewright.errors import RunFailed
from stagewright.hardware.environment import environment
from stagewright.plan.plan import Plan
from stagewright.planning.predict import IMAGENET
from stagewright.run.train import Result, run

Tell = Callable[[str], None]
_OUTPUT = "output.txt"


@dataclass
class Turns:
    """What one configuration has done so far."""

    config: Config
    repeats: list[Repeat] = field(default_factory=list)
    plan: Plan | None = None
    step_lines: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Length:
    """How often every configuration is run: so many rounds, fewer where they take longer than there is time."""

    repeats: int
    limit: float | None = None  # seconds

    def allows(self, done: int, spent: float) -> bool:
        """Whether one more round of the same length begins."""
        return done < self.repeats and (not done or self.limit is None or spent * (done + 1) / done <= self.limit)


def run_rounds(
    configs: Mapping[str, Config],
    length: Length,
    folder: Path,
    tell: Tell,
    after: Callable[[Mapping[str, Turns]], None],
) -> dict[str, Turns]:
    """Every configuration once a round; one that fails is left out of later rounds. `after` hears of every run."""
    turns = {name: Turns(config) for name, config in configs.items()}
    began, done = time.monotonic(), 0
    while length.allows(done, time.monotonic() - began):
        done += 1
        for name, turn in turns.items():
            if not turn.failure:
                tell(f"round {done} of {length.repeats}: {name}")
                _take(turn, done, folder)
                after(turns)
    return turns


def _take(turn: Turns, number: int, folder: Path) -> None:
    config = replace(turn.config, run=replace(turn.config.run, runs=str(folder)))
    output = folder / f"{_OUTPUT}.draft"
    folder.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        try:
            result = run(config, Console(file=file, width=120))
        except (ValueError, RunFailed) as error:
            turn.failure = f"round {number}: {error}"
            return
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # by probing the model; the next ranks need the memory
                torch.cuda.empty_cache()
    output.replace(result.folder / _OUTPUT)
    turn.plan = result.plan
    turn.repeats.append(_repeat(result))
    if number == 1:
        lines = (result.folder / _OUTPUT).read_text().splitlines()
        turn.step_lines = tuple(line for line in lines if line.startswith("epoch "))


def _repeat(result: Result) -> Repeat:
    speed = steady_speed(result.steps, result.plan.batch)
    return Repeat(
        rate=speed.rate,
        warmup=speed.warmup,
        is_steady=speed.is_steady,
        times=speed.times,
        loss=result.steps[-1].loss,
        run=result.folder.name,
        **asdict(watched(result.folder, result.plan)),
    )


Keep = Callable[[Outcome], None]


def run_trials(name: str, terms: Terms, folder: Path, tell: Tell, keep: Keep) -> Outcome:
    """Measure what fits, predict the rest where asked to; `keep` hears of every outcome on the way."""
    suite, room = read_suite(name), here()
    cases = {str(case): case for case in cases_of(suite, terms)}
    planned = {key: _planned(case, room, terms) for key, case in cases.items()}
    configs = {key: config for key, config in planned.items() if isinstance(config, Config)}
    settled = {}
    for key, reason in planned.items():
        if isinstance(reason, str):
            if terms.simulate:
                tell(f"predicting {key}")
            settled[key] = (_predicted if terms.simulate else _left_out)(cases[key], room, reason, terms)
    if not configs and not terms.simulate:
        raise ValueError(_does_not_fit(name, list(settled.values()), room))
    blank = _blank(name, suite, terms, published_rows(settled.values(), tell))

    def outcome(turns: Mapping[str, Turns], is_whole: bool) -> Outcome:
        rows = [settled.get(key) or _measured(case, turns[key]) for key, case in cases.items()]
        return replace(blank, rows=tuple(_with_speedups(rows)), is_whole=is_whole)

    is_shared = any(config.run.share_gpu for config in configs.values())
    with shared_gpu(tell) if is_shared else nullcontext():
        length = Length(terms.repeats, terms.limit)
        turns = run_rounds(configs, length, folder, tell, lambda turns: keep(outcome(turns, False)))
    return outcome(turns, True)


def _blank(name: str, suite: SuiteFile, terms: Terms, published: tuple[PublishedRow, ...]) -> Outcome:
    """An outcome without rows: what is known before anything ran."""
    there = environment()
    return Outcome(
        suite=Path(name).stem,
        title=suite.title,
        command=terms.command,
        date=time.strftime("%Y-%m-%d %H:%M"),
        repeats=terms.repeats,
        steps=terms.steps,
        machine=dict(there.rows()),
        cores=there.host.cores,
        rows=(),
        published=published,
        topology="\n".join(there.topology.table()) if there.topology else "",
    )


def _planned(case: Case, room: Room, terms: Terms) -> Config | str:
    """The configuration to run here, or why it can't."""
    if terms.cluster is not None:
        return ""
    if case.is_real and terms.real is None:
        return "needs --data"
    config = case.config(room.cluster)
    return room.lacks(config) or config


def _does_not_fit(name: str, rows: Sequence[Row], room: Room) -> str:
    """What is missing, and the nearest suite that runs here."""
    nearest = nearest_suite(room)
    there = f"; stagewright bench {nearest} runs here" if nearest and nearest != name else ""
    return f"suite {name} does not fit: {rows[0].label} {rows[0].reason}{there}; --simulate predicts it"


def nearest_suite(room: Room) -> str | None:
    """The shipped suite of which most configurations fit whole; the one with the most ranks of several."""
    found: list[tuple[int, str]] = []
    for name in shipped_names():
        suite = read_suite(name)
        cases = cases_of(suite, Terms(suite.repeats, suite.steps))
        configs = [case.config(room.cluster) for case in cases]
        if all(room.lacks(config) is None for config in configs):
            found.append((max(len(devices_of(config.plan.placement)) for config in configs), name))
    return max(found)[1] if found else None


def _row(case: Case, config: Config, **found: object) -> Row:
    return Row(
        group=case.group.name,
        name=case.trial.name,
        data=case.data,
        is_baseline=case.is_baseline,
        model=config.model.name,
        mode=config.plan.mode,
        precision=config.run.precision,
        batch=config.plan.batch,
        placement=config.plan.placement,
        device=config.run.device,
        options=as_tables(config),
        **found,  # type: ignore[arg-type]
    )


def _of_plan(plan: Plan) -> dict[str, object]:
    return {
        "cuts": plan.cuts,
        "microbatches": plan.microbatches,
        "versions": tuple(stage.versions for stage in plan.stages),
    }


def _left_out(case: Case, room: Room, reason: str, terms: Terms) -> Row:
    return _row(case, case.config(room.cluster), kind="left out", reason=reason)


def _predicted(case: Case, room: Room, reason: str, terms: Terms) -> Row:
    """On the cluster asked for, or on the suite's own where that has too few devices or none was asked for."""
    catalogue, cluster = _where(case, terms)
    config = case.config(cluster)
    prediction = forecast(config, catalogue, cluster, loads=case.is_real)
    plan = prediction.plan
    memory = tuple(max(prediction.memory[rank].total for rank in stage.ranks) for stage in plan.stages)
    reasons = [reason] if reason else []
    if terms.cluster is not None and cluster.name != open_cluster(terms.cluster)[1].name:
        reasons.append(f"has more devices than {terms.cluster}")
    if not prediction.fits:
        reasons.append(f"needs {max(memory) / MIB:,.0f} MiB, a device has {min(prediction.limits) / MIB:,.0f}")
    rate = prediction.images_per_second
    return _row(
        case,
        config,
        kind="predicted",
        reason="; ".join(reasons),
        cluster=cluster.name,
        rate=Interval(rate, rate, rate),
        memory=memory,
        epoch_seconds=IMAGENET / rate,
        **_of_plan(plan),
    )


def _where(case: Case, terms: Terms) -> tuple[Catalogue, Cluster]:
    own = case.group.cluster
    if terms.cluster is None and own is None:
        raise ValueError(f"group '{case.group.name}' names no cluster to simulate it on; give --cluster NAME")
    catalogue, cluster = open_cluster(terms.cluster or str(own))
    devices = case.trial.devices
    if own is None or own == terms.cluster:
        return catalogue, cluster
    try:
        if isinstance(devices, int):
            cluster.first(devices)
        else:
            parse_placement(case.config(cluster).plan.placement, cluster)
    except ValueError:
        return open_cluster(own)
    return catalogue, cluster


def _measured(case: Case, turns: Turns) -> Row:
    config = turns.config
    plan = _of_plan(turns.plan) if turns.plan is not None else {}
    if turns.failure and not turns.repeats:
        return _row(case, config, kind="failed", reason=turns.failure)
    if not turns.repeats:
        return _row(case, config, kind="left out", reason="its turn did not come")
    rates = [repeat.rate for repeat in turns.repeats]
    interval = median_interval(rates)
    held = [repeat.gpu_memory or repeat.memory for repeat in turns.repeats]
    memory = tuple(max(stage) for stage in zip(*held, strict=True)) if all(held) else ()
    return _row(
        case,
        config,
        kind="failed" if turns.failure else "measured",
        reason=turns.failure,
        repeats=tuple(turns.repeats),
        rate=interval,
        outliers=outliers(rates),
        memory=memory,
        step_lines=turns.step_lines,
        epoch_seconds=IMAGENET / interval.value,
        **plan,
    )


def _with_speedups(rows: Sequence[Row]) -> list[Row]:
    """Every row beside its group's baseline with the same data, as far as both are measured, or both predicted."""
    baselines = {(row.group, row.data): row for row in rows if row.is_baseline}
    return [replace(row, speedup=_speedup(row, baselines.get((row.group, row.data)))) for row in rows]


def _speedup(row: Row, baseline: Row | None) -> Interval | None:
    if baseline is None or row.rate is None or baseline.rate is None or row.kind != baseline.kind:
        return None
    if row.kind == "predicted":
        ratio = row.rate.value / baseline.rate.value
        return Interval(ratio, ratio, ratio)
    count = min(len(row.repeats), len(baseline.repeats))
    return paired_ratio(
        [repeat.rate for repeat in row.repeats[:count]], [repeat.rate for repeat in baseline.repeats[:count]]
    )
