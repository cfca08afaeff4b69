"""Channels between ranks: small messages over a socket, large ones over gloo, both whole and in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from stagewright.runtime.comm.channel import ChannelName, Inbox, Outbox
from stagewright.runtime.comm.gloo import GlooNetwork, SocketTransport
from stagewright.runtime.comm.memory import MemoryTransport
from stagewright.runtime.comm.message import Field, MessageFormat
from stagewright.runtime.comm.transport import LostPeer, Place, Transport
from tests.waiting import LONG

NAME = ChannelName("act", 0, 0, 1)
WINDOW = 4
SMALL, LARGE = 1_000, 100_000  # bytes on either side of what a socket takes


def both(*makers: Callable[[GlooNetwork], Any], is_local: bool = True) -> list[Any]:
    """What two ranks make of their networks at the same time, on one machine or on two."""
    store, made = HashStore(), dict[int, Any]()
    places = [Place() if is_local else Place(local=frozenset({rank})) for rank in range(2)]
    networks = [GlooNetwork(store, rank, place, LONG) for rank, place in enumerate(places)]
    run_both(*(lambda rank=rank: made.update({rank: makers[rank](networks[rank])}) for rank in range(2)))
    return [made[0], made[1]]


def connect(*, is_local: bool = True) -> list[Transport]:
    """Both ends of one channel."""
    return both(*[lambda network: network.transport(NAME, WINDOW)] * 2, is_local=is_local)


def run_both(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "the two ends wait for each other"


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_messages_of_any_size_arrive_in_order(size: int) -> None:
    message_format = MessageFormat([Field("x", (size,), torch.uint8)])
    outbox, inbox = both(lambda network: Outbox(network, NAME, WINDOW), lambda network: Inbox(network, NAME, WINDOW))
    outbox.open(message_format)
    inbox.open(message_format)
    found: list[int] = []

    def send() -> None:
        for microbatch in range(20):
            outbox.send(microbatch, [torch.full((size,), microbatch, dtype=torch.uint8)])
        outbox.flush()

    def receive() -> None:
        inbox.expect(iter(range(20)))
        for microbatch in range(20):
            inbox.next.wait()
            message = inbox.receive(microbatch)
            assert bool((message.tensors[0] == microbatch).all())
            found.append(microbatch)
            inbox.release(message)

    run_both(send, receive)
    assert found == list(range(20))


def test_small_messages_never_wait_for_the_receiver_and_large_ones_use_gloo() -> None:
    sending, receiving = connect()
    for _ in range(WINDOW):
        assert sending.send(torch.zeros(SMALL, dtype=torch.uint8)).is_completed()
    large = sending.send(torch.zeros(LARGE, dtype=torch.uint8))
    assert not large.is_completed()
    receiving.receive(torch.empty(LARGE, dtype=torch.uint8)).wait()
    large.wait()


def test_a_full_window_of_the_largest_small_messages_fits() -> None:
    sending, receiving = connect()
    assert isinstance(sending, SocketTransport)
    largest = torch.arange(sending.largest, dtype=torch.int64).to(torch.uint8)
    run_both(lambda: [sending.send(largest) for _ in range(WINDOW)])
    for _ in range(WINDOW):
        buffer = torch.zeros_like(largest)
        receiving.receive(buffer).wait()
        assert torch.equal(buffer, largest)


def test_ranks_on_different_machines_use_no_socket() -> None:
    ends = connect(is_local=False)
    assert not any(isinstance(end, SocketTransport) for end in ends)
    sent, received = torch.arange(SMALL, dtype=torch.float32), torch.zeros(SMALL)
    run_both(lambda: ends[0].send(sent).wait(), lambda: ends[1].receive(received).wait())
    assert torch.equal(sent, received)


def test_a_closed_socket_is_an_error() -> None:
    near, far = socket.socketpair()
    receiving = SocketTransport(near, MemoryTransport(), WINDOW)
    far.close()
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        receiving.receive(torch.zeros(SMALL, dtype=torch.uint8)).wait()


@pytest.mark.parametrize("local", [None, frozenset({0})])
@pytest.mark.parametrize("ranks", [[0, 1], [1, 0]])
def test_a_peer_that_never_connects_is_a_lost_peer_without_lines_of_gloo(
    local: frozenset[int] | None, ranks: list[int]
) -> None:
    network = GlooNetwork(HashStore(), 0, Place(local=local), timeout=0.2)
    with pytest.raises(LostPeer) as lost:
        network.collective("sums", ranks)
    assert "\n" not in str(lost.value) and ".cc" not in str(lost.value) and ".h:" not in str(lost.value)
