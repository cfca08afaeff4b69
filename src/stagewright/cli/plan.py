"""`stagewright plan`: search for the fastest plan; show the candidates on one cluster with what limits each."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stagewright.cli.command.command import imported
from stagewright.cluster.placement import format_placement
from stagewright.config.optimizers import has_stable_rate
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.metrics import MIB, format_rate
from stagewright.plan.make import PLAN_FORMAT
from stagewright.plan.stability import Motion, stability_warning, stable_limit
from stagewright.planning.build import BUBBLE_GOAL, idle_warning
from stagewright.planning.compare import Comparison, Interval, compare
from stagewright.planning.planner import Candidate, Choice, explain
from stagewright.planning.predict import link_use, predict, stage_costs
from stagewright.planning.question import Asked, Question, ask, search
from stagewright.report.columns import Column, page_table, used
from stagewright.report.live.terminal import open_console, print_table, say, speaking
from stagewright.report.page import Page, Table
from stagewright.run.report import make_prediction_page, write_page
from stagewright.voice import SILENT, Voice

_LEAST_STEPS = 12  # that a plan is trained to be timed


Ranked = tuple[Candidate, Interval]


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was trained for a while."""

    index: int
    measured: float | None  # images per second
    why: str = ""  # it failed


@dataclass(frozen=True, slots=True)
class Answer:
    """What was asked and what was found: text, JSON and page draw from it."""

    asked: Asked
    choice: Choice
    comparison: Comparison
    tried: tuple[Tried, ...] = ()
    unit: dict[str, Any] | None = None  # that --explain names

    @property
    def ranked(self) -> list[Ranked]:
        """The candidates, each with its interval."""
        return list(zip(self.choice.candidates, self.comparison.intervals, strict=True))

    @property
    def own(self) -> Candidate | None:
        """Which of the candidates `train` chooses by itself, if it chooses from them: none whose weights lag."""
        return self.choice.without_lag if self.asked.is_for_train else None

    def number(self, candidate: Candidate | None) -> int | None:
        return None if candidate is None else self.choice.candidates.index(candidate)

    @property
    def title(self) -> str:
        return f"{self.asked.question.model} on {self.asked.setting.cluster.name}, {self.asked.setting.precision}"

    @property
    def command(self) -> str:
        """The command that trains the plan, in one line; without a plan file the plan is spelled out."""
        words = self.asked.train_words(self.asked.question.output or self.choice.best.plan)
        return shlex.join(["stagewright", "train", *words])


def run(parsed: argparse.Namespace) -> None:
    if parsed.try_ and parsed.cluster is not None:
        raise UserError(f"--try trains on this machine but --cluster is {parsed.cluster}; leave --cluster out")
    with speaking(f"planning {parsed.model}", as_json=parsed.json) as voice:
        asked = ask_model(Question.of("plan", vars(parsed)), voice)
        choice = search(asked, voice)
        tried = _try(asked, choice, parsed.try_, parsed.minutes, voice) if parsed.try_ else ()
    choice = decide(choice, tried)
    comparison = compare(choice, asked.setting, asked.catalog, measured=asked.is_measured)
    unit = explain(asked.setting, choice.best.plan, parsed.explain) if parsed.explain else None
    answer = Answer(asked, choice, comparison, tried, unit)
    found = _as_json(answer)
    if parsed.output:
        write_text(parsed.output, json.dumps(_plan_file(answer, found), indent=1))
    if parsed.report:
        write_page(_page(answer), Path(parsed.report))
    if parsed.json:
        print(json.dumps(found))
    else:
        show(open_console(), answer)


def ask_model(question: Question, voice: Voice = SILENT) -> Asked:
    """A question with all that it leaves open filled in, without torch where the model and the place are known."""
    model = question.known if question.has_place else None
    asked: Asked = imported("run.plan:ask")(question, voice) if model is None else ask(question, model)
    return asked


# --- Training the best few --------------------------------------------------------------------------------------------


def _try(asked: Asked, choice: Choice, most: int, minutes: float, voice: Voice) -> tuple[Tried, ...]:
    """Train the best few for some minutes each on this machine, in fresh processes."""
    found = []
    for index, candidate in enumerate(choice.candidates[:most]):
        plan = candidate.plan
        steps = round(minutes * 60 * candidate.prediction.images_per_second / plan.batch)
        voice.progress(f"training {candidate} for {minutes:g} min")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            file.write_text(json.dumps(plan.describe()))
            words = [*asked.train_words(str(file)), "--steps", str(max(_LEAST_STEPS, steps)), "--runs", folder]
            command = [sys.executable, "-m", "stagewright", "train", *words, "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            found.append(Tried(index, None, last or f"exit code {done.returncode}"))
        else:
            found.append(Tried(index, json.loads(done.stdout.splitlines()[-1])["images_per_second"]))
    return tuple(found)


def decide(choice: Choice, tried: Sequence[Tried]) -> Choice:
    """The choice with the plan first that was fastest when it was trained."""
    done = [one for one in tried if one.measured is not None]
    if not done:
        return choice
    fastest = max(done, key=lambda one: one.measured or 0.0)
    order = [choice.candidates[fastest.index], *(c for i, c in enumerate(choice.candidates) if i != fastest.index)]
    return replace(choice, candidates=tuple(order), decided=True)


def _plan_file(answer: Answer, found: dict[str, Any]) -> dict[str, Any]:
    """The whole experiment: the plan, what it is of and for, and what was predicted."""
    config, setting = answer.asked.question.config, answer.asked.setting
    return {
        "format": PLAN_FORMAT,
        "plan": answer.choice.best.plan.describe(),
        "experiment": {
            "model": config.model.name,
            "image": config.data.image,
            "classes": config.model.classes,
            "freeze": config.model.freeze,
            "optimizer": config.optimizer.name,
            "device": answer.asked.device,
            "precision": setting.precision,
            "cluster": setting.cluster.name,
            "devices": [str(device) for device in setting.cluster.devices],
            "profile": answer.asked.profile,
        },
        "prediction": found["candidates"][found["best"]],
        "evidence": found["evidence"],
        "command": found["command"],
    }


# --- Text, page and JSON ----------------------------------------------------------------------------------------------


def _columns(answer: Answer) -> tuple[Column[Ranked], ...]:
    """What is shown of every candidate; a page shows the columns that have a title there."""
    best = answer.choice.best
    return (
        Column("", lambda one: "*" if one[0] is best else "", is_text=True),
        Column("plan", lambda one: str(one[0]), is_text=True),
        Column("M", lambda one: one[0].plan.microbatches, spare=4, title="microbatches", about="microbatches"),
        Column("lag", lambda one: _lags(one[0]), is_text=True, spare=2, title="lag", about="updates behind, by stage"),
        Column(
            answer.asked.rate, lambda one: one[0].prediction.images_per_second, format_rate, title=answer.asked.rate
        ),
        Column("90 %", lambda one: one[1], title="90 % interval", about="interval"),
        Column("by host", lambda one: _by_host(one[1]), spare=5, about="slow to fast"),
        Column("x dp", lambda one: one[0].speedup, "{:.2f}", title="x data parallel", about="over data parallel"),
        Column("waits", lambda one: one[0].prediction.steady.bubble, "{:.0%}", spare=3),
        Column("MiB", lambda one: _fullest(one[0]) / MIB, "{:,.0f}", spare=1, about="of the fullest rank"),
    )


def _lags(candidate: Candidate) -> str:
    return ",".join(str(stage.versions - 1) for stage in candidate.plan.stages)


def _by_host(own: Interval) -> str | None:
    known = [format_rate(rate) for rate in (own.slow_host, own.fast_host) if rate is not None]
    return "-".join(known) or None


def _fullest(candidate: Candidate) -> float:
    return max(memory.total for memory in candidate.prediction.memory)


def _page(answer: Answer) -> Page:
    """The page of the chosen plan: every candidate, then its timeline, memory by part and links."""
    best, own, setting = answer.choice.best, answer.own, answer.asked.setting

    def marked(one: Ranked) -> str:
        marks = ["chosen"] * (one[0] is best) + ["train's own choice"] * (one[0] is own)
        return f"{one[0]} ({', '.join(marks)})" if marks else str(one[0])

    drawn = predict(best.plan, setting, draws=True)
    page = make_prediction_page(answer.title, drawn)
    columns = (
        Column("plan", marked),
        *(column for column in _columns(answer) if column.title),
        Column("why", lambda one: one[0].why),
    )
    links = tuple((link, f"{seconds * 1e3:.2f}", f"{share:.0%}") for link, seconds, share in link_use(drawn, setting))
    blocks = [*page.blocks, page_table("Candidates", columns, answer.ranked)]
    if links:
        blocks.append(Table("Links, messages of one batch", ("link", "ms", "of the batch"), links))
    return replace(page, blocks=tuple(blocks))


def _as_json(answer: Answer) -> dict[str, Any]:
    asked, choice, comparison = answer.asked, answer.choice, answer.comparison
    setting, best = asked.setting, answer.number(choice.best)
    return {
        "model": asked.question.model,
        "cluster": setting.cluster.name,
        "precision": setting.precision,
        "setting": {
            "batch": asked.batch,
            "device": asked.device,
            "software": setting.software.name,
            "optimizer": setting.optimizer,
            "machines": [{"kind": m.kind, "devices": m.devices, "host": m.host} for m in setting.cluster.machines],
            "profile": asked.profile,
        },
        "evidence": str(comparison.evidence),
        "best": best,
        "winner": best if comparison.has_winner or choice.decided else None,
        "rivals": [answer.number(rival) for rival in comparison.rivals],
        "own": answer.number(answer.own),
        "measure": None if choice.decided else "; ".join(comparison.advice(choice, asked.question.model)) or None,
        "candidates": [
            {
                **candidate.prediction.describe(),
                **asdict(own),
                "speedup": candidate.speedup,
                "why": candidate.why,
                "stages": stage_costs(candidate.prediction, setting),
                "links": [
                    {"link": link, "seconds": seconds, "share": share}
                    for link, seconds, share in link_use(candidate.prediction, setting)
                ],
            }
            for candidate, own in answer.ranked
        ],
        "refused": list(choice.refused),
        "unprofiled": list(choice.unprofiled),
        "lags": [
            {"lag": lag, "images_per_second": found.images_per_second, "bubble": found.steady.bubble}
            for lag, found in enumerate(choice.lags)
        ],
        "tried": [
            {"candidate": one.index, "images_per_second": one.measured, "failed": one.why} for one in answer.tried
        ],
        "command": answer.command,
        "calibration": answer.asked.calibration,
        "remarks": _warnings(answer),
        **({"unit": answer.unit} if answer.unit else {}),
        **_stability(answer),
    }


def show(console: Console, answer: Answer, *, has_command: bool = True) -> None:
    """Print the candidates, the plan to run, the warnings about it and, with `has_command`, the one that runs it."""
    say(console, f"{answer.title}, batch {answer.asked.batch}", *filter(None, [answer.asked.note]))
    print_table(console, used(_columns(answer), answer.ranked), answer.ranked)
    say(console, *_about_candidates(answer), *_about_choice(answer))
    if answer.unit:
        say(console, *_about_unit(answer.unit))
    if has_command:
        say(console, *_about_training(answer))


def _about_candidates(answer: Answer) -> Iterator[str]:
    """Why each is where it is, what was not tried, and how fast those were that were trained."""
    choice = answer.choice
    for candidate in choice.candidates:
        yield f"{'*' if candidate is choice.best else ' '} {candidate}: {candidate.why}"
    yield from (f"  does not fit: {line}" for line in choice.refused)
    if choice.unprofiled:
        sizes = ",".join(map(str, choice.unprofiled))
        yield f"  not tried: microbatches of {sizes} samples; the profile does not cover them (profile --samples)"
    order = sorted(choice.candidates, key=lambda c: (-c.prediction.images_per_second, len(c.plan.stages)))
    for one in answer.tried:
        shown = f"failed: {one.why}" if one.measured is None else f"{format_rate(one.measured)} {answer.asked.rate}"
        yield f"trained {order[one.index]}: {shown}"


def _about_choice(answer: Answer) -> Iterator[str]:
    """The plan to run, how sure that is, its speed at every lag, and what to be warned of."""
    choice, comparison, plan = answer.choice, answer.comparison, answer.choice.best.plan
    where = f"{plan.mode} {format_placement(plan.placement)}"
    where += f", cut before {', '.join(plan.cuts)}" if plan.cuts else ""
    if choice.decided:
        yield f"fastest when trained: {where}"
    else:
        close = "" if choice.best is choice.fastest else " (fewer stages, within 3 % of the fastest)"
        gain = "plain data parallel" if plan.mode == "dp" else f"{choice.best.speedup:.2f} x plain data parallel"
        yield f"{'run' if comparison.has_winner else 'first choice'} {where}: {gain}{close}"
        yield from comparison.advice(choice, answer.asked.question.model)
    if choice.lags:
        yield f"at --staleness {'; '.join(_at_lags(answer))}"
    yield from filter(None, [answer.asked.calibration])
    for warning in (*_warnings(answer), _stability(answer).get("warning")):
        if warning:
            yield f"warning: {warning}"


def _at_lags(answer: Answer) -> Iterator[str]:
    """The speed of the plan to run at every lag."""
    for lag, found in enumerate(answer.choice.lags):
        mine = " (this plan)" if lag == answer.choice.best.plan.lag else ""
        speed = f"{format_rate(found.images_per_second)} {answer.asked.rate}"
        yield f"{lag}{mine}: {speed}, waits {found.steady.bubble:.0%}"


def _warnings(answer: Answer) -> list[str]:
    """Warnings if the given number of microbatches leaves devices idle."""
    given, best = answer.asked.question.config.plan.microbatches, answer.choice.best
    if given is None:  # the search has tried several
        return []
    least = min((found.steady.bubble for found in answer.choice.lags), default=0.0)
    waiting = (
        f"ranks would wait {best.prediction.steady.bubble:.0%} of the time; without --microbatches {given} other "
        "numbers are tried"
    )
    return [*filter(None, [idle_warning(best.plan)]), *([waiting] if least > BUBBLE_GOAL else [])]


def _stability(answer: Answer) -> dict[str, Any]:
    """The largest stable learning rate at the best plan's lag, if a learning rate is given and the limit is known."""
    rate, options, plan = answer.asked.question.rate, answer.asked.question.config.optimizer, answer.choice.best.plan
    if rate is None or not has_stable_rate(options.name):
        return {}
    motion = Motion(options.momentum, plan.lag, options.predict, options.nesterov)
    warning = stability_warning(motion, rate, takes_staleness=plan.mode.preset.has_staleness)
    return {"stable_limit": stable_limit(motion), "warning": warning}


def _about_unit(unit: dict[str, Any]) -> tuple[str, str]:
    return (
        f"{unit['unit']} ({unit['kind']}) is in stage {unit['stage']}: forward {unit['forward'] * 1e3:.3f} ms, "
        f"backward {unit['backward'] * 1e3:.3f} ms for {unit['samples']} samples, {unit['share']:.1%} of the model",
        f"  {unit['parameters'] * 4 / MIB:,.1f} MiB of weights, keeps {unit['saved'] / MIB:,.1f} MiB; a cut before it "
        f"carries {unit['cut_before'] / MIB:,.2f} MiB, behind it {unit['cut_behind'] / MIB:,.2f} MiB per microbatch",
    )


def _about_training(answer: Answer) -> Iterator[str]:
    """The command that trains the plan, and what `train` would choose instead."""
    own, best = answer.own, answer.choice.best
    if own is not None and not best.plan.is_synchronous:
        plain = f"{own} ({format_rate(own.prediction.images_per_second)} {answer.asked.rate})"
        yield f"train by itself avoids lag and would take {plain}; the command below takes {best}"
    yield f"train it: {answer.command}"
