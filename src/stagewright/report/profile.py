"""A profile as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


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
