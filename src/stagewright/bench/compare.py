"""Compare two runs or two benches: which is faster, whether that is significant, and whether they are comparable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from stagewright.bench.result import FILE, Outcome, Row, read_outcome
from stagewright.bench.statistics import Answer, Interval, judge, median_interval, ratio
from stagewright.errors import UserError
from stagewright.metrics import LOSS, format_metric, headline_metrics, metric_label, segments
from stagewright.report.read import Run
from stagewright.run.report import open_run

_SEGMENTS = 10  # per run: long ones, since the times of neighbouring batches depend on each other
_LAST = 10  # batches over which losses are averaged
_SAME = ("model", "batch", "precision", "device", "placement", "cluster", "kind", "unit")  # of rows that are comparable


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure of both sides: images per second, or what the benches measured."""

    what: str
    first: Interval
    second: Interval
    ratio: Interval  # the second over the first
    is_predicted: bool = False
    is_rate: bool = True  # the larger the better

    @property
    def is_significant(self) -> bool:
        return not self.is_predicted and not self.ratio.holds(1.0)

    @property
    def summary(self) -> str:
        """Which side is faster, and whether that is significant."""
        if self.is_predicted:
            return f"predicted: B is {self.ratio.value:.2f} x A"
        spread = f"{self.ratio.value:.2f} x A ({self.ratio.low:.2f} - {self.ratio.high:.2f})"
        if not self.is_significant:
            speeds = self.ratio if self.is_rate else self.ratio.inverse()
            known = "; repeat more often to know whether B is slower" if judge(speeds) is Answer.UNKNOWN else ""
            return f"no significant difference: B is {spread}{known}"
        return f"B is {'faster' if (self.ratio.value > 1) is self.is_rate else 'slower'}: {spread}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides: their speeds, why these are not comparable, and other differences."""

    first: str
    second: str
    pairs: tuple[Pair, ...]
    reasons: tuple[str, ...]  # why a difference in speed would mean nothing; empty where it means something
    notes: tuple[str, ...] = ()
    unit: str = "images/s"

    @property
    def is_comparable(self) -> bool:
        return not self.reasons


def compare(first: Path, second: Path) -> Comparison:
    """Compare two run folders, or two bench folders."""
    are_benches = [(folder / FILE).is_file() for folder in (first, second)]
    if all(are_benches):
        return compare_benches(first.name, second.name, read_outcome(first), read_outcome(second))
    if any(are_benches):
        bench, run = (first, second) if are_benches[0] else (second, first)
        raise UserError(f"{bench} is a bench and {run} is not; compare two runs or two benches")
    return compare_runs(open_run(first), open_run(second))


def compare_runs(first: Run, second: Run) -> Comparison:
    """Compare segments of the batches after each run's warm-up; emulated runs only by their losses and accuracy."""
    notes = [*_learning(first, second), *_differences(_circumstances(first), _circumstances(second))]
    reasons = tuple(_differences(_work(first), _work(second)))
    if emulated := [side for side, run in (("A", first), ("B", second)) if run.is_emulated]:
        why = f"speed: {' and '.join(emulated)} emulated all ranks in one process"
        return Comparison(first.name, second.name, (), (why, *reasons), tuple(notes))
    one, other = _segment_rates(first), _segment_rates(second)
    pair = Pair("throughput", median_interval(one), median_interval(other), ratio(other, one))
    notes.append("one run each: the intervals do not cover how runs vary; stagewright bench repeats runs")
    return Comparison(first.name, second.name, (pair,), reasons, tuple(notes), first.unit.rate)


def _segment_rates(run: Run) -> list[float]:
    speed = run.speed
    if speed is None:
        raise UserError(f"{run.folder}: 0 timed batches give no speed; train at least 1")
    batch = run.unit.of(run.batch)
    return [batch * count / seconds for count, seconds in segments(speed.steady, _SEGMENTS) if seconds]


def _table(run: Run, name: str) -> dict[str, Any]:
    found = run.environment.get(name)
    return found if isinstance(found, dict) else {}


def _work(run: Run) -> dict[str, str]:
    """What must be the same for speeds to be comparable."""
    host, gpus = _table(run, "host"), run.environment.get("gpus")
    names = [str(gpu.get("name")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return {
        "model": run.model,
        "classes": str(run.section("model").get("classes")),
        "image": str(run.section("data").get("image")),
        "batch": str(run.batch),
        "unit": f"{run.unit.rate}, {run.unit.per_sample} per sample",
        "precision": str(run.section("run").get("precision")),
        "device": str(run.section("run").get("device")),
        "machine": f"{host.get('cpu')}, {host.get('cores')} cores{', ' if names else ''}{', '.join(names)}",
    }


def _circumstances(run: Run) -> dict[str, str]:
    """What may differ without making speeds incomparable."""
    return {
        "plan": f"{run.mode} {run.plan.get('placement')}, {run.plan.get('microbatches')} microbatches",
        "data": str(run.section("data").get("source")),
        "optimizer": str(run.section("optimizer").get("name")),
        "lr": str(run.section("optimizer").get("lr")),
        "seed": str(run.section("run").get("seed")),
        "torch": str(_table(run, "libraries").get("torch")),
        "compiled": str(run.section("run").get("compile")),
    }


def _differences(first: dict[str, str], second: dict[str, str]) -> Iterator[str]:
    for name, value in first.items():
        if value != second[name]:
            yield f"different {name}: {value} and {second[name]}"


def _learning(first: Run, second: Run) -> Iterator[str]:
    """Compare the losses of the batches that both trained, and the last evaluation at the same batch."""
    losses = [{step.batch: step.loss for step in run.steps} for run in (first, second)]
    common = sorted(losses[0].keys() & losses[1].keys())
    if common and all(losses[0][batch] == losses[1][batch] for batch in common):
        yield f"losses of all {len(common)} common batches are bit-for-bit equal"
    elif common:
        last = common[-_LAST:]
        means = [fmean(side[batch] for batch in last) for side in losses]
        yield f"loss over batches {last[0] + 1} to {last[-1] + 1}: A {means[0]:.4f}, B {means[1]:.4f}"
    scores = [{evaluated.batch: evaluated for evaluated in run.evaluations} for run in (first, second)]
    if shared := sorted(scores[0].keys() & scores[1].keys()):
        one, other = (side[shared[-1]] for side in scores)
        on = " and ".join(dict.fromkeys((first.evaluated_on, second.evaluated_on)))
        names = [name for name in headline_metrics(one.metrics) if name in other.metrics]
        values = {name: (one.metrics[name], other.metrics[name]) for name in names} or {LOSS: (one.loss, other.loss)}
        for name, (a, b) in values.items():
            shown = f"A {format_metric(name, a, 2)}, B {format_metric(name, b, 2)}"
            yield f"{metric_label(name)} on {on} after batch {shared[-1]}: {shown}"


def compare_benches(first: str, second: str, one: Outcome, other: Outcome) -> Comparison:
    """Compare every configuration that both benches have."""
    theirs = {row.key: row for row in other.rows if row.rate is not None}
    ours = {row.key: row for row in one.rows if row.rate is not None}
    pairs = []
    reasons = [*_differences({"suite": one.suite, "unit": one.unit}, {"suite": other.suite, "unit": other.unit})]
    for key, row in ours.items():
        if key in theirs:
            pairs.append(replace(_row_pair(row, theirs[key]), is_rate=(row.unit or one.unit).endswith("/s")))
            sides = ({name: str(getattr(side, name)) for name in _SAME} for side in (row, theirs[key]))
            reasons += [f"{row.group}, {row.label}: {text}" for text in _differences(*sides)]
    if not pairs:
        raise UserError(f"{first} and {second} have no configuration in common; compare benches of one suite")
    if any(not pair.is_predicted for pair in pairs):
        known = dict.fromkeys([*one.machine, *other.machine])
        names = [name for name in known if name == "processor" or name.startswith("GPU")]
        machines = ({name: side.machine.get(name, "none") for name in names} for side in (one, other))
        reasons += _differences(*machines)
    missing = [row.label for key, row in (ours | theirs).items() if key not in ours or key not in theirs]
    notes = [f"only in one of them: {label}" for label in missing]
    return Comparison(first, second, tuple(pairs), tuple(reasons), tuple(notes), one.unit)


def _row_pair(row: Row, other: Row) -> Pair:
    assert row.rate is not None and other.rate is not None
    what = ", ".join(filter(None, (row.group, row.label, row.unit)))
    if not (row.repeats and other.repeats):
        value = other.rate.value / row.rate.value
        return Pair(what, row.rate, other.rate, Interval(value, value, value), is_predicted=True)
    ours, theirs = ([repeat.rate for repeat in side.repeats] for side in (other, row))
    return Pair(what, row.rate, other.rate, ratio(ours, theirs))


def describe(comparison: Comparison) -> dict[str, Any]:
    """The comparison as one JSON object."""
    found = asdict(comparison) | {"is_comparable": comparison.is_comparable}
    for pair, table in zip(comparison.pairs, found["pairs"], strict=True):
        table |= {"is_significant": pair.is_significant, "verdict": pair.summary}
    return found
