"""`stagewright cluster import`: write a machine as a file for `--cluster`; `cluster list`: show the catalog.

Neither imports torch, so that both answer at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import FITTED
from stagewright.cluster.topology import Cluster
from stagewright.errors import UserError
from stagewright.files import write_text
from stagewright.hardware.cluster_file import ImportOptions, checked_toml, import_texts, import_this_machine
from stagewright.metrics import GIB
from stagewright.report.live.terminal import open_console, plain_table, print_lines, say

_DEVICE_COLUMNS = ("device", "GiB", "GB/s", "fp32 T", "fp16 T", "W", "USD", "calibrated")
_CLUSTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


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
    console.print(_clusters_table(clusters))
    console.print()
    console.print(_devices_table(devices))
    say(console, "GB/s: of memory; T: peak, 1e12 operations/s; calibrated: precisions whose rates were fitted")
    console.print()
    console.print(_links_table(links))
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


def _clusters_table(clusters: list[dict[str, Any]]) -> Table:
    table = plain_table("cluster", "devices", "machines", "links", left=("cluster", "machines", "links"))
    for entry in clusters:
        machines = (f"{machine['count']} x {machine['devices']} {machine['device']}" for machine in entry["machines"])
        table.add_row(entry["name"], str(entry["number"]), ", ".join(machines), ", ".join(entry["links"]))
    return table


def _devices_table(devices: list[dict[str, Any]]) -> Table:
    table = plain_table(*_DEVICE_COLUMNS, left=("device", "calibrated"))
    for entry in devices:
        table.add_row(
            entry["name"],
            f"{entry['memory'] / GIB:.0f}",
            f"{entry['bandwidth'] / 1e9:,.0f}",
            *(f"{entry['peak'][name] / 1e12:,.1f}" if name in entry["peak"] else "-" for name in ("fp32", "fp16")),
            *(f"{entry[name]:,.0f}" if entry[name] else "-" for name in ("watts", "usd")),
            ", ".join([*entry["measured"], *(name for name, basis in entry["evidence"].items() if basis == FITTED)]),
        )
    return table


def _links_table(links: list[dict[str, Any]]) -> Table:
    table = plain_table("link", "GB/s", "us", "", left=("link", ""))
    for entry in links:
        way = "copied through host memory" if entry["staged"] else ""
        table.add_row(entry["name"], f"{entry['bandwidth'] / 1e9:.1f}", f"{entry['latency'] * 1e6:.1f}", way)
    return table
