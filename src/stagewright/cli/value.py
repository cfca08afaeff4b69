"""`stagewright value`: compare clusters by speed, price, power and memory."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from stagewright.cli.setting import device_note, read_setting
from stagewright.cluster.catalog import price_source
from stagewright.config.sections import require_options
from stagewright.metrics import GIB
from stagewright.plan.estimate import Setting
from stagewright.planning.planner import choose
from stagewright.report.live.terminal import plain_table, say


def run(parsed: argparse.Namespace) -> None:
    if not parsed.cluster:
        raise ValueError("no cluster: give --cluster once for each to compare")
    require_options(batch=parsed.batch)
    prices = dict(_price(text) for text in parsed.price)
    settings = [read_setting(parsed, text)[1] for text in parsed.cluster]
    _require_priced(prices, settings)
    rows = [_row(parsed, setting, prices) for setting in settings]
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
            console.print(price, highlight=False, markup=False, style="dim")
    if note:
        say(console, note)


def _price(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        usd = float(value)
    except ValueError:
        usd = -1.0
    if not name or not 0 < usd < float("inf"):
        raise ValueError(f"--price '{text}' is not DEVICE=USD (for example rtx-4090=1800)")
    return name, usd


def _require_priced(prices: dict[str, float], settings: list[Setting]) -> None:
    """Raise for the price of a device that no cluster has: it would change nothing."""
    kinds = {setting.cluster.kind_of(device) for setting in settings for device in setting.cluster.devices}
    for name in prices:
        if name not in kinds:
            raise ValueError(
                f"--price names '{name}' but the clusters have {', '.join(sorted(kinds))}; name one of these"
            )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _row(parsed: argparse.Namespace, setting: Setting, prices: dict[str, float]) -> dict[str, Any]:
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
