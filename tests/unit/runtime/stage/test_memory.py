"""The memory of a run is bounded by the microbatches in flight, not by those of a batch."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stagewright.runtime.process.emulate import Emulation
from tests.marks import daily
from tests.parity import Case, make_job


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage allocated while it is open, until the storage is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def train(case: Case, steps: int, microbatches: int, folder: Path) -> tuple[LiveBytes, Emulation]:
    """Train on the same data in microbatches of the same size, with that many per batch."""
    batch = case.samples_per_microbatch * microbatches
    job = make_job(replace(case, batch=batch, microbatches=microbatches, steps=steps), folder)
    gc.collect()
    gc.disable()  # so that what only a collection would free counts as held
    try:
        with LiveBytes() as live:
            emulation = Emulation(job, lambda event: None)
            emulation.run()
    finally:
        gc.enable()
    return live, emulation


case_of_12 = partial(Case, batch=12, microbatches=12, samples=192)
CASES = [
    case_of_12("plain", "0:0", mode="stale", versions=(2,)),
    case_of_12("plain", "0:0-1"),
    case_of_12("plain", "0:0-1.0:2", "third"),
    case_of_12("normed", "0:0-1.0:2", "third", mode="stale", staleness=1),
    case_of_12("residual", "0:0-2.0:3-4.0:5-6.0:7", "second,third,head", mode="stale", staleness=3),
    case_of_12("residual", "0:0-1.0:0-1", "third", mode="stale", staleness=1),
    case_of_12("plain", "0:0.0:0-1.0:1", "second,third"),
    case_of_12("plain", "0:0-1.0:2-4", "third", mode="pipedream"),
]


@pytest.mark.parametrize("case", daily([*CASES, *(replace(case, dynamic=True) for case in CASES[2:5])], 3), ids=str)
def test_four_times_the_microbatches_need_no_more_memory(case: Case, tmp_path: Path) -> None:
    few, _ = train(case, 5, 12, tmp_path)
    many, emulation = train(case, 6, 48, tmp_path)
    assert many.peak <= 1.01 * few.peak
    for worker in emulation.workers:
        for replica in worker.replicas.values():
            kept = replica.exchange
            held = (kept.inputs, kept.outputs, replica.in_flight, kept.output_gradients, kept.input_gradients)
            assert not any(held), "a microbatch is still held after the run"
            for update in range(emulation.workers[0].job.batches * case.microbatches):
                with pytest.raises(KeyError):  # no update is open after the run
                    replica.gradients.pending(update)


def test_live_bytes_counts_held_and_freed_storages() -> None:
    with LiveBytes() as live:
        kept = [torch.zeros(1000, dtype=torch.uint8) for _ in range(3)]
        views = kept[0].view(10, 100), kept[0][5:]
        assert live.now == live.peak == 3000
        kept.clear()
        assert live.now == 1000
        del views
        assert live.now == 0
        held = torch.zeros(250, requires_grad=True)
        product = (held.exp() * 2).sum()  # backward keeps exp's result
        assert live.now == 1000 + 1000 + 4
        product.backward()
        assert live.now == 1000 + 1000 + 4  # the leaf's gradient in its place
    assert live.peak >= 3000
