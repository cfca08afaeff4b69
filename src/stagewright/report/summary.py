"""A run in a few sentences: how fast it was, where its time went, what it learnt and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagewright.errors import printable
from stagewright.events import fits
from stagewright.metrics import format_metric, format_rate, is_lower_better, metric_label, metric_words, speed_words
from stagewright.report.figures import busiest_rank, fullest_rank, measured_on, prediction_error, steps_words, waiting
from stagewright.report.page import Summary
from stagewright.report.read import Run
from stagewright.report.timeline import busy_shares
from stagewright.report.words import format_duration, format_share, upper_first

_MOST_METRICS = 6  # in a sentence
_BEST_FIELDS: dict[str, Any] = {"metric": str, "value": float, "batch": int}
_BOTTLENECK = 0.85  # a rank that computes for this share of the time is what the others wait for


def summarize_run(run: Run) -> Summary:
    """What a reader should take away from a run."""
    more = (resume_sentence, _prediction, busy_sentences, _learning, _faults, _machine)
    return Summary((_outcome(run), *(sentence for part in more for sentence in part(run))))


def _outcome(run: Run) -> str:
    if not run.steps:
        return "No step was trained." if run.summary is None else "The run had no steps to train."
    rate = f", {speed_words(run.images_per_second, run.steady_steps, run.unit)}"
    size = f"{run.unit.of(run.batch):,} {run.unit.name}"
    what, steps = f"{run.model}, {run.mode} {run.shape}", steps_words(run)
    if run.summary is not None and run.own_steps:
        return f"{what}: {steps} of {size}{rate}, in {format_duration(run.seconds)}."
    return f"{what}: not finished; {steps} of {size} so far{rate}."


def resume_sentence(run: Run) -> Iterator[str]:
    """The checkpoint that a run was resumed from, and the plans of its earlier steps."""
    if not run.resumes:
        return
    checkpoint = Path(run.resumes[-1].checkpoint)
    others = dict.fromkeys(past.plan for past in run.resumes if past.plan != f"{run.mode} {run.shape}")
    plans = f"; earlier steps ran under {', '.join(others)}" if others else ""
    yield f"Resumed from {checkpoint.parent.parent.name} at step {checkpoint.name}{plans}."


def _prediction(run: Run) -> Iterator[str]:
    if run.predicted:
        shown = f"{format_rate(run.unit.of(run.predicted))} {run.unit.rate}"
        if run.is_emulated:
            yield f"On real devices, {shown} are predicted."
        elif off := prediction_error(run):
            yield f"The prediction was {shown}, {off} the measured speed."


def busy_sentences(run: Run) -> Iterator[str]:
    """Which rank is busiest, and what that means for the others."""
    if run.is_emulated:
        yield "All ranks ran in one process (--emulate): the speed says nothing about real devices."
        return
    if (shares := busy_shares(run)) is None:
        return
    most, share = max(shares), waiting(shares)
    if len(shares) == 1:
        yield f"The only rank computes {format_share(most)} of the time."
        return
    yield (
        f"The busiest is {busiest_rank(run, shares)}: it computes {format_share(most)} of the time. Over all "
        f"ranks, {format_share(share)} of the time is not spent computing."
    )
    if most < _BOTTLENECK:
        yield "No rank is busy all the time: messages, data or other processes delay the pipeline."
    elif share > 0.2:
        yield "The other ranks wait for it: give its stage more devices or fewer layers."


def _learning(run: Run) -> Iterator[str]:
    if len(run.steps) > 1:
        yield f"The loss went from {run.steps[0].loss:.4g} to {run.steps[-1].loss:.4g}."
    if (run.summary or {}).get("diverged"):
        yield "The run diverged: its results are of no use. Try a lower learning rate, a warm-up or clipping."
    if run.evaluations:
        last = run.evaluations[-1]
        words = metric_words(last.metrics)
        more = len(words) - _MOST_METRICS
        values = ", ".join((f"loss {last.loss:.4g}", *words[:_MOST_METRICS], *([f"{more} more"] if more > 0 else ())))
        yield f"Evaluated after step {last.batch:,} on {measured_on(run)}: {values}."
        yield from _best(run)


def _best(run: Run) -> Iterator[str]:
    """The best value of what the run compares (--best), else of the first metric where a later one is worse."""
    summary = run.summary or {}
    if isinstance(early := summary.get("stopped_early"), str):
        yield f"{upper_first(printable(early))}."
    best = summary.get("best")
    if isinstance(best, dict) and all(fits(best.get(name), kind) for name, kind in _BEST_FIELDS.items()):
        kept = " Its checkpoint is kept: RUN/best." if best.get("checkpoint") else ""
        name = printable(best["metric"])
        yield f"Best: {metric_label(name)} {format_metric(name, best['value'])} after step {best['batch']:,}.{kept}"
    elif metric := run.metric:
        found = [(e.metrics[metric], e.batch) for e in run.evaluations if metric in e.metrics]
        value, batch = (min if is_lower_better(metric) else max)(found, key=lambda pair: pair[0])
        if batch != run.evaluations[-1].batch and value != found[-1][0]:
            shown = f"{metric_label(metric)} was best after step {batch:,}: {format_metric(metric, value)}"
            yield f"{upper_first(shown)}."


def _faults(run: Run) -> Iterator[str]:
    skipped = (run.summary or {}).get("skipped_updates")
    if isinstance(skipped, list) and any(skipped):
        parts = [f"{count} of stage {stage}" for stage, count in enumerate(skipped) if count]
        yield f"Updates skipped because of overflow: {', '.join(parts)}."
    if run.replaced:
        yield f"Replaced {run.replaced:,} bad record{'s' * (run.replaced != 1)}; log.txt and metrics.jsonl name which."
    if run.restarts:
        last = run.restarts[-1]
        times = "once" if len(run.restarts) == 1 else f"{len(run.restarts)} times"
        yield f"Ranks had to be restarted {times}, last after step {last.batch:,}: {last.cause}"


def _machine(run: Run) -> Iterator[str]:
    """What the monitor saw that a reader should know before trusting the numbers."""
    samples = run.own_usage
    if found := fullest_rank(run):
        rank, size = found
        if run.is_emulated:
            yield f"The process with all ranks used at most {size} MiB."
        else:
            yield f"{upper_first(run.label(rank))} used the most memory: {size} MiB."
    throttled = {(gpu.index, reason) for sample in samples for gpu in sample.gpus for reason in gpu.throttled}
    if throttled:
        yield f"Throttled: {', '.join(f'GPU {index} ({reason})' for index, reason in sorted(throttled))}."
    if any(gpu.foreign for sample in samples for gpu in sample.gpus):
        yield "Other processes used the same GPUs meanwhile: repeat on an idle machine."
