"""The order of samples is a pure function that no plan can change."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.data.order import Order


def epoch(order: Order, number: int, microbatches: int) -> list[int]:
    pieces = range(number * order.batches * microbatches, (number + 1) * order.batches * microbatches)
    return [int(index) for piece in pieces for index in order.microbatch(piece, microbatches)]


def test_microbatches_keep_the_order_of_their_batch() -> None:
    order = Order(samples=26, batch=12, seed=5)
    assert epoch(order, 0, 1) == epoch(order, 0, 3) == epoch(order, 0, 12)


def test_an_epoch_is_a_permutation_without_the_partial_batch() -> None:
    order = Order(samples=26, batch=12, seed=5)
    first, second = epoch(order, 0, 4), epoch(order, 1, 4)
    assert len(set(first)) == len(first) == 24 and set(first) <= set(range(26))
    assert first != second


def test_the_seed_decides_the_order() -> None:
    assert epoch(Order(64, 8, seed=1), 0, 2) == epoch(Order(64, 8, seed=1), 0, 2)
    assert epoch(Order(64, 8, seed=1), 0, 2) != epoch(Order(64, 8, seed=2), 0, 2)


def test_without_shuffling_every_epoch_is_in_order() -> None:
    order = Order(samples=26, batch=12, shuffle=False)
    assert epoch(order, 0, 4) == epoch(order, 3, 4) == list(range(24))


def test_order_comes_from_a_counter_keyed_by_seed_and_epoch() -> None:
    expected = np.random.Generator(np.random.Philox(key=np.array([9, 2], np.uint64))).permutation(32)
    assert epoch(Order(32, 8, seed=9), 2, 4) == expected.tolist()


def test_rejects_a_data_set_smaller_than_a_batch() -> None:
    with pytest.raises(ValueError, match="10 samples but a batch takes 64; use --batch 10"):
        Order(10, 64)
