"""Commands that search for the fastest plan.

`plan` shows the candidates on one cluster with what limits each; `value` compares the best plans of several clusters by
speed, price, power and memory.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from stagewright.cluster.catalog import price_source
from stagewright.cluster.placement import format_placement
from stagewright.cluster.specs import Catalog, calibration_note
from stagewright.cluster.topology import Cluster
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.metrics import GIB, MIB, format_rate
from stagewright.plan.estimate import Setting
from stagewright.plan.make import PLAN_FORMAT
from stagewright.plan.plan import Mode, Plan
from stagewright.plan.stability import Motion, stability_warning, stable_limit
from stagewright.planning.build import BUBBLE_GOAL, idle_warning
from stagewright.planning.compare import Comparison, compare, interval, setting_evidence
from stagewright.planning.planner import Candidate, Choice, choose, explain
from stagewright.planning.predict import IMAGENET, link_use, predict, stage_costs
from stagewright.planning.traced import rate_of
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import open_console, plain_table, print_rows, say
from stagewright.report.page import Page, Table
from stagewright.run.plan import Asked, Progress, ask, is_for_train, plan_options, read_setting, search
from stagewright.run.report import make_prediction_page, write_page

_LEAST_STEPS = 12  # that a plan is trained to be timed
_HOURS = 24 * 365
_HOST = "by host"  # the column of an unknown host's speeds
_LEGEND = {
    "M": "microbatches",
    "lag": "updates behind, by stage",
    "90 %": "interval",
    _HOST: "slow to fast",
    "x dp": "over data parallel",
    "MiB": "of the fullest rank",
}
_REST_WATTS = 150.0  # of a machine beside its cards, where nobody says


def run(parsed: argparse.Namespace) -> None:
    if parsed.try_ and parsed.cluster is not None:
        raise UserError(f"--try trains on this machine but --cluster is {parsed.cluster}; leave --cluster out")
    console = open_console(stderr=parsed.json)
    with ProgressLine(f"planning {parsed.model}") as progress:

        def announce(text: str) -> None:
            progress.clear()
            say(console, text)

        asked = ask(parsed, progress, announce=announce)
        choice = search(parsed, asked, progress)
        comparison = compare(choice, asked.setting, asked.catalog, measured=asked.is_measured)
        tried = _try(parsed, asked, choice, progress) if parsed.try_ else ()
    if tried:
        choice = decide(choice, tried)
        comparison = compare(choice, asked.setting, asked.catalog, measured=asked.is_measured)
    explained = explain(asked.setting, choice.best.plan, parsed.explain) if parsed.explain else None
    found = _as_json(parsed, asked, choice, comparison, explained, tried)
    if parsed.output:
        write_text(parsed.output, json.dumps(_plan_file(parsed, asked, choice, found), indent=1))
    if parsed.report:
        write_page(_page(parsed, asked, choice, comparison), Path(parsed.report))
    if parsed.json:
        print(json.dumps(found))
        return
    show(console, parsed, asked, choice, comparison, explained, tried)


# --- Training the best few --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was trained for a while."""

    index: int
    measured: float | None  # images per second
    why: str = ""  # it failed


def _try(parsed: argparse.Namespace, asked: Asked, choice: Choice, progress: Progress) -> tuple[Tried, ...]:
    """Train the best few for about a minute each on this machine, in fresh processes."""
    found = []
    for index, candidate in enumerate(choice.candidates[: parsed.try_]):
        plan = candidate.plan
        steps = round(parsed.minutes * 60 * candidate.prediction.images_per_second / plan.batch)
        progress(f"training {plan.mode} {plan.shape} for {parsed.minutes:g} min")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            file.write_text(json.dumps(plan.describe()))
            words = [*_train_words(parsed, asked), "--device", asked.device, "--precision", asked.setting.precision]
            words += ["--plan", str(file), "--threads", str(asked.threads)]
            command = [
                sys.executable,
                "-m",
                "stagewright",
                *words,
                "--steps",
                str(max(_LEAST_STEPS, steps)),
                "--runs",
                folder,
                "--json",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            found.append(Tried(index, None, _last_line(done.stderr) or f"exit code {done.returncode}"))
        else:
            found.append(Tried(index, json.loads(done.stdout.splitlines()[-1])["images_per_second"]))
    return tuple(found)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


def decide(choice: Choice, tried: Sequence[Tried]) -> Choice:
    """The choice with the plan first that was fastest when it was trained."""
    done = [one for one in tried if one.measured is not None]
    if not done:
        return choice
    fastest = max(done, key=lambda one: one.measured or 0.0)
    order = [choice.candidates[fastest.index], *(c for i, c in enumerate(choice.candidates) if i != fastest.index)]
    return replace(choice, candidates=tuple(order), decided=True)


# --- The command that trains a plan -----------------------------------------------------------------------------------


def _train_words(parsed: argparse.Namespace, asked: Asked) -> list[str]:
    """The options of `train` that a plan does not hold."""
    words = ["train", "--model", parsed.model]
    for flag, value in (("--image", parsed.image), ("--classes", parsed.classes), ("--freeze", parsed.freeze)):
        words += [flag, str(value)] if value is not None else []
    if parsed.optimizer != "sgd":
        words += ["--optimizer", parsed.optimizer]
    return words


def train_command(parsed: argparse.Namespace, asked: Asked, plan: Plan) -> str:
    """The command that trains a plan, in one line; without a plan file the plan is spelled out."""
    words = ["stagewright", *_train_words(parsed, asked)]
    device = ["--device", asked.device, "--precision", asked.setting.precision]
    if parsed.output:
        return shlex.join([*words, *device, "--plan", parsed.output])
    return shlex.join([*words, *plan_options(plan, asked.device, asked.setting.precision, asked.threads)])


def _plan_file(parsed: argparse.Namespace, asked: Asked, choice: Choice, found: dict[str, Any]) -> dict[str, Any]:
    """The whole experiment: the plan, what it is of and for, and what was predicted."""
    cluster = asked.setting.cluster
    best = choice.candidates.index(choice.best)
    return {
        "format": PLAN_FORMAT,
        "plan": choice.best.plan.describe(),
        "experiment": {
            "model": parsed.model,
            "image": parsed.image,
            "classes": parsed.classes,
            "freeze": parsed.freeze,
            "device": asked.device,
            "precision": asked.setting.precision,
            "optimizer": parsed.optimizer,
            "cluster": cluster.name,
            "devices": [str(device) for device in cluster.devices],
            "profile": asked.profile,
        },
        "prediction": found["candidates"][best],
        "evidence": found["evidence"],
        "command": found["command"],
    }


def _page(parsed: argparse.Namespace, asked: Asked, choice: Choice, comparison: Comparison) -> Page:
    """The page of the chosen plan: every candidate, then its timeline, memory by part and links."""
    best = choice.best
    drawn = predict(best.plan, asked.setting, draws=True)
    name = f"{parsed.model} on {asked.setting.cluster.name}, {asked.setting.precision}"
    page = make_prediction_page(name, drawn)
    rows = tuple(
        (
            f"{c.plan.mode} {c.plan.shape}{_marks(parsed, asked, choice, c)}",
            str(c.plan.microbatches),
            ",".join(str(stage.versions - 1) for stage in c.plan.stages),
            format_rate(c.prediction.images_per_second),
            str(own),
            f"{c.speedup:.2f}",
            c.why,
        )
        for c, own in zip(choice.candidates, comparison.intervals, strict=True)
    )
    columns = ("plan", "microbatches", "lag", rate_of(parsed.model), "90 % interval", "x data parallel", "why")
    links = tuple(
        (link, f"{seconds * 1e3:.2f}", f"{share:.0%}") for link, seconds, share in link_use(drawn, asked.setting)
    )
    blocks = [*page.blocks, Table("Candidates", columns, rows)]
    if links:
        blocks.append(Table("Links, messages of one batch", ("link", "ms", "of the batch"), links))
    return replace(page, blocks=tuple(blocks))


def _own_choice(parsed: argparse.Namespace, asked: Asked, choice: Choice) -> Candidate | None:
    """Which of the candidates `train` chooses by itself, if it chooses from them: none whose weights lag."""
    return choice.without_lag if is_for_train(parsed, asked) else None


def _marks(parsed: argparse.Namespace, asked: Asked, choice: Choice, candidate: Candidate) -> str:
    """On a page: which plan is chosen, and which `train` chooses by itself."""
    marks = ["chosen"] if candidate is choice.best else []
    marks += ["train's own choice"] if candidate is _own_choice(parsed, asked, choice) else []
    return f" ({', '.join(marks)})" if marks else ""


def _as_json(
    parsed: argparse.Namespace,
    asked: Asked,
    choice: Choice,
    comparison: Comparison,
    explained: dict[str, Any] | None,
    tried: Sequence[Tried],
) -> dict[str, Any]:
    setting = asked.setting
    return {
        "model": parsed.model,
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
        "best": choice.candidates.index(choice.best),
        "winner": choice.candidates.index(choice.best) if comparison.has_winner or choice.decided else None,
        "rivals": [choice.candidates.index(rival) for rival in comparison.rivals],
        "own": None if (own := _own_choice(parsed, asked, choice)) is None else choice.candidates.index(own),
        "measure": None if choice.decided else "; ".join(comparison.advice(choice, parsed.model)) or None,
        "candidates": [
            {
                **candidate.prediction.describe(),
                "low": own.low,
                "high": own.high,
                "slow_host": own.slow_host,
                "fast_host": own.fast_host,
                "speedup": candidate.speedup,
                "why": candidate.why,
                "stages": stage_costs(candidate.prediction, setting),
                "links": [
                    {"link": link, "seconds": seconds, "share": share}
                    for link, seconds, share in link_use(candidate.prediction, setting)
                ],
            }
            for candidate, own in zip(choice.candidates, comparison.intervals, strict=True)
        ],
        "refused": list(choice.refused),
        "unprofiled": list(choice.unprofiled),
        "lags": [
            {"lag": lag, "images_per_second": found.images_per_second, "bubble": found.steady.bubble}
            for lag, found in enumerate(choice.lags)
        ],
        "tried": [{"candidate": one.index, "images_per_second": one.measured, "failed": one.why} for one in tried],
        "command": train_command(parsed, asked, choice.best.plan),
        "calibration": None if asked.is_measured else device_note(parsed, [setting]),
        "remarks": _warnings(parsed, choice),
        **({"unit": explained} if explained else {}),
        **_stability(parsed, choice),
    }


def show(
    console: Console,
    parsed: argparse.Namespace,
    asked: Asked,
    choice: Choice,
    comparison: Comparison,
    explained: dict[str, Any] | None,
    tried: Sequence[Tried] = (),
    *,
    has_command: bool = True,
) -> None:
    """Print the candidates, the plan to run, the warnings about it and, with `has_command`, the one that runs it."""
    setting = asked.setting
    say(console, f"{parsed.model} on {setting.cluster.name}, {setting.precision}, batch {asked.batch}")
    if asked.note:
        say(console, asked.note)
    by_host = any(own.slow_host is not None for own in comparison.intervals)
    rows = []
    for candidate, own in zip(choice.candidates, comparison.intervals, strict=True):
        prediction, plan = candidate.prediction, candidate.plan
        hosts = "-".join(format_rate(rate) for rate in (own.slow_host, own.fast_host) if rate is not None)
        rows.append(
            {
                "": "*" if candidate is choice.best else "",
                "plan": f"{plan.mode} {plan.shape}",
                "M": str(plan.microbatches),
                "lag": ",".join(str(stage.versions - 1) for stage in plan.stages),
                rate_of(parsed.model): format_rate(prediction.images_per_second),
                "90 %": str(own),
                **({_HOST: hosts or "-"} if by_host else {}),
                "x dp": f"{candidate.speedup:.2f}",
                "waits": f"{prediction.steady.bubble:.0%}",
                "MiB": f"{max(memory.total for memory in prediction.memory) / MIB:,.0f}",
            }
        )
    visible = print_rows(console, rows, left=("", "plan", "lag"), least_needed=(_HOST, "M", "waits", "lag", "MiB"))
    say(console, "; ".join(f"{name}: {words}" for name, words in _LEGEND.items() if name in visible), style="dim")
    for candidate in choice.candidates:
        mark = "*" if candidate is choice.best else " "
        say(console, f"{mark} {candidate.plan.mode} {candidate.plan.shape}: {candidate.why}")
    for line in choice.refused:
        say(console, f"  does not fit: {line}")
    if choice.unprofiled:
        sizes = ",".join(map(str, choice.unprofiled))
        say(
            console,
            f"  not tried: microbatches of {sizes} samples; the profile does not cover them (profile --samples)",
        )
    for one in tried:
        shown = f"failed: {one.why}" if one.measured is None else f"{format_rate(one.measured)} {rate_of(parsed.model)}"
        say(console, f"trained {_name(choice, one)}: {shown}")
    _show_choice(console, parsed, asked, choice, comparison)
    if explained:
        _show_unit(console, explained)
    if has_command:
        own_choice = _own_choice(parsed, asked, choice)
        if own_choice is not None and not choice.best.plan.is_synchronous:
            rate = f"{format_rate(own_choice.prediction.images_per_second)} {rate_of(parsed.model)}"
            plain, best = f"{_name_of(own_choice)} ({rate})", _name_of(choice.best)
            say(console, f"train by itself avoids lag and would take {plain}; the command below takes {best}")
        say(console, f"train it: {train_command(parsed, asked, choice.best.plan)}")


def _name(choice: Choice, one: Tried) -> str:
    order = sorted(choice.candidates, key=lambda c: (-c.prediction.images_per_second, len(c.plan.stages)))
    return _name_of(order[one.index])


def _name_of(candidate: Candidate) -> str:
    return f"{candidate.plan.mode} {candidate.plan.shape}"


def _show_choice(
    console: Console, parsed: argparse.Namespace, asked: Asked, choice: Choice, comparison: Comparison
) -> None:
    best = choice.best
    close = "" if best is choice.fastest else " (fewer stages, within 3 % of the fastest)"
    cuts = f", cut before {', '.join(best.plan.cuts)}" if best.plan.cuts else ""
    gain = f"{best.speedup:.2f} x plain data parallel" if best.plan.mode != "dp" else "plain data parallel"
    if choice.decided:
        say(console, f"fastest when trained: {best.plan.mode} {format_placement(best.plan.placement)}{cuts}")
    else:
        named = "run" if comparison.has_winner else "first choice"
        say(console, f"{named} {best.plan.mode} {format_placement(best.plan.placement)}{cuts}: {gain}{close}")
        say(console, *comparison.advice(choice, parsed.model))
    if choice.lags:
        say(console, _lag_line(choice, rate_of(parsed.model)))
    if not asked.is_measured and (note := device_note(parsed, [asked.setting])):
        say(console, note)
    for warning in (*_warnings(parsed, choice), _stability(parsed, choice).get("warning")):
        if warning:
            say(console, f"warning: {warning}")


def _lag_line(choice: Choice, rate: str) -> str:
    """The speed of the plan to run at every lag."""
    own = max(stage.versions for stage in choice.best.plan.stages) - 1
    parts = [
        f"{lag}{' (this plan)' if lag == own else ''}: {format_rate(found.images_per_second)} {rate}, "
        f"waits {found.steady.bubble:.0%}"
        for lag, found in enumerate(choice.lags)
    ]
    return f"at --staleness {'; '.join(parts)}"


def _warnings(parsed: argparse.Namespace, choice: Choice) -> list[str]:
    """Warnings if the given number of microbatches leaves devices idle."""
    if parsed.microbatches is None:  # the search has tried several
        return []
    best = choice.best
    least = min((found.steady.bubble for found in choice.lags), default=0.0)
    waiting = (
        f"ranks would wait {best.prediction.steady.bubble:.0%} of the time; without --microbatches "
        f"{parsed.microbatches} other numbers are tried"
    )
    return [*filter(None, [idle_warning(best.plan)]), *([waiting] if least > BUBBLE_GOAL else [])]


def _stability(parsed: argparse.Namespace, choice: Choice) -> dict[str, Any]:
    """The largest stable learning rate at the best plan's lag, if a learning rate is given and the optimizer is SGD."""
    if parsed.lr is None or parsed.optimizer != "sgd":
        return {}
    lag = max(stage.versions for stage in choice.best.plan.stages) - 1
    motion = Motion(parsed.momentum, lag, parsed.predict, parsed.nesterov)
    takes_staleness = choice.best.plan.mode is Mode.STALE
    warning = stability_warning(motion, parsed.lr, takes_staleness=takes_staleness)
    return {"stable_limit": stable_limit(motion), "warning": warning}


def _show_unit(console: Console, unit: dict[str, Any]) -> None:
    say(
        console,
        f"{unit['unit']} ({unit['kind']}) is in stage {unit['stage']}: forward {unit['forward'] * 1e3:.3f} ms, "
        f"backward {unit['backward'] * 1e3:.3f} ms for {unit['samples']} samples, {unit['share']:.1%} of the model",
    )
    say(
        console,
        f"  {unit['parameters'] * 4 / MIB:,.1f} MiB of weights, keeps {unit['saved'] / MIB:,.1f} MiB; a cut before it "
        f"carries {unit['cut_before'] / MIB:,.2f} MiB, behind it {unit['cut_behind'] / MIB:,.2f} MiB per microbatch",
    )


def run_value(parsed: argparse.Namespace) -> None:
    if not parsed.cluster:
        raise UserError("no cluster: give --cluster once for each to compare")
    prices = dict(_price(text) for text in parsed.price)
    with ProgressLine(f"reading {parsed.model}") as progress:
        read = [read_setting(parsed, text)[1:] for text in parsed.cluster]
        settings = [setting for _, setting in read]
        _require_priced(prices, settings)
        rows = []
        for catalog, setting in read:
            progress(f"planning {parsed.model} on {setting.cluster.name}")
            rows.append(_value_row(parsed, setting, catalog, prices))
    even = _break_even(rows[0], rows[1]) if len(rows) == 2 else None
    note = device_note(parsed, settings)
    if parsed.json:
        found = {"model": parsed.model, "precision": settings[0].precision, "clusters": rows, "calibration": note}
        print(json.dumps(found | {"kwh": parsed.kwh, "break_even": even}))
        return
    console = open_console()
    say(console, f"{parsed.model}, {settings[0].precision}, batch {parsed.batch}")
    columns = ("cluster", "plan", "lag", "images/s", "90 %", "GiB")
    table = plain_table(*columns, left=("cluster", "plan"), no_wrap={*columns} - {"plan"})
    money_columns = ("cluster", "USD", "W", "images/s/USD", "images/s/W", "epoch USD", "year USD")
    money = plain_table(*money_columns, left=("cluster",), no_wrap=money_columns)
    for row in rows:
        table.add_row(
            row["cluster"],
            row["plan"],
            str(row["lag"]),
            format_rate(row["images_per_second"]),
            f"{format_rate(row['low'])}-{format_rate(row['high'])}",
            f"{row['memory_gib']:.0f}",
        )
        money.add_row(
            row["cluster"],
            _shown(row["usd"], "{:,.0f}"),
            _shown(row["watts"], "{:,.0f}"),
            _shown(row["per_dollar"], "{:.2f}"),
            _shown(row["per_watt"], "{:.2f}"),
            _shown(row["epoch_usd"], "{:.3f}"),
            _shown(row["year_usd"], "{:,.0f}"),
        )
    console.print(table)
    console.print(money)
    for row in rows:
        for price in row["prices"]:
            say(console, price, style="dim")
    say(console, f"electricity at {parsed.kwh:g} USD a kWh; an epoch is of ImageNet, a year is all of it", style="dim")
    if even:
        say(console, even["sentence"])
    if note:
        say(console, note)


def _price(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        usd = float(value)
    except ValueError:
        usd = -1.0
    if not name or not 0 < usd < float("inf"):
        raise UserError(f"--price '{text}' is not DEVICE=USD (for example rtx-4090=1800)")
    return name, usd


def _require_priced(prices: dict[str, float], settings: list[Setting]) -> None:
    """Raise for the price of a device that no cluster has: it would change nothing."""
    kinds = {setting.cluster.kind_of(device) for setting in settings for device in setting.cluster.devices}
    for name in prices:
        if name not in kinds:
            raise UserError(
                f"--price names '{name}' but the clusters have {', '.join(sorted(kinds))}; name one of these"
            )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _value_row(
    parsed: argparse.Namespace, setting: Setting, catalog: Catalog, prices: dict[str, float]
) -> dict[str, Any]:
    best = choose(setting, parsed.batch).best
    rate = best.prediction.images_per_second
    own = interval(best.prediction, setting, catalog, measured=False)
    usd, watts, notes = _totals(setting, prices)
    memory = sum(setting.devices(setting.cluster.kind_of(device)).memory for device in setting.cluster.devices) / GIB
    epoch = None if watts is None else IMAGENET / 3.6e6 * watts * parsed.kwh
    return {
        "cluster": setting.cluster.name,
        "plan": f"{best.plan.mode} {best.plan.shape}",
        "lag": max(stage.versions for stage in best.plan.stages) - 1,
        "images_per_second": rate,
        "low": own.low,
        "high": own.high,
        "evidence": str(setting_evidence(setting, measured=False)),
        "usd": usd,
        "watts": watts,
        "per_dollar": rate / usd if usd else None,
        "per_watt": rate / watts if watts else None,
        "epoch_usd": None if epoch is None else epoch / rate,
        "epoch_usd_interval": None if epoch is None else [epoch / own.high, epoch / own.low],
        "year_usd": None if watts is None else watts / 1000 * _HOURS * parsed.kwh,
        "memory_gib": memory,
        "gib_per_thousand_dollars": memory / usd * 1000 if usd else None,
        "prices": notes,
    }


def _break_even(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """After how many ImageNet epochs the box that is cheaper to run has paid for its price, with the interval."""
    if None in (one["usd"], other["usd"], one["epoch_usd"], other["epoch_usd"]):
        return None
    cheap, dear = sorted((one, other), key=lambda row: row["usd"])
    price = dear["usd"] - cheap["usd"]
    saved = cheap["epoch_usd"] - dear["epoch_usd"]
    most = cheap["epoch_usd_interval"][1] - dear["epoch_usd_interval"][0]
    least = cheap["epoch_usd_interval"][0] - dear["epoch_usd_interval"][1]
    epochs = [price / value if value > 0 else None for value in (saved, most, least)]
    if epochs[0] is None:
        perhaps = "" if epochs[1] is None else f", unless errors favour it: then after {epochs[1]:,.0f} epochs"
        cheaper = f"{cheap['cluster']} costs USD {price:,.0f} less, and less to run"
        sentence = f"{cheaper}; {dear['cluster']} never breaks even{perhaps}"
    else:
        last = "never" if epochs[2] is None else f"{epochs[2]:,.0f}"
        sentence = (
            f"{dear['cluster']} costs USD {price:,.0f} more and pays that back in electricity after {epochs[0]:,.0f} "
            f"epochs of ImageNet ({epochs[1]:,.0f} to {last})"
        )
    return {"epochs": epochs[0], "low": epochs[1], "high": epochs[2], "sentence": sentence}


def _totals(setting: Setting, prices: dict[str, float]) -> tuple[float | None, float | None, list[str]]:
    """Dollars and watts of the whole boxes, and the sources of the prices."""
    kinds = [setting.cluster.kind_of(device) for device in setting.cluster.devices]
    usd = [prices.get(kind, setting.devices(kind).usd) for kind in kinds]
    watts = [setting.devices(kind).watts for kind in kinds]
    notes = []
    for kind in sorted(set(kinds)):
        price = prices.get(kind, setting.devices(kind).usd)
        source = "your price" if kind in prices else price_source(kind)
        notes.append(
            f"{kind}: no price; give --price {kind}=USD" if price is None else f"{kind}: USD {price:,.0f}, {source}"
        )
    rest = _rest_of(setting.cluster, prices, notes)
    whole_usd = sum(value for value in usd if value is not None) + rest if all(usd) else None
    own = sum(machine.watts or _REST_WATTS for machine in setting.cluster.machines)
    whole_watts = sum(value for value in watts if value is not None) + own if all(watts) else None
    return whole_usd, whole_watts, notes


def _rest_of(cluster: Cluster, prices: dict[str, float], notes: list[str]) -> float:
    """Dollars of what is beside the cards: the parts of a cluster file, or the usual ones of a home-built box."""
    total = 0.0
    for number, machine in enumerate(cluster.machines):
        parts = dict(machine.parts) or _usual_parts(machine.devices or 1)
        parts |= {name: usd for name, usd in prices.items() if name in parts}
        total += sum(parts.values())
        if number == 0:
            source = "of the cluster file" if machine.parts else "usual in 2023"
            listed = ", ".join(f"{name} {usd:,.0f}" for name, usd in parts.items())
            total_usd = f"USD {sum(parts.values()):,.0f}"
            notes.append(f"{cluster.name}, a machine beside its cards: {total_usd}, {source}: {listed}")
    return total


def _usual_parts(devices: int) -> dict[str, float]:
    """What builders list beside the cards, for a box of so many of them."""
    large = devices > 2
    return {
        "board": 600.0 if large else 200.0,
        "processor": 800.0 if large else 300.0,
        "memory": 100.0 * max(2, devices),
        "power supply": 200.0 * (1 + devices // 3),
        "case": 150.0 if large else 100.0,
        "drives": 150.0,
    }


def device_note(parsed: argparse.Namespace, settings: Sequence[Setting]) -> str | None:
    """A line that names the devices whose speed is calibrated by no measurement or one; None with a profile."""
    if parsed.profile is not None:
        return None
    kinds = [setting.devices(machine.kind) for setting in settings for machine in setting.cluster.machines]
    return calibration_note(kinds, settings[0].precision)
