"""`calibrate` and `published`: fit the catalog's free figures, and how far predictions of held-back rows are off.

With `--rows FILE` it predicts the rows of a file by the shipped calibration instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.calibration.calibrate import Fit, calibration_text, fit, observations
from benchmarks.calibration.published import PublishedRun, predict_run, published_runs
from benchmarks.calibration.reading import Reading, Unknown, read_row
from benchmarks.calibration.rows import read_rows
from benchmarks.calibration.splits import (
    Pair,
    PredictedRow,
    Split,
    all_splits,
    class_errors,
    coverage,
    predict_rows,
    staged_pairs,
    with_hosts,
)
from benchmarks.outcome import Outcome, new_outcome
from stagewright.cluster.catalog import shipped
from stagewright.cluster.specs import Catalog
from stagewright.files import write_text
from stagewright.hardware.rows import Row
from stagewright.metrics import MIB
from stagewright.planning.predict import IMAGENET, Prediction
from stagewright.report.columns import Column, page_table, used
from stagewright.report.live.terminal import print_table, say
from stagewright.report.page import Table
from stagewright.voice import Voice

FILE = "calibration.toml"


def measure(folder: Path, voice: Voice) -> Outcome:
    """Fit everything, evaluate every split, and write the calibration into the folder."""
    observed = observations()
    whole = fit(observed, voice)
    splits = all_splits(voice)
    write_text(folder / FILE, calibration_text(whole, class_errors(splits), observed))
    return make_outcome(whole, splits, staged_pairs(voice))


def make_outcome(whole: Fit, splits: Sequence[Split], pairs: Sequence[Pair]) -> Outcome:
    """The published runs, and the errors and decisions on rows that a fit has not seen."""
    figures: dict[str, float] = {}
    for split in splits:
        figures[f"split {split.seed}: median error of PyTorch rows, %"] = 100 * split.median("pytorch")
        figures[f"split {split.seed}: median error of all {len(split.counted)} rows, %"] = 100 * split.median()
        figures[f"split {split.seed}: worst error of one card or NVLink, %"] = 100 * split.worst_direct
        if split.given:
            figures[f"split {split.seed}: worst error on a host told by one row, %"] = 100 * split.worst_given
    right, count = (sum(column) for column in zip(*(split.orders() for split in splits), strict=True))
    figures[f"orders of {count} pairs that are right, %"] = 100 * right / count
    inside, rows = coverage(splits)
    figures[f"rows of {rows} within their 90 % interval, %"] = 100 * inside / rows
    for pair in pairs:
        figures[f"{pair.name}: predicted over data parallel (measured {pair.measured:.2f})"] = pair.predicted
    figures[f"signs of {len(pairs)} staged pairs that are right"] = sum(pair.is_right for pair in pairs)
    return replace(published_outcome(whole.catalog), suite="calibrate", figures=figures)


def published_outcome(catalog: Catalog | None = None) -> Outcome:
    """The published runs beside their predictions, by the shipped calibration unless another catalog is given."""
    found: dict[str, list[Published]] = {}
    for run in published_runs():
        found.setdefault(run.model, []).append((run, predict_run(run, catalog or shipped())))
    tables = tuple(_published_table(model, found[model]) for model in sorted(found))
    return new_outcome("published", "Published runs, predicted", 1, tables=tables)


Published = tuple[PublishedRun, Prediction]  # by the efficiency of the software that ran it


def _published_table(model: str, found: Sequence[Published]) -> Table:
    bases = {_about_base(one[0]): one for one in reversed(found) if one[0].mode == "dp"}

    def times(one: Published, published: bool) -> float | None:
        """The speedup over data parallel, predicted or published."""
        (run, prediction), base = one, bases.get(_about_base(one[0]))
        if base is None or run.mode == "dp":
            return None
        if published:
            return run.rate / base[0].rate if run.rate and base[0].rate else None
        return prediction.images_per_second / base[1].images_per_second

    def stages(one: Published) -> str:
        memory = one[1].memory
        ends = (memory[0], memory[-1])[: len(one[1].plan.stages)]
        return ", ".join(f"{rank.total / MIB:,.0f}" for rank in ends)

    columns: tuple[Column[Published], ...] = (
        Column("system", lambda one: one[0].system),
        Column("run", lambda one: _run_words(one[0])),
        Column("cluster", lambda one: one[0].cluster + (f" x{one[0].devices}" if one[0].devices else "")),
        Column("images/s, predicted", lambda one: one[1].images_per_second, "{:,.0f}"),
        Column("published", lambda one: one[0].rate, "{:,.0f}"),
        Column("off by", lambda one: one[0].rate and one[1].images_per_second / one[0].rate - 1, "{:+.1%}"),
        Column("epoch s, predicted", lambda one: IMAGENET / one[1].images_per_second, "{:,.1f}"),
        Column("epoch s, published", lambda one: _figures(one[0].epoch_seconds, 1)),
        Column("x dp, predicted", lambda one: times(one, False), "{:.2f}"),
        Column("x dp, published", lambda one: times(one, True), "{:.2f}"),
        Column("MiB by stage, predicted", stages),
        Column("MiB, published", lambda one: _figures(one[0].memory_mib, 0)),
    )
    note = (
        "Predicted with the efficiency of the software that ran it. The fit has seen these runs; how far it is off on "
        "rows that it has not seen is in docs/planning.md."
    )
    return page_table(f"{model}: predicted and published", used(columns, found), found, note=note)


def _about_base(run: PublishedRun) -> tuple[object, ...]:
    """What a run has in common with the data parallel that it is compared with."""
    return run.system, run.cluster, run.devices, run.data


def _run_words(run: PublishedRun) -> str:
    mode = f"{run.mode}, {run.scheduling}" if run.scheduling else run.mode
    batch = run.global_batch or f"{run.microbatch} each"
    return f"{mode} {batch}, {'real' if run.data == 'imagenet' else run.data}, {run.precision}"


def _figures(values: Sequence[float], digits: int) -> str | None:
    return ", ".join(f"{value:,.{digits}f}" for value in values) or None


# --- Rows of a file ---------------------------------------------------------------------------------------------------


def predict_file(path: str, given: str | None = None) -> tuple[list[PredictedRow], list[Unknown]]:
    """The rows of a file with their predictions; the rows of another file tell the budgets of hosts."""
    catalog = shipped()
    rows = read_rows(path)
    if given is not None:
        read = [read_row(row, catalog) for row in read_rows(given)]
        catalog = with_hosts(
            catalog, [reading for reading in read if isinstance(reading, Reading) and reading.is_staged]
        )
    return predict_rows(rows, catalog, observations())


def as_json(rows: Sequence[PredictedRow], skipped: Sequence[Unknown]) -> dict[str, Any]:
    """The rows as `--json` has them."""
    return {
        "rows": [_described(row) for row in rows],
        "skipped": [{**_about(unknown.row), "why": unknown.why} for unknown in skipped],
    }


def _about(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("source", "software", "hardware", "model", "gpus")}


def _described(row: PredictedRow) -> dict[str, Any]:
    low, high = row.bounds(shipped().errors)
    return {
        **_about(row.row),
        "predicted": row.predicted,
        "measured": row.row.images_per_second,
        "low": low,
        "high": high,
        "class": str(row.evidence),
    }


def _of(row: PredictedRow) -> str:
    about = f"{row.row.model} {row.row.precision} {row.row.batch_per_gpu}, {row.row.software[:24]}"
    return f"{row.row.gpus} x {row.row.hardware}, {about}"


_COLUMNS: tuple[Column[PredictedRow], ...] = (
    Column("row", _of, is_text=True, wraps=True),
    Column("measured", lambda row: row.row.images_per_second, "{:,.0f}"),
    Column("predicted", lambda row: row.predicted, "{:,.0f}"),
    Column("90 %", lambda row: "{:,.0f}-{:,.0f}".format(*row.bounds(shipped().errors))),
    Column("off by", lambda row: row.error, "{:+.1%}"),
    Column("class", lambda row: row.evidence, is_text=True),
)


def show_rows(console: Console, rows: Sequence[PredictedRow], skipped: Sequence[Unknown]) -> None:
    """Every row, then errors, coverage and orders by class of evidence, and what was skipped."""
    print_table(console, _COLUMNS, rows)
    classes = defaultdict(list)
    for row in rows:
        classes[str(row.evidence)].append(row)
    for name, found in {**classes, "all": list(rows)}.items():
        split = Split(0, 0, tuple(found), frozenset(), frozenset(), ())
        inside = sum(row.is_covered(shipped().errors) for row in found)
        right, pairs = split.orders()
        say(
            console,
            f"{name}: {len(found)} rows, median error {split.median():.1%}, "
            f"worst {max((abs(row.error) for row in found), default=0.0):.1%}, {inside} within their interval, "
            f"{right} of {pairs} pairs of one model in the measured order",
        )
    for unknown in skipped:
        say(console, f"skipped: {unknown.row.gpus} x {unknown.row.hardware}, {unknown.row.model}: {unknown.why}")
