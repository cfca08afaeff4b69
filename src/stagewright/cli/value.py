"""`stagewright value`: compare the best plans of several clusters by speed, price, power and memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from operator import itemgetter
from typing import Any

from stagewright.cli.plan import ask_model
from stagewright.cluster.specs import calibration_note
from stagewright.errors import UserError
from stagewright.metrics import format_rate
from stagewright.planning.planner import choose
from stagewright.planning.question import Question
from stagewright.planning.worth import break_even, cluster_worth, require_priced
from stagewright.report.columns import Column
from stagewright.report.live.terminal import open_console, print_table, say, speaking

_CLUSTERS: tuple[Column[dict[str, Any]], ...] = (
    Column("cluster", itemgetter("cluster"), is_text=True),
    Column("plan", itemgetter("plan"), is_text=True, wraps=True),
    Column("lag", itemgetter("lag")),
    Column("images/s", itemgetter("images_per_second"), format_rate),
    Column("90 %", lambda row: f"{format_rate(row['low'])}-{format_rate(row['high'])}"),
    Column("GiB", itemgetter("memory_gib"), "{:.0f}"),
)
_MONEY: tuple[Column[dict[str, Any]], ...] = (
    Column("cluster", itemgetter("cluster"), is_text=True),
    Column("USD", itemgetter("usd"), "{:,.0f}"),
    Column("W", itemgetter("watts"), "{:,.0f}"),
    Column("images/s/USD", itemgetter("per_dollar"), "{:.2f}"),
    Column("images/s/W", itemgetter("per_watt"), "{:.2f}"),
    Column("epoch USD", itemgetter("epoch_usd"), "{:.3f}"),
    Column("year USD", itemgetter("year_usd"), "{:,.0f}"),
)


def run(parsed: argparse.Namespace) -> None:
    if not parsed.cluster:
        raise UserError("no cluster: give --cluster once for each to compare")
    prices = dict(map(_price, parsed.price))
    with speaking(f"reading {parsed.model}") as voice:
        question = Question.of("value", vars(parsed))
        asked = [ask_model(replace(question, cluster=text)) for text in parsed.cluster]
        settings = [one.setting for one in asked]
        require_priced(prices, settings)
        rows = []
        for one in asked:
            voice.progress(f"planning {parsed.model} on {one.setting.cluster.name}")
            rows.append(cluster_worth(choose(one.setting, one.batch), one.setting, one.catalog, prices, parsed.kwh))
    even = break_even(*rows) if len(rows) == 2 else None
    kinds = [setting.devices(machine.kind) for setting in settings for machine in setting.cluster.machines]
    note = None if parsed.profile else calibration_note(kinds, settings[0].precision)
    if parsed.json:
        found = {"model": parsed.model, "precision": settings[0].precision, "clusters": rows, "calibration": note}
        print(json.dumps(found | {"kwh": parsed.kwh, "break_even": even}))
        return
    console = open_console()
    say(console, f"{parsed.model}, {settings[0].precision}, batch {parsed.batch}")
    print_table(console, _CLUSTERS, rows)
    print_table(console, _MONEY, rows)
    say(console, *(price for row in rows for price in row["prices"]), style="dim")
    say(console, f"electricity at {parsed.kwh:g} USD a kWh; an epoch is of ImageNet, a year is all of it", style="dim")
    say(console, *filter(None, [even and even["sentence"], note]))


def _price(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        usd = float(value)
    except ValueError:
        usd = -1.0
    if not name or not 0 < usd < float("inf"):
        raise UserError(f"--price '{text}' is not DEVICE=USD (for example rtx-4090=1800)")
    return name, usd
