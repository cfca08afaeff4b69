"""What a bench measured of plain data parallel, as rows that others can use: `bench SUITE --row FILE`."""

from __future__ import annotations

from stagewright.bench.result import Outcome
from stagewright.bench.result import Row as Measured
from stagewright.cluster.placement import parse_placement
from stagewright.errors import UserError
from stagewright.hardware import rows
from stagewright.hardware.rows import Row, hardware_of, software_of


def append_rows(outcome: Outcome, path: str) -> int:
    """Append what a bench measured of plain data parallel to a file of rows; returns how many rows those are."""
    found = [row for measured in outcome.rows if (row := _row_of(outcome, measured)) is not None]
    if not found:
        raise UserError(
            f"--row {path}: none of the {len(outcome.rows)} configurations was measured in mode dp; rows are of those"
        )
    rows.append_rows(found, path)
    return len(found)


def _row_of(outcome: Outcome, row: Measured) -> Row | None:
    if row.kind != "measured" or row.rate is None or row.mode != "dp" or not row.placement:
        return None
    devices = [device for stage in parse_placement(row.placement) for device in stage]
    return Row(
        hardware=hardware_of(outcome.machine, row.device),
        gpus=len(devices),
        nodes=len({device.machine for device in devices}),
        software=software_of(outcome.machine),
        model=row.model,
        precision=row.precision,
        batch_per_gpu=max(1, row.batch // len(devices)),
        images_per_second=round(row.rate.value, 2),
        source=f"{outcome.command}, {outcome.date}",
        note=f"{row.data or 'synthetic'} data, median of {len(row.repeats)}",
    )
