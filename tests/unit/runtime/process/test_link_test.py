"""The link test notices what arrives otherwise than it was sent; tests/distributed runs it between processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stagewright.runtime.comm.device import Cpu
from stagewright.runtime.comm.transport import Done
from stagewright.runtime.process.link_test import Echo, is_sum_right


class Wire:
    """A transport that delivers what a rank 0 sends, with some bytes changed."""

    def __init__(self, changed: int) -> None:
        self.changed = changed

    def send(self, buffer: Tensor) -> Done:
        return Done()

    def receive(self, buffer: Tensor) -> Done:
        buffer.copy_(torch.arange(len(buffer)).remainder(251))
        buffer[: self.changed] += 1
        return Done()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_changed_byte_is_noticed_at_both_ends(rank: int, changed: int) -> None:
    network: Any = SimpleNamespace(transport=lambda name, window: Wire(changed))
    echo = Echo(network, 0, 1, rank, 4096, Cpu())
    assert echo.is_right() is not bool(changed)
    assert f"between ranks 0 and 1 at rank {rank}" in str(echo)


@pytest.mark.parametrize(("missing", "is_right"), [(0.0, True), (2.0, False)])
def test_a_rank_that_is_missing_from_a_sum_is_noticed(missing: float, is_right: bool) -> None:
    def add(buffer: Tensor) -> Done:
        buffer.fill_(1 + 2 + 3 - missing)
        return Done()

    collective: Any = SimpleNamespace(sum=add)
    assert is_sum_right(collective, 0, 3, torch.device("cpu")) is is_right
