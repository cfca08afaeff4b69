"""`stagewright cluster import`: write a machine as a file for `--cluster`; `cluster list`: show the catalog.

Neither imports torch, so that both answer at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import FITTED
from stagewright.cluster.topology import Cluster
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.hardware.cluster_file import ImportOptions, checked_toml, import_texts, import_this_machine
from stagewright.metrics import GIB
from stagewright.report.columns import Column
from stagewright.report.live.terminal import open_console, print_lines, print_table, say

_CLUSTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_MACHINES = "{count} x {devices} {device}"
_WRAPS: dict[str, Any] = {"is_text": True, "wraps": True}
_CLUSTERS: tuple[Column[dict[str, Any]], ...] = (
    Column("cluster", itemgetter("name"), **_WRAPS),
    Column("devices", itemgetter("number")),
    Column("machines", lambda cluster: ", ".join(map(_MACHINES.format_map, cluster["machines"])), **_WRAPS),
    Column("links", itemgetter("links"), ", ".join, **_WRAPS),
)
_DEVICES: tuple[Column[dict[str, Any]], ...] = (
    Column("device", itemgetter("name"), **_WRAPS),
    Column("GiB", lambda device: device["memory"] / GIB, "{:.0f}"),
    Column("GB/s", lambda device: device["bandwidth"] / 1e9, "{:,.0f}"),
    Column("fp32 T", lambda device: _tera(device, "fp32"), "{:,.1f}"),
    Column("fp16 T", lambda device: _tera(device, "fp16"), "{:,.1f}"),
    Column("W", lambda device: device["watts"] or None, "{:,.0f}"),
    Column("USD", lambda device: device["usd"] or None, "{:,.0f}"),
    Column("calibrated", lambda device: [*device["measured"], *_fitted(device)], ", ".join, **_WRAPS),
)
_LINKS: tuple[Column[dict[str, Any]], ...] = (
    Column("link", itemgetter("name"), **_WRAPS),
    Column("GB/s", lambda link: link["bandwidth"] / 1e9, "{:.1f}"),
    Column("us", lambda link: link["latency"] * 1e6, "{:.1f}"),
    Column("", lambda link: "copied through host memory" if link["staged"] else "", **_WRAPS),
)


def run_import(parsed: argparse.Namespace) -> None:
    name = parsed.name or (Path(parsed.output).stem if parsed.output else "imported")
    if not _CLUSTER_NAME.fullmatch(name):
        raise UserError(f"cluster name '{name}' may have a-z, A-Z, 0-9, - and _ only; give another with --name")
    gpus = _indices(parsed.gpus)
    options = ImportOptions(name, parsed.device, gpus, parsed.pcie, parsed.cores, parsed.count, parsed.network)
    if not (parsed.here or parsed.topo or parsed.smi):
        raise UserError("nothing to import: give --topo FILE and --smi FILE, or --here for this machine")
    machine = import_this_machine(options) if parsed.here else import_texts(parsed.topo, parsed.smi, options)
    text = checked_toml(machine)
    if parsed.output:
        write_text(parsed.output, text)
    if parsed.json:
        print(json.dumps({"file": parsed.output, "toml": text} | machine.describe()))
    elif parsed.output:
        print_lines(f"{parsed.output}: {machine.title}")
        print_lines(f"next: stagewright plan resnet50 --cluster {parsed.output} --batch 256")
    else:
        print_lines(*text.removesuffix("\n").split("\n"))


def _indices(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        (devices,) = parse_placement(f"0:{text}")
    except UserError as error:
        raise UserError(f"--gpus '{text[:40]}' is not a list of GPUs (for example 0-3,6)") from error
    return tuple(device.index for device in devices)


def run_list(parsed: argparse.Namespace) -> None:
    catalog = shipped()
    clusters = [_describe_cluster(cluster) for cluster in catalog.clusters.values()]
    devices = list({spec.name: asdict(spec) for spec in catalog.devices.values()}.values())
    links = [asdict(link) for link in catalog.links.values()]
    if parsed.json:
        print(json.dumps({"clusters": clusters, "devices": devices, "links": links}))
        return
    console = open_console()
    print_table(console, _CLUSTERS, clusters)
    console.print()
    print_table(console, _DEVICES, devices)
    say(console, "GB/s: of memory; T: peak, 1e12 operations/s; calibrated: precisions whose rates were fitted")
    console.print()
    print_table(console, _LINKS, links)
    say(console, "GB/s: one way, for NVLink of one lane; us: microseconds per message")


def _describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """How many machines with which devices, and every link of the cluster, innermost first."""
    counts = Counter((machine.devices, machine.kind) for machine in cluster.machines)
    links = [level.link.name for machine in cluster.machines for level in machine.levels]
    links += [cluster.network.name] if cluster.network else []
    return {
        "name": cluster.name,
        "number": len(cluster.devices),
        "machines": [{"count": n, "devices": devices, "device": kind} for (devices, kind), n in counts.items()],
        "links": list(dict.fromkeys(links)),
    }


def _tera(device: dict[str, Any], precision: str) -> float | None:
    peak = device["peak"].get(precision)
    return None if peak is None else peak / 1e12


def _fitted(device: dict[str, Any]) -> list[str]:
    return [name for name, basis in device["evidence"].items() if basis == FITTED]
