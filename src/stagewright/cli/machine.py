"""`stagewright doctor`: what this machine is, and what will hurt. `stagewright profile`: measure every unit of a model on this device. A profile as a table. `stagewright cluster import` and `list`: a machine as a file that `--cluster` takes, and what the catalogue has."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.specs import ALONE
from stagewright.hardware.cluster_file import ImportOptions, checked, import_texts, import_this
from stagewright.hardware.doctor.examine import examine, show
from stagewright.run.profile import import_profile, measure_profile

if TYPE_CHECKING:
    from stagewright.cluster.topology import Cluster


def run_doctor(parsed: argparse.Namespace) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch comes: its remarks are not for users
    errors = Console(stderr=True)
    with errors.status("looking") as status:
        found = examine(parsed.data, measures=not parsed.fast, tell=status.update)
    if parsed.json:
        print(json.dumps(found.describe()))
    else:
        show(Console(), found)


def run_profile(parsed: argparse.Namespace) -> None:
    errors = Console(stderr=True)
    with errors.status("profiling") as status:
        tell = status.update if errors.is_terminal else lambda text: None
        profile = import_profile(parsed) if parsed.pipedream else measure_profile(parsed, tell)
    if parsed.output:
        profile.write(parsed.output)
    if parsed.json:
        print(json.dumps(asdict(profile)))
        return
    show_profile(Console(), profile)
    if parsed.output:
        print(f"written to {parsed.output}")


def show_profile(console: Console, profile: Any) -> None:
    """The largest measured size, unit by unit, and the ceilings."""
    table = profile.tables[-1]
    console.print(
        f"{profile.model} on {profile.device}, {table.precision}, microbatch of {table.samples}"
        + (f", {profile.together} processes at once" if profile.together > 1 else ""),
        highlight=False,
        markup=False,
    )
    shown = Table(box=None, pad_edge=False)
    for name in ("unit", "kind", "fwd ms", "bwd ms", "weights MiB", "live MiB", "saved MiB"):
        shown.add_column(name, justify="left" if name in ("unit", "kind") else "right", no_wrap=True)
    for unit in table.units:
        shown.add_row(
            unit.name,
            unit.kind,
            f"{unit.forward * 1e3:.3f}",
            f"{unit.backward * 1e3:.3f}",
            f"{unit.parameters * 4 / 2**20:.2f}",
            f"{unit.live / 2**20:.2f}",
            f"{unit.saved / 2**20:.2f}",
        )
    console.print(shown)
    rate = table.samples / table.seconds if table.seconds else float("inf")
    console.print(f"{table.seconds * 1e3:.1f} ms a microbatch, {rate:,.1f} images/s", highlight=False)
    ceilings = profile.ceilings
    if ceilings is not None:
        matrix = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in ceilings.matrix.items())
        console.print(
            f"device: {matrix}, copies {ceilings.copy / 1e9:.1f} GB/s, "
            f"updates {ceilings.update / 1e9:.1f} GB/s of weights",
            highlight=False,
        )
        for transfer in ceilings.transfers:
            console.print(
                f"link {transfer.source}-{transfer.target}: {transfer.bandwidth / 1e9:.2f} GB/s, "
                f"{transfer.latency * 1e6:.0f} us",
                highlight=False,
            )


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def run_import(parsed: argparse.Namespace) -> None:
    name = parsed.name or (Path(parsed.output).stem if parsed.output else "imported")
    if not _NAME.fullmatch(name):
        raise ValueError(f"cluster name '{name}' has other characters than a-z, 0-9, - and _; give another with --name")
    for flag, value in (("pcie", parsed.pcie), ("cores", parsed.cores), ("count", parsed.count)):
        if value is not None and value < 1:
            raise ValueError(f"--{flag} is {value}; give at least 1")
    wishes = ImportOptions(
        name, parsed.device, _indices(parsed.gpus), parsed.pcie, parsed.cores, parsed.count, parsed.network
    )
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
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table
