"""A run in a few sentences: how fast it was, where its time went, what it learnt and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagewright.errors import printable
from stagewright.events import fits
from stagewright.metrics import MIB, format_metric, is_lower_better, metric_label, metric_words, speed_words
from stagewright.report.charts import format_number, format_seconds
from stagewright.report.page import Summary
from stagewright.report.read import Run
from stagewright.report.timeline import busy_shares

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
    done = run.steps[-1].batch + 1
    own = run.own_steps
    rate = f", {speed_words(run.images_per_second, run.steady_steps, run.unit)}"
    size = f"{run.unit.of(run.batch):,} {run.unit.name}"
    what = f"{run.model}, {run.mode} {run.shape}"
    if run.summary is not None and own:
        first = own[0].batch + 1
        after = f"step {done:,}" if first == done else f"steps {first:,}-{done:,}"
        which = _count(done, "step") if first == 1 else after
        return f"{what}: {which} of {size}{rate}, in {format_seconds(_spent(run))}."
    steps = f"{done:,} of {_count(run.batches, 'step')}" if run.batches else _count(done, "step")
    return f"{what}: not finished; {steps} of {size} so far{rate}."


def _spent(run: Run) -> float:
    """Seconds that the steps since the last resume took."""
    before = len(run.steps) - len(run.own_steps)
    return run.steps[-1].seconds - (run.steps[before - 1].seconds if before else 0.0)


def resume_sentence(run: Run) -> Iterator[str]:
    """The checkpoint that a run was resumed from, and the plans of its earlier steps."""
    if not run.resumes:
        return
    checkpoint = Path(run.resumes[-1].checkpoint)
    others = dict.fromkeys(past.plan for past in run.resumes if past.plan != f"{run.mode} {run.shape}")
    plans = f"; earlier steps ran under {', '.join(others)}" if others else ""
    yield f"Resumed from {checkpoint.parent.parent.name} at step {checkpoint.name}{plans}."


def _prediction(run: Run) -> Iterator[str]:
    speed, predicted = run.images_per_second, run.predicted
    if speed and predicted:
        shown = f"{format_number(run.unit.of(predicted))} {run.unit.rate}"
        if run.is_emulated:
            yield f"On real devices, {shown} are predicted."
            return
        off = predicted / speed - 1
        word = "above" if off > 0 else "below"
        yield f"The prediction was {shown}, {abs(off):.1%} {word} the measured speed."


def busy_sentences(run: Run) -> Iterator[str]:
    """Which rank is busiest, and what that means for the others."""
    if run.is_emulated:
        yield "All ranks ran in one process (--emulate): the speed says nothing about real devices."
        return
    shares = busy_shares(run)
    if shares is None:
        return
    if len(shares) == 1:
        yield f"The only rank computes {shares[0]:.0%} of the time."
        return
    most, bubble = max(shares), 1 - sum(shares) / len(shares)
    yield (
        f"The busiest is {run.rank_map.labels[shares.index(most)]}: it computes {most:.0%} of the time. Over all "
        f"ranks, {bubble:.0%} of the time is not spent computing."
    )
    if most < _BOTTLENECK:
        yield "No rank is busy all the time: messages, data or other processes delay the pipeline."
    elif bubble > 0.2:
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
        on = f"{last.samples:,} samples of the {run.evaluated_on}"
        yield f"Evaluated after step {last.batch:,} on {on}: {values}."
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
        return
    metric = run.metric
    found = [(e.metrics[metric], e.batch) for e in run.evaluations if metric in e.metrics] if metric else []
    if metric and found:
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
        yield f"Replaced {_count(run.replaced, 'bad record')}; log.txt and metrics.jsonl name which."
    if run.restarts:
        last = run.restarts[-1]
        times = "once" if len(run.restarts) == 1 else f"{len(run.restarts)} times"
        yield f"Ranks had to be restarted {times}, last after step {last.batch:,}: {last.cause}"


def _machine(run: Run) -> Iterator[str]:
    """What the monitor saw that a reader should know before trusting the numbers."""
    samples = run.own_usage
    peaks = peak_memory(run)
    if peaks:
        rank = max(peaks, key=lambda rank: peaks[rank])
        most = f"{format_number(peaks[rank] / MIB)} MiB"
        if run.is_emulated:
            yield f"The process with all ranks used at most {most}."
        else:
            yield f"{upper_first(run.label(rank))} used the most memory: {most}."
    throttled = {(gpu.index, reason) for sample in samples for gpu in sample.gpus for reason in gpu.throttled}
    if throttled:
        parts = [f"GPU {index} ({reason})" for index, reason in sorted(throttled)]
        yield f"Throttled: {', '.join(parts)}."
    if any(gpu.foreign for sample in samples for gpu in sample.gpus):
        yield "Other processes used the same GPUs meanwhile: repeat on an idle machine."


def peak_memory(run: Run) -> dict[int, int]:
    """The peak bytes of each rank: what torch held on its device where known, else resident memory.

    An emulated run is one process, which counts as rank 0.
    """
    peaks: dict[int, int] = {}
    for sample in run.own_usage:
        for rank in sample.ranks:
            held = rank.memory if rank.torch_memory is None else rank.torch_memory
            peaks[rank.rank] = max(peaks.get(rank.rank, 0), held)
    return peaks


def upper_first(text: str) -> str:
    """The text as the start of a sentence."""
    return f"{text[:1].upper()}{text[1:]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
