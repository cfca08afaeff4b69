"""Sums of GPU tensors through shared memory: the bits of an addition in the order of the ranks, in stream order."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from stagewright.runtime.comm.device import Gpu
from stagewright.runtime.comm.gloo import GlooNetwork
from stagewright.runtime.comm.shared_memory import SharedSums
from stagewright.runtime.comm.transport import Place
from tests.distributed.test_shared_sums import on_each, sum_in_order
from tests.waiting import LONG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run on a machine with a GPU"),
]

MIB = 2**20


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_on_a_gpu_follow_what_is_queued_and_come_before_what_follows(world: int, dtype: torch.dtype) -> None:
    """Each part is computed by slow kernels that are still queued when its sum begins; host tensors come in between."""
    store, gpus = HashStore(), [Gpu(0) for _ in range(world)]
    collectives = on_each(
        lambda rank: GlooNetwork(store, rank, Place(), LONG, gpus[rank]).collective("sums", range(world)), range(world)
    )
    assert all(isinstance(collective, SharedSums) for collective in collectives)
    generator = torch.Generator(device="cuda").manual_seed(world)
    sizes = [1, 5_000, 3 * MIB + 1, 17 * MIB, 40_001]
    given = [[torch.randn(size, device="cuda", generator=generator).to(dtype) for _ in range(world)] for size in sizes]
    slow = torch.randn(4096, 4096, device="cuda", generator=generator)
    for _ in range(3):
        expected = [sum_in_order(parts).mul(2) for parts in given]
        on_host = [torch.full((50_000,), float(rank)) for rank in range(world)]
        torch.cuda.synchronize()
        tensors = [[torch.zeros_like(part) for part in parts] for parts in given]
        begun = []
        for parts, held in zip(given, tensors, strict=True):
            for _ in range(10):
                torch.mm(slow, slow)
            for rank in range(world):
                held[rank].copy_(parts[rank])
                begun.append(collectives[rank].sum(held[rank]))
        begun += [collective.sum(tensor) for collective, tensor in zip(collectives, on_host, strict=True)]
        for pending in begun:
            pending.wait()
        for held, total in zip(tensors, expected, strict=True):
            for tensor in held:
                assert torch.equal(tensor.mul_(2), total)
        assert all(bool((tensor == sum(range(world))).all()) for tensor in on_host)
