"""What measured bandwidths mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stagewright.doctor.disk import DiskRead
from stagewright.doctor.finding import UNKNOWN, Finding, Grade, finding
from stagewright.doctor.measure import Measured
from stagewright.machine.gpu import Gpu

_AREA = "measured"
_GB = 1e9
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}  # bytes a second of one PCIe lane
_POOR, _BAD = 0.6, 0.4  # of what a slot carries
_SLOW_MEMORY, _SLOW_RANKS = 2 * _GB, 0.3 * _GB
_PHOTO = 110_000  # bytes of an ImageNet file


def speed_findings(measured: Iterable[Measured], gpus: Mapping[int, Gpu]) -> Iterator[Finding]:
    for one in measured:
        if one.bandwidth is None:
            yield Finding(_AREA, one.name, UNKNOWN, Grade.NOTE, f"it could not be measured: {one.trouble}")
        elif one.gpu is not None:
            yield _slot_speed(one, gpus.get(one.gpu))
        else:
            yield _host_speed(one)


def _host_speed(one: Measured) -> Finding:
    assert one.bandwidth is not None
    latency = "" if one.latency is None else f", {one.latency * 1e6:.0f} us a message"
    slow = {"memory copy, one core": _SLOW_MEMORY, "between two ranks": _SLOW_RANKS}.get(one.name, 0.0)
    return finding(
        _AREA,
        one.name,
        f"{one.bandwidth / _GB:.1f} GB/s{latency}",
        (one.bandwidth < slow, Grade.NOTE, "slow for any machine of today; is something else busy here?"),
    )


def _slot_speed(one: Measured, gpu: Gpu | None) -> Finding:
    assert one.bandwidth is not None
    lane = None if gpu is None else _LANE.get(gpu.pcie_generation or 0)
    full = None if lane is None or gpu is None or gpu.pcie_width is None else lane * gpu.pcie_width
    value = f"{one.bandwidth / _GB:.1f} GB/s, pinned"
    if full is None:
        return finding(_AREA, one.name, value)
    share = one.bandwidth / full
    advice = "the slot should carry more; other work on the host, a virtual machine or a riser may take it"
    return finding(
        _AREA,
        one.name,
        f"{value}, {share:.0%} of the slot's",
        (share < _BAD, Grade.HURTS, advice),
        (share < _POOR, Grade.NOTE, advice),
    )


def disk_finding(read: DiskRead) -> Finding:
    """A disk's speed, in bytes and in photographs."""
    rate, each = read.bytes / max(read.seconds, 1e-9), read.bytes / read.files
    photos = min(rate / _PHOTO, read.files / max(read.seconds, 1e-9) if each < _PHOTO else rate / _PHOTO)
    warm = "" if read.is_cold else ", perhaps from memory"
    return finding(
        _AREA,
        "data",
        f"{rate / 1e6:.0f} MB/s{warm}, {read.files} files, {read.free / 1e9:.0f} GB free; "
        f"about {photos:.0f} photographs/s",
        (rate < 100e6, Grade.HURTS, "slower than one GPU reads ImageNet; copy the data to a local disk or into memory"),
        (rate < 500e6, Grade.NOTE, "enough for few GPUs; many want a faster disk, or data that stays in memory"),
    )
