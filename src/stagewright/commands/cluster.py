"""`stagewright cluster import` and `list`: a machine as a file that `--cluster` takes, and what the catalogue has."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.commands.options import Commands, add_json

if TYPE_CHECKING:
    from rich.table import Table

    from stagewright.cluster import Cluster

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def add(commands: Commands) -> None:
    parser = commands.add_parser("cluster", help="describe a machine to the planner, list those it knows")
    parts = parser.add_subparsers(title="what to do", required=True, metavar="import|list")
    listing = parts.add_parser(
        "list",
        help="clusters, devices and links of the catalogue",
        description="List what --cluster and cluster files can name: clusters, devices and links of the catalogue.",
    )
    add_json(listing)
    listing.set_defaults(run=run_list)
    importing = parts.add_parser(
        "import",
        help="a cluster file from nvidia-smi's texts, or of this machine",
        description="Make a cluster file from the texts of nvidia-smi topo -m and nvidia-smi, or of this machine.",
    )
    importing.add_argument("--topo", metavar="FILE", help="text of nvidia-smi topo -m (- for standard input)")
    importing.add_argument("--smi", metavar="FILE", help="text of nvidia-smi; may be the same file")
    importing.add_argument("--here", action="store_true", help="this machine instead, asked through its driver")
    importing.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    importing.add_argument("--name", help="name of the cluster (default: the file's)")
    importing.add_argument("--device", metavar="NAME", help="the catalogue's name of the cards, instead of theirs")
    importing.add_argument("--gpus", metavar="0-3,6", help="only these of them")
    importing.add_argument("--pcie", type=int, metavar="N", help="generation of the slots (default: the card's best)")
    importing.add_argument("--cores", type=int, metavar="N", help="cores that decode images")
    importing.add_argument("--count", type=int, default=1, metavar="N", help="machines like this one (default: 1)")
    importing.add_argument("--network", metavar="LINK", help="between them: net-1g, net-10g, ... net-400g")
    add_json(importing)
    importing.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from stagewright.machine.importing import Wishes, checked, import_texts, import_this

    name = parsed.name or (Path(parsed.output).stem if parsed.output else "imported")
    if not _NAME.fullmatch(name):
        raise ValueError(f"cluster name '{name}' has other characters than a-z, 0-9, - and _; give another with --name")
    for flag, value in (("pcie", parsed.pcie), ("cores", parsed.cores), ("count", parsed.count)):
        if value is not None and value < 1:
            raise ValueError(f"--{flag} is {value}; give at least 1")
    wishes = Wishes(name, parsed.device, _indices(parsed.gpus), parsed.pcie, parsed.cores, parsed.count, parsed.network)
    if parsed.here and (parsed.topo or parsed.smi):
        raise ValueError("both --here and a text were given; import one machine at a time")
    if not (parsed.here or parsed.topo or parsed.smi):
        raise ValueError("nothing to import: give --topo FILE and --smi FILE, or --here for this machine")
    box = import_this(wishes) if parsed.here else import_texts(parsed.topo, parsed.smi, wishes)
    text = checked(box)
    if parsed.output:
        _write(Path(parsed.output), text)
    if parsed.json:
        print(json.dumps({"file": parsed.output, "toml": text} | asdict(box)))
    elif parsed.output:
        print(f"{parsed.output}: {box.title}")
        print(f"next: stagewright plan resnet50 --cluster {parsed.output} --batch 256")
    else:
        sys.stdout.write(text)


def _indices(text: str | None) -> tuple[int, ...] | None:
    from stagewright.cluster import parse_placement

    if text is None:
        return None
    try:
        (devices,) = parse_placement(f"0:{text}")
    except ValueError as error:
        raise ValueError(f"--gpus '{text[:40]}' is not a list of GPUs (for example 0-3,6)") from error
    return tuple(device.index for device in devices)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"can't write {path}: {error.strerror}; choose another file with -o") from error


def run_list(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from stagewright.catalog import shipped

    catalogue = shipped()
    clusters = [_describe_cluster(cluster) for cluster in catalogue.clusters.values()]
    devices = list({spec.name: asdict(spec) for spec in catalogue.devices.values()}.values())
    links = [asdict(link) for link in catalogue.links.values()]
    if parsed.json:
        print(json.dumps({"clusters": clusters, "devices": devices, "links": links}))
        return
    console = Console()
    console.print(_clusters_table(clusters))
    console.print()
    console.print(_devices_table(devices))
    console.print("GB/s of its memory; T: 1e12 operations a second at most; calibrated: measured in")
    console.print()
    console.print(_links_table(links))
    console.print("GB/s one way, of one lane of NVLink; us a message")


def _describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """How many machines of which devices, and every link in it, innermost first."""
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
    table = _table("cluster", "number", "machines", "links", left=("cluster", "machines", "links"))
    for entry in clusters:
        machines = (f"{machine['count']} x {machine['devices']} {machine['device']}" for machine in entry["machines"])
        table.add_row(entry["name"], str(entry["number"]), ", ".join(machines), ", ".join(entry["links"]))
    return table


def _devices_table(devices: list[dict[str, Any]]) -> Table:
    from stagewright.catalog.values import ALONE

    table = _table("device", "GiB", "GB/s", "fp32 T", "fp16 T", "W", "USD", "calibrated", left=("device", "calibrated"))
    for entry in devices:
        table.add_row(
            entry["name"],
            f"{entry['memory'] / 2**30:.0f}",
            f"{entry['bandwidth'] / 1e9:,.0f}",
            *(f"{entry['peak'][name] / 1e12:.1f}" if name in entry["peak"] else "-" for name in ("fp32", "fp16")),
            *(f"{entry[name]:,.0f}" if entry[name] else "-" for name in ("watts", "usd")),
            ", ".join(f"{name} ({ALONE})" if basis == ALONE else name for name, basis in entry["measured"].items()),
        )
    return table


def _links_table(links: list[dict[str, Any]]) -> Table:
    table = _table("link", "GB/s", "us", "", left=("link", ""))
    for entry in links:
        way = "copied through host memory" if entry["staged"] else ""
        table.add_row(entry["name"], f"{entry['bandwidth'] / 1e9:.1f}", f"{entry['latency'] * 1e6:.1f}", way)
    return table


def _table(*names: str, left: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table
