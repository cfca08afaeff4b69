"""Commands that search for the fastest plan.

`plan` shows the candidates on one cluster with what limits each; `value` compares the best plans of several clusters by
speed, price, power and memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from stagewright.cluster.catalog import open_cluster, price_source, shipped
from stagewright.cluster.placement import format_placement
from stagewright.cluster.specs import calibration_note
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.metrics import GIB, MIB
from stagewright.model.cut import Chain
from stagewright.plan.estimate import Setting
from stagewright.plan.make import require_divisible
from stagewright.plan.plan import Mode
from stagewright.plan.stability import Motion, stability_warning, stable_limit
from stagewright.planning.build import BUBBLE_GOAL, idle_warning
from stagewright.planning.planner import Choice, choose, explain
from stagewright.planning.setting import make_setting, trace_model
from stagewright.profile.profile import Profile, read_profile
from stagewright.profile.shapes import Shape
from stagewright.report.live.terminal import plain_table, say


def run(parsed: argparse.Namespace) -> None:
    if parsed.microbatches is not None:
        require_divisible(parsed.batch, parsed.microbatches)
    _, setting = read_setting(parsed, parsed.cluster)
    modes = tuple(Mode(mode) for mode in parsed.mode or ("stale", "sync"))
    errors = Console(stderr=True)
    with errors.status("planning") as status:
        choice = choose(
            setting,
            parsed.batch,
            modes=modes,
            microbatches=parsed.microbatches,
            staleness=parsed.staleness,
            progress=status.update if errors.is_terminal else lambda text: None,
        )
    explained = explain(setting, choice.best.plan, parsed.explain) if parsed.explain else None
    if parsed.output:
        write_text(parsed.output, json.dumps(choice.best.plan.describe(), indent=1))
    if parsed.json:
        notes = {"calibration": device_note(parsed, [setting]), "remarks": _warnings(parsed, choice)}
        print(json.dumps(_as_json(parsed.model, setting, choice, explained) | notes | _stability(parsed, choice)))
        return
    show(Console(), parsed, setting, choice, explained)


def _as_json(model: str, setting: Setting, choice: Choice, explained: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "model": model,
        "cluster": setting.cluster.name,
        "precision": setting.precision,
        "best": choice.candidates.index(choice.best),
        "candidates": [
            {**candidate.prediction.describe(), "speedup": candidate.speedup, "why": candidate.why}
            for candidate in choice.candidates
        ],
        "refused": list(choice.refused),
        "unprofiled": list(choice.unprofiled),
        "lags": [
            {"lag": lag, "images_per_second": found.images_per_second, "bubble": found.steady.bubble}
            for lag, found in enumerate(choice.lags)
        ],
        **({"unit": explained} if explained else {}),
    }


def show(
    console: Console, parsed: argparse.Namespace, setting: Setting, choice: Choice, explained: dict[str, Any] | None
) -> None:
    """Print the candidates, the plan to run, the warnings about it and the command that runs it."""
    say(console, f"{parsed.model} on {setting.cluster.name}, {setting.precision}, batch {parsed.batch}")
    columns = ("", "plan", "M", "lag", "images/s", "x dp", "waits", "MiB", "moves MiB")
    table = plain_table(*columns, left=("", "plan", "lag"), no_wrap=columns)
    for candidate in choice.candidates:
        prediction, plan = candidate.prediction, candidate.plan
        table.add_row(
            "*" if candidate is choice.best else "",
            f"{plan.mode} {plan.shape}",
            str(plan.microbatches),
            ",".join(str(stage.versions - 1) for stage in plan.stages),
            f"{prediction.images_per_second:,.0f}",
            f"{candidate.speedup:.2f}",
            f"{prediction.steady.bubble:.0%}",
            f"{max(memory.total for memory in prediction.memory) / MIB:,.0f}",
            f"{prediction.traffic / MIB:,.0f}",
        )
    console.print(table)
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
    best = choice.best
    close = "" if best is choice.fastest else " (fewer stages, within 3 % of the fastest)"
    cuts = f", cut before {', '.join(best.plan.cuts)}" if best.plan.cuts else ""
    gain = f"{best.speedup:.2f} x plain data parallel" if best.plan.mode != "dp" else "plain data parallel"
    say(console, f"run {best.plan.mode} {format_placement(best.plan.placement)}{cuts}: {gain}{close}")
    if choice.lags:
        say(console, _lag_line(choice))
    if note := device_note(parsed, [setting]):
        say(console, note)
    for warning in (*_warnings(parsed, choice), _stability(parsed, choice).get("warning")):
        if warning:
            say(console, f"warning: {warning}")
    if explained:
        _show_unit(console, explained)
    if parsed.output:
        say(console, f"plan written; run it with: stagewright train --model {parsed.model} --plan {parsed.output}")


def _lag_line(choice: Choice) -> str:
    """The speed of the plan to run at every lag."""
    own = max(stage.versions for stage in choice.best.plan.stages) - 1
    parts = [
        f"{lag}{' (this plan)' if lag == own else ''}: {found.images_per_second:,.0f} images/s, "
        f"waits {found.steady.bubble:.0%}"
        for lag, found in enumerate(choice.lags)
    ]
    return f"by --staleness: {'; '.join(parts)}"


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
    settings = [read_setting(parsed, text)[1] for text in parsed.cluster]
    _require_priced(prices, settings)
    rows = [_value_row(parsed, setting, prices) for setting in settings]
    note = device_note(parsed, settings)
    if parsed.json:
        found = {"model": parsed.model, "precision": parsed.precision, "clusters": rows, "calibration": note}
        print(json.dumps(found))
        return
    console = Console()
    say(console, f"{parsed.model}, {parsed.precision}, batch {parsed.batch}")
    columns = ("cluster", "plan", "lag", "images/s", "USD", "W", "/USD", "/W", "GiB", "GiB/k$")
    table = plain_table(*columns, left=("cluster", "plan"), no_wrap={*columns} - {"plan"})
    for row in rows:
        table.add_row(
            row["cluster"],
            row["plan"],
            str(row["lag"]),
            f"{row['images_per_second']:,.0f}",
            _shown(row["usd"], "{:,.0f}"),
            _shown(row["watts"], "{:,.0f}"),
            _shown(row["per_dollar"], "{:.2f}"),
            _shown(row["per_watt"], "{:.2f}"),
            f"{row['memory_gib']:.0f}",
            _shown(row["gib_per_thousand_dollars"], "{:.1f}"),
        )
    console.print(table)
    for row in rows:
        for price in row["prices"]:
            say(console, price, style="dim")
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


def _value_row(parsed: argparse.Namespace, setting: Setting, prices: dict[str, float]) -> dict[str, Any]:
    best = choose(setting, parsed.batch).best
    rate = best.prediction.images_per_second
    usd, watts, notes = _totals(setting, prices)
    memory = sum(setting.devices(setting.cluster.kind_of(device)).memory for device in setting.cluster.devices) / GIB
    return {
        "cluster": setting.cluster.name,
        "plan": f"{best.plan.mode} {best.plan.shape}",
        "lag": max(stage.versions for stage in best.plan.stages) - 1,
        "images_per_second": rate,
        "usd": usd,
        "watts": watts,
        "per_dollar": rate / usd if usd else None,
        "per_watt": rate / watts if watts else None,
        "memory_gib": memory,
        "gib_per_thousand_dollars": memory / usd * 1000 if usd else None,
        "prices": notes,
    }


def _totals(setting: Setting, prices: dict[str, float]) -> tuple[float | None, float | None, list[str]]:
    """Dollars and watts of all devices, and the sources of the prices; the rest of the machine is not counted."""
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
    whole_usd = sum(value for value in usd if value is not None) if all(usd) else None
    whole_watts = sum(value for value in watts if value is not None) if all(watts) else None
    return whole_usd, whole_watts, notes


# --- The setting that the options describe, also for simulate ---------------------------------------------------------


def read_setting(parsed: argparse.Namespace, cluster: str | None) -> tuple[Chain | None, Setting]:
    """The model's units, and the setting that the options describe; None if its profile has its own names for units."""
    model = trace_model(parsed.model, parsed.classes, parsed.image)
    if cluster is None and parsed.profile is None:
        raise UserError(f"no cluster: give --cluster NAME ({', '.join(sorted(shipped().clusters))}) or --profile FILE")
    catalog, where = open_cluster(cluster) if cluster is not None else (shipped(), None)
    if where is not None and parsed.devices is not None:
        where = where.first(parsed.devices)
    chain: Chain | None = model.chain
    units: Sequence[Shape] | Profile = model.shapes
    if parsed.profile is not None:
        units = read_profile(parsed.profile)
        if units.is_imported:
            _require_own_names(parsed, units)
            chain = None
        else:
            units.require(parsed.model, model.chain.units)
    return chain, make_setting(
        units,
        where,
        parsed.precision,
        optimizer=parsed.optimizer,
        catalog=catalog,
        software=parsed.software,
        loads=parsed.data != "synthetic",
    )


def _require_own_names(parsed: argparse.Namespace, profile: Profile) -> None:
    """Raise for options with units of the model: an imported profile has its own names for units."""
    if profile.model != parsed.model:
        raise UserError(
            f"the profile was imported as {profile.model} but the model is {parsed.model}; "
            f"import one with stagewright profile {parsed.model} --pipedream FILE"
        )
    for name in ("shares", "cut", "plan", "output"):
        if (value := getattr(parsed, name, None)) is not None:
            raise UserError(
                f"--{name} {value} needs the units of {parsed.model} but the imported profile has PipeDream's nodes; "
                "leave it out"
            )


def device_note(parsed: argparse.Namespace, settings: Sequence[Setting]) -> str | None:
    """A line that names the devices whose speed is calibrated by no measurement or one; None with a profile."""
    if parsed.profile is not None:
        return None
    kinds = [setting.devices(machine.kind) for setting in settings for machine in setting.cluster.machines]
    return calibration_note(kinds, parsed.precision)
