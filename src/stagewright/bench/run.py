"""Run a suite: measure what fits this machine in turns, predict the rest where asked to, and leave a folder.

Every repeat of a configuration is a run of `stagewright train` in fresh processes. Configurations take turns (A B C
A B C ...), so that background load meets all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from stagewright.bench.machine import shared_gpu, with_usage
from stagewright.bench.predict import Capacity, local_capacity, predict_config
from stagewright.bench.result import Outcome, Repeat, Row, new_outcome
from stagewright.bench.statistics import Interval, paired_ratio
from stagewright.bench.suite import (
    Configuration,
    SuiteOptions,
    configurations_of,
    devices_of,
    read_suite,
    shipped_names,
)
from stagewright.cluster.catalog import open_cluster
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster
from stagewright.config.sections import Config
from stagewright.config.toml import as_tables
from stagewright.errors import RunFailed, UserError
from stagewright.metrics import IMAGES, MIB, headline_metrics, steady_rate
from stagewright.plan.plan import Plan
from stagewright.planning.predict import IMAGENET
from stagewright.run.train import Result, run
from stagewright.voice import Voice

_OUTPUT = "output.txt"


def run_suite(name: str, options: SuiteOptions, folder: Path, voice: Voice, keep: Callable[[Outcome], None]) -> Outcome:
    """Measure what fits, predict the rest where asked to; `keep` receives the outcome so far after every run."""
    suite, capacity = read_suite(name), local_capacity()
    configs: dict[str, Config] = {}
    rows: dict[str, Row] = {}
    for entry in configurations_of(suite, options):
        config = _config_or_reason(entry, capacity, options)
        if isinstance(config, Config):
            configs[str(entry)] = config
            rows[str(entry)] = blank_row(entry, config, reason="the bench ended before its turn")
        elif options.simulate:
            voice.progress(f"predicting {entry}")
            rows[str(entry)] = _predicted(entry, config, options)
        else:
            rows[str(entry)] = blank_row(entry, entry.resolve(capacity.cluster), reason=config)
    if not configs and not options.simulate:
        row, nearest = next(iter(rows.values())), nearest_suite(capacity)
        other = f"; stagewright bench {nearest} runs here" if nearest and nearest != name else ""
        raise UserError(f"suite {name} does not fit: {row.label} {row.reason}{other}; --simulate predicts it")
    blank: Outcome = new_outcome(Path(name).stem, suite.title, options.repeats, options.steps)

    def outcome(*, is_whole: bool) -> Outcome:
        return replace(blank, rows=tuple(with_speedups(list(rows.values()))), is_whole=is_whole)

    is_shared = any(config.run.share_gpu for config in configs.values())
    with shared_gpu(voice) if is_shared else nullcontext():
        for key, row in run_repeats(rows, configs, options, folder, voice):
            rows[key] = row
            keep(outcome(is_whole=False))
    return outcome(is_whole=True)


def run_repeats(
    rows: Mapping[str, Row], configs: Mapping[str, Config], options: SuiteOptions, folder: Path, voice: Voice
) -> Iterator[tuple[str, Row]]:
    """Run every configuration once per repeat; after each run its row so far. One that fails runs no more."""
    began, done = time.monotonic(), 0
    while options.allows(done, time.monotonic() - began):
        done += 1
        for key, config in configs.items():
            if rows[key].kind != "failed":
                voice.progress(f"repeat {done} of {options.repeats}: {key}")
                yield key, run_once(rows[key], config, folder)


def run_once(row: Row, config: Config, folder: Path) -> Row:
    """Train a configuration, and add what was measured to its row, or its failure."""
    config = replace(config, run=replace(config.run, runs=str(folder)))
    output = folder / f"{_OUTPUT}.draft"
    folder.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        try:
            result = run(config, Console(file=file, width=120))
        except (UserError, RunFailed) as error:
            return replace(row, kind="failed", reason=f"repeat {len(row.repeats) + 1}: {error}")
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # by probing the model; the next ranks need the memory
                torch.cuda.empty_cache()
    output.replace(result.folder / _OUTPUT)
    if not row.repeats:
        lines = (result.folder / _OUTPUT).read_text().splitlines()
        unit = "" if result.unit == IMAGES else result.unit.rate
        steps = tuple(line for line in lines if line.startswith("epoch "))
        row = _with_plan(replace(row, kind="measured", reason="", unit=unit, step_lines=steps), result.plan)
    return with_repeat(row, _repeat(result))


def with_repeat(row: Row, repeat: Repeat) -> Row:
    """The row with one repeat more."""
    row = row.measured((*row.repeats, repeat))
    assert row.rate is not None
    held = [repeat.gpu_memory or repeat.memory for repeat in row.repeats]
    memory = tuple(max(stage) for stage in zip(*held, strict=True)) if all(held) else ()
    return replace(row, memory=memory, epoch_seconds=None if row.unit else IMAGENET / row.rate.value)


def _repeat(result: Result) -> Repeat:
    speed = steady_rate(result.steps, result.plan.batch, {found.batch for found in result.evaluations})
    if speed is None:
        raise UserError("0 timed batches give no speed; train at least 1")
    repeat = Repeat(
        rate=result.unit.of(speed.rate),
        warmup=speed.warmup,
        is_steady=speed.is_steady,
        times=speed.times,
        loss=result.steps[-1].loss,
        metrics=headline_metrics(result.evaluations[-1].metrics) if result.evaluations else {},
        run=result.folder.name,
    )
    return with_usage(repeat, result.folder, result.plan)


def _config_or_reason(configuration: Configuration, capacity: Capacity, options: SuiteOptions) -> Config | str:
    """The options to run here, or why the configuration cannot run."""
    if options.cluster is not None:
        return ""
    if configuration.is_real and options.real is None:
        return "needs --data"
    config = configuration.resolve(capacity.cluster)
    return capacity.shortage(config) or config


def nearest_suite(capacity: Capacity) -> str | None:
    """The shipped suite with the most ranks whose configurations all fit."""
    found: list[tuple[int, str]] = []
    for name in shipped_names():
        suite = read_suite(name)
        entries = configurations_of(suite, SuiteOptions(suite.repeats, suite.steps))
        configs = [entry.resolve(capacity.cluster) for entry in entries]
        if all(capacity.shortage(config) is None for config in configs):
            found.append((max(len(devices_of(config.plan.placement)) for config in configs), name))
    return max(found)[1] if found else None


def blank_row(configuration: Configuration, config: Config, *, reason: str = "") -> Row:
    """The row of a configuration that was not measured, for this reason."""
    return Row(
        configuration.group.name,
        configuration.trial.name,
        configuration.data,
        "left out",
        configuration.is_baseline,
        model=config.model.name,
        mode=config.plan.mode or "",
        precision=config.run.precision,
        batch=config.plan.batch or 0,
        placement=config.plan.placement,
        device=config.run.device,
        options=as_tables(config),
        reason=reason,
    )


def _with_plan(row: Row, plan: Plan) -> Row:
    versions = tuple(stage.versions for stage in plan.stages)
    return replace(row, cuts=plan.cuts, microbatches=plan.microbatches, versions=versions)


def _predicted(configuration: Configuration, reason: str, options: SuiteOptions) -> Row:
    catalog, cluster = _cluster_to_simulate(configuration, options)
    config = configuration.resolve(cluster)
    prediction = predict_config(config, catalog, cluster, loads=configuration.is_real)
    memory = tuple(max(prediction.memory[rank].total for rank in stage.ranks) for stage in prediction.plan.stages)
    reasons = [reason] if reason else []
    if options.cluster is not None and cluster.name != open_cluster(options.cluster)[1].name:
        reasons.append(f"has more devices than {options.cluster}")
    if not prediction.fits:
        reasons.append(f"needs {max(memory) / MIB:,.0f} MiB, a device has {min(prediction.limits) / MIB:,.0f}")
    rate = prediction.images_per_second
    row = replace(
        blank_row(configuration, config, reason="; ".join(reasons)),
        kind="predicted",
        cluster=cluster.name,
        rate=Interval(rate, rate, rate),
        memory=memory,
        epoch_seconds=IMAGENET / rate,
    )
    return _with_plan(row, prediction.plan)


def _cluster_to_simulate(configuration: Configuration, options: SuiteOptions) -> tuple[Catalog, Cluster]:
    """The cluster that the user gives; the group's own where none is given, or where that one has too few devices."""
    own = configuration.group.cluster
    if options.cluster is None and own is None:
        raise UserError(f"group '{configuration.group.name}' names no cluster to simulate; give --cluster NAME")
    catalog, cluster = open_cluster(options.cluster or str(own))
    devices = configuration.trial.devices
    if own is None or own == options.cluster:
        return catalog, cluster
    try:
        if isinstance(devices, int):
            cluster.first(devices)
        else:
            parse_placement(configuration.resolve(cluster).plan.placement, cluster)
    except UserError:
        return open_cluster(own)
    return catalog, cluster


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """Add each row's speedup over its group's baseline on the same data, where both are measured or both predicted."""
    baselines = {(row.group, row.data): row for row in rows if row.is_baseline}
    return [replace(row, speedup=_speedup(row, baselines.get((row.group, row.data)))) for row in rows]


def _speedup(row: Row, baseline: Row | None) -> Interval | None:
    if baseline is None or row.rate is None or baseline.rate is None:
        return None
    if (row.kind, row.unit) != (baseline.kind, baseline.unit):
        return None
    if row.kind == "predicted":
        ratio = row.rate.value / baseline.rate.value
        return Interval(ratio, ratio, ratio)
    count = min(len(row.repeats), len(baseline.repeats))
    ours, theirs = ([repeat.rate for repeat in side.repeats[:count]] for side in (row, baseline))
    return paired_ratio(ours, theirs)
