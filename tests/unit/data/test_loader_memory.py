"""Memory stays flat however long a run is: three epochs through the loader, sample by sample."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagewright.data.microbatches import Loading
from stagewright.data.order import Order
from tests.pictures import Faulty
from tests.unit.data.test_loader import plain

SAMPLES = int(os.environ.get("STAGEWRIGHT_EPOCH_SAMPLES", "20000"))  # `make soak` asks for a million
BATCH = 250
MIB = 2**20


def resident() -> int:
    """Bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell how much memory is held")
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_three_epochs() -> None:
    records = Faulty(SAMPLES, bad=range(0, SAMPLES, SAMPLES // 10))
    records.reads = _Forgetful()
    loader = plain(records, Order(SAMPLES, BATCH), Loading(threads=2, max_bad=10))
    batches, held = SAMPLES // BATCH, []
    for number in range(3 * batches):
        loader.pixels(number)
        if number in (batches // 2, batches - 1, 2 * batches - 1, 3 * batches - 1):
            held.append(resident())
    loader.close()
    print(f"MiB after half an epoch, one, two, three: {[round(bytes_held / MIB, 1) for bytes_held in held]}")
    order = 8 * SAMPLES  # bytes of an epoch's order; two are kept, and one more is there while it is drawn
    assert max(held) - held[0] < 8 * MIB + 2 * order


class _Forgetful(list[int]):
    """Keeps nothing, so that the test itself does not grow."""

    def append(self, item: int) -> None:
        pass
