"""Messages arrive whole and in order, and both ends agree on what they hold."""

from __future__ import annotations

import pytest
import torch

from stagewright.runtime.comm.channel import ChannelName, Inbox, Outbox
from stagewright.runtime.comm.memory import Memory, MemoryNetwork
from stagewright.runtime.comm.message import Field, FormatError, MessageFormat

FORMAT = MessageFormat(
    [Field("x", (2, 3), torch.float64), Field("mask", (5,), torch.bool), Field("labels", (2,), torch.int64)]
)


def connect(sent: MessageFormat = FORMAT, expected: MessageFormat = FORMAT) -> tuple[Outbox, Inbox]:
    memory, name = Memory(), ChannelName("act", 0, 0, 1)
    outbox, inbox = (end(MemoryNetwork(memory, rank), name, 4) for rank, end in enumerate((Outbox, Inbox)))
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


def test_buffers_are_reused() -> None:
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


def test_a_wrong_number_is_an_error_with_both_numbers() -> None:
    outbox, inbox = connect()
    inbox.expect(iter([4]))
    outbox.send(5, tensors(5))
    inbox.next.wait()
    with pytest.raises(FormatError, match=r"act/0/0-1.*microbatch 4 .*5"):
        inbox.receive(4)


def test_different_formats_are_an_error_with_both_formats() -> None:
    outbox, inbox = connect(
        MessageFormat([Field("x", (2, 2), torch.float32)]), MessageFormat([Field("x", (4,), torch.float32)])
    )
    inbox.expect(iter([0]))
    outbox.send(0, [torch.zeros(2, 2)])
    with pytest.raises(FormatError, match=r"x float32\[4\].*x float32\[2, 2\]"):
        inbox.verify()


def test_a_tensor_of_the_wrong_shape_is_not_sent() -> None:
    outbox, _ = connect()
    with pytest.raises(FormatError, match=r"microbatch 7 .*x float64\[3, 3\].*x float64\[2, 3\]"):
        outbox.send(7, [torch.zeros(3, 3, dtype=torch.float64), *tensors(0)[1:]])
