"""Some machines, and what they lack for the configurations of a suite."""

from __future__ import annotations

from stagewright.bench.predict import Capacity
from stagewright.bench.suite import SuiteOptions, configurations_of, read_suite
from stagewright.metrics import GIB

LAPTOP = Capacity(gpus=0, gpu_memory=0, memory=16 * GIB)
ONE_GPU = Capacity(gpus=1, gpu_memory=140 * GIB, memory=128 * GIB)
SERVER = Capacity(gpus=8, gpu_memory=80 * GIB, memory=512 * GIB)


def shortages(name: str, capacity: Capacity) -> dict[str, str | None]:
    """Every configuration of a suite, and what a machine lacks for it."""
    entries = configurations_of(read_suite(name), SuiteOptions(1, 1, real="folder:/data"))
    return {str(entry): capacity.shortage(entry.resolve(capacity.cluster)) for entry in entries}
