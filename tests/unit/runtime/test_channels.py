"""Messages carry their tensors, their number, and nothing that the two ends see differently."""

from __future__ import annotations

import pytest
import torch

from stagewright.runtime.comm.channel import Inbox, Outbox
from stagewright.runtime.comm.memory import DictBulletin, MemoryTransport
from stagewright.runtime.comm.message import Field, Layout, LayoutError

LAYOUT = Layout(
    [Field("x", (2, 3), torch.float64), Field("mask", (5,), torch.bool), Field("labels", (2,), torch.int64)]
)


def connect(sent: Layout = LAYOUT, expected: Layout = LAYOUT) -> tuple[Outbox, Inbox]:
    transport, bulletin = MemoryTransport(), DictBulletin({})
    outbox, inbox = Outbox("act/0/0-1", transport, bulletin, 4), Inbox("act/0/0-1", transport, bulletin, 2)
    outbox.open(sent)
    inbox.open(expected)
    return outbox, inbox


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, dtype=torch.float64, generator=generator)
    return [x, torch.rand(5, generator=generator) > 0.5, torch.tensor([seed, -seed])]


def take(inbox: Inbox, microbatch: int) -> list[torch.Tensor]:
    inbox.next.wait()
    message = inbox.receive(microbatch)
    copies = [tensor.clone() for tensor in message.tensors]
    inbox.release(message)
    return copies


def test_messages_arrive_whole_and_in_order() -> None:
    outbox, inbox = connect()
    inbox.expect(iter(range(3, 40, 7)))
    for microbatch in range(3, 40, 7):
        outbox.send(microbatch, tensors(microbatch))
    for microbatch in range(3, 40, 7):
        assert all(torch.equal(a, b) for a, b in zip(take(inbox, microbatch), tensors(microbatch), strict=True))


def test_buffers_are_used_again() -> None:
    outbox, inbox = connect()
    inbox.expect(iter(range(100)))
    buffers = set()
    for microbatch in range(100):
        outbox.send(microbatch, tensors(microbatch))
        inbox.next.wait()
        message = inbox.receive(microbatch)
        buffers.add(message.buffer.data_ptr())
        inbox.release(message)
    assert len(buffers) <= 3


def test_another_number_is_an_error_that_names_both() -> None:
    outbox, inbox = connect()
    inbox.expect(iter([4]))
    outbox.send(5, tensors(5))
    inbox.next.wait()
    with pytest.raises(LayoutError, match="act/0/0-1: microbatch 4 is due but 5 came"):
        inbox.receive(4)


def test_another_layout_is_an_error_that_names_both_sides() -> None:
    outbox, inbox = connect(Layout([Field("x", (2, 2), torch.float32)]), Layout([Field("x", (4,), torch.float32)]))
    inbox.expect(iter([0]))
    outbox.send(0, [torch.zeros(2, 2)])
    with pytest.raises(LayoutError, match=r"expects x float32\[4\] but x float32\[2, 2\] is sent"):
        inbox.verify()


def test_a_tensor_of_another_shape_is_not_sent() -> None:
    outbox, _ = connect()
    with pytest.raises(LayoutError, match=r"microbatch 7 has x float64\[3, 3\], the layout says x float64\[2, 3\]"):
        outbox.send(7, [torch.zeros(3, 3, dtype=torch.float64), *tensors(0)[1:]])
