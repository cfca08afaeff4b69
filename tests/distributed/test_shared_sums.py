"""Sums through shared memory: the bits of an addition in the order of the ranks, whatever is summed; lost ranks."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from stagewright.runtime.comm.gloo import GlooNetwork
from stagewright.runtime.comm.message import FormatError
from stagewright.runtime.comm.shared_memory import SharedSums, connect_sums
from stagewright.runtime.comm.transport import Collective, Place
from stagewright.runtime.comm.unix_socket import connect_all
from tests.waiting import LONG, wait_until

MIB = 2**20
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def connect(ranks: Sequence[int], timeout: float = LONG, local: frozenset[int] | None = None) -> list[Collective]:
    """The collective of some ranks, as each of them has it; each is a thread here."""
    store = HashStore()

    def of(rank: int) -> Collective:
        return GlooNetwork(store, rank, Place(local=local), timeout).collective("sums", ranks)

    return on_each(of, ranks)


def on_each(function: Callable[[int], Collective], ranks: Sequence[int]) -> list[Collective]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(function, ranks))


def random_tensor(size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return (torch.randn(size, generator=generator, dtype=torch.float64) * 3).to(dtype)
    return torch.randint(0, 100, (size,), generator=generator, dtype=dtype)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_have_the_bits_of_an_addition_in_the_order_of_the_ranks(world: int) -> None:
    """Sizes from nothing to more than the whole ring of slots, all outstanding at once."""
    draw, generator = random.Random(world), torch.Generator().manual_seed(world)
    sizes = [0, 1, 7, 16_385, MIB // 4, MIB // 4 + 1, *(draw.randrange(300_000) for _ in range(9)), 6 * MIB // 4 + 3]
    dtypes = [*DTYPES, *(draw.choice(DTYPES) for _ in range(len(sizes) - len(DTYPES) - 1)), torch.float32]
    parts = [
        [random_tensor(size, dtype, generator) for _ in range(world)] for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    expected = [sum_in_order(members) for members in parts]
    collectives = connect(range(world))
    begun = [[collectives[rank].sum(part) for rank, part in enumerate(members)] for members in parts]
    for pendings, members, total in zip(begun, parts, expected, strict=True):
        for pending, part in zip(pendings, members, strict=True):
            pending.wait()  # after which the whole sum must be there at once
            assert part.dtype == total.dtype and torch.equal(part.view(torch.uint8), total.view(torch.uint8))
            assert pending.is_completed()


def test_a_sum_is_complete_with_its_last_piece_however_small_that_is() -> None:
    collectives = connect([0, 1])
    for _ in range(40):
        tensors = [torch.ones(MIB + 1) for _ in collectives]
        begun = [collective.sum(tensor) for collective, tensor in zip(collectives, tensors, strict=True)]
        for pending, tensor in zip(begun, tensors, strict=True):
            while not pending.is_completed():
                time.sleep(0)
            assert bool((tensor == 2).all())


def test_ranks_that_are_not_the_first_ones_and_tensors_of_any_shape_are_summed() -> None:
    collectives = connect([5, 2])
    tensors = [torch.full((300, 200, 3), float(rank)) for rank in range(2)]
    for pending in [collective.sum(tensor) for collective, tensor in zip(collectives, tensors, strict=True)]:
        pending.wait()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_a_sum_waits_for_the_last_rank() -> None:
    first, second = connect([0, 1])
    tensors = [torch.ones(3 * MIB) for _ in range(2)]
    waiting = first.sum(tensors[0])
    assert not waiting.is_completed()
    joined = second.sum(tensors[1])
    wait_until(lambda: waiting.is_completed() and joined.is_completed())
    assert all(bool((tensor == 2).all()) for tensor in tensors)


@pytest.mark.parametrize("size", [1, 2 * MIB])
def test_a_rank_that_ends_is_lost_at_once_and_for_good(size: int) -> None:
    collectives = connect([0, 1, 2])
    begun = [collective.sum(torch.ones(size)) for collective in collectives]
    for pending in begun:
        pending.wait()
    waiting = [collective.sum(torch.ones(size)) for collective in collectives[:2]]
    del collectives[2], begun, pending
    gc.collect()
    for _ in range(2):
        for pending in waiting:
            with pytest.raises(RuntimeError, match="rank 2 is gone"):
                pending.wait()
            assert pending.is_completed()
        waiting = [collective.sum(torch.ones(size)) for collective in collectives]


def test_a_rank_that_ends_after_its_last_sum_is_not_lost() -> None:
    first, second = connect([0, 1])
    ahead = second.sum(torch.ones(2 * MIB))
    mine = torch.ones(2 * MIB)
    pending = first.sum(mine)
    ahead.wait()
    del second, ahead
    gc.collect()
    pending.wait()
    assert bool((mine == 2).all())


def test_what_a_rank_sent_before_it_ended_is_read_although_it_left_messages_unread() -> None:
    """The kernel reports the reset before it delivers what was sent, so a rank that had finished seemed to be lost."""
    store, limit = HashStore(), timedelta(seconds=LONG)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(connect_sums, store, [0, 1], 0, limit, None)
        theirs = connect_all(store, 1, 2, limit)[0]
        collective = joining.result()
    theirs.send(b"fpiece 0 of sum 0: 4 bytes of torch.float32")
    theirs.send(b"a")
    theirs.close()  # without the message that has the memory, in which its part is zero
    mine = torch.ones(1)
    collective.sum(mine).wait()
    assert mine.item() == 1.0
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        collective.sum(torch.ones(1)).wait()


def test_a_rank_that_does_not_join_is_an_error_after_the_timeout() -> None:
    first, second = connect([0, 1], timeout=2)
    with pytest.raises(RuntimeError, match=r"rank 1 did not join a sum within 2 s"):
        first.sum(torch.ones(10)).wait()
    del second


def test_ranks_that_add_different_tensors_are_told_both() -> None:
    first, second = connect([0, 1])
    begun = [first.sum(torch.ones(10)), second.sum(torch.ones(11))]
    with pytest.raises(FormatError, match=r"44 bytes.*40 bytes"):
        begun[0].wait()
    with pytest.raises(RuntimeError):
        begun[1].wait()


def test_threads_end_with_their_collective() -> None:
    before = set(threading.enumerate())
    collectives = connect([0, 1])
    for pending in [collective.sum(torch.ones(10)) for collective in collectives]:
        pending.wait()
    begun = [thread for thread in threading.enumerate() if thread not in before and thread.name == "sums"]
    assert len(begun) == 2
    del collectives, pending
    gc.collect()
    wait_until(lambda: not any(thread.is_alive() for thread in begun))


def test_ranks_of_several_machines_sum_over_gloo() -> None:
    apart = connect([0, 1], local=frozenset({0}))
    assert not any(isinstance(collective, SharedSums) for collective in apart)
    assert all(isinstance(collective, SharedSums) for collective in connect([0, 1]))


def test_a_process_ends_cleanly_while_sums_are_outstanding() -> None:
    code = (
        "import torch; from tests.distributed.test_shared_sums import connect;"
        "first, second = connect([0, 1]); pending = first.sum(torch.ones(2**21)); print('outstanding')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "outstanding\n", "")
