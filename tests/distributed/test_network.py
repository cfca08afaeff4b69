"""Channels between ranks: small messages over a socket, large ones over gloo, both whole and in order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

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


def connect() -> tuple[GlooNetwork, Transport, GlooNetwork, Transport]:
    """Both ends of one channel, as two ranks would make them."""
    store = HashStore()
    networks = [GlooNetwork(store, rank, Place(), LONG) for rank in range(2)]
    ends: dict[int, Transport] = {}
    run_both(*(lambda rank=rank: ends.update({rank: networks[rank].transport(NAME, WINDOW)}) for rank in range(2)))
    return networks[0], ends[0], networks[1], ends[1]


def run_both(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive(), "the two ends wait for each other"


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_messages_of_any_size_arrive_in_order(size: int) -> None:
    source, sending, target, receiving = connect()
    message_format = MessageFormat([Field("x", (size,), torch.uint8)])
    outbox = Outbox(str(NAME), sending, source.store, WINDOW)
    inbox = Inbox(str(NAME), receiving, target.store, 2)
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
    _, sending, _, receiving = connect()
    for _ in range(WINDOW):
        assert sending.send(torch.zeros(SMALL, dtype=torch.uint8)).is_completed()
    large = sending.send(torch.zeros(LARGE, dtype=torch.uint8))
    assert not large.is_completed()
    receiving.receive(torch.empty(LARGE, dtype=torch.uint8)).wait()
    large.wait()


def test_a_full_window_of_the_largest_small_messages_fits() -> None:
    _, sending, _, receiving = connect()
    assert isinstance(sending, SocketTransport)
    largest = torch.arange(sending.largest, dtype=torch.int64).to(torch.uint8)
    run_both(lambda: [sending.send(largest) for _ in range(WINDOW)])
    for _ in range(WINDOW):
        buffer = torch.zeros_like(largest)
        receiving.receive(buffer).wait()
        assert torch.equal(buffer, largest)


def test_ranks_on_different_machines_use_no_socket() -> None:
    store = HashStore()
    networks = [GlooNetwork(store, rank, Place(local=frozenset({rank})), LONG) for rank in range(2)]
    ends: dict[int, Transport] = {}
    run_both(*(lambda rank=rank: ends.update({rank: networks[rank].transport(NAME, WINDOW)}) for rank in range(2)))
    assert not any(isinstance(end, SocketTransport) for end in ends.values())
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
