"""The tunnel to the store: whoever proves to know the token gets through, and nobody else."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from stagewright.runtime.multinode.nodes import bound_to
from stagewright.runtime.multinode.tunnel import (
    BUSY,
    GREETING,
    NONCE,
    PROOF,
    AccessDenied,
    Busy,
    Refusals,
    Tunnel,
    TunnelServer,
    check_access,
    store_prefix,
)
from tests.waiting import LONG, wait_until

TOKEN, OTHER_TOKEN, HOST = "a token of tests, long enough", "another token, as long as that", "127.0.0.1"
LOST = float(LONG)


class Host:
    """A store behind a tunnel server."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        listener = bound_to(HOST, 0)
        self.address = (HOST, int(listener.getsockname()[1]))
        self.server = TunnelServer(listener, self.store.port, TOKEN, LOST, self.refused.append)


@pytest.fixture
def host() -> Iterator[Host]:
    found = Host()
    yield found
    found.server.close()


def test_several_clients_use_the_store_through_one_tunnel(host: Host) -> None:
    tunnel = Tunnel(host.address, HOST, TOKEN, LOST)
    try:
        clients = [TCPStore(HOST, tunnel.port, is_master=False, timeout=timedelta(seconds=LONG)) for _ in range(3)]
        clients[0].set("key", "x" * 1_000_000)
        assert clients[1].get("key") == b"x" * 1_000_000
        threading.Timer(0.2, lambda: clients[2].set("late", "yes")).start()
        assert clients[1].get("late") == b"yes"
        check_access(host.address, HOST, TOKEN, LONG)
    finally:
        tunnel.close()
    assert host.refused == []
    with pytest.raises(RuntimeError):
        clients[0].get("key")


def test_denies_access_with_another_token(host: Host) -> None:
    with pytest.raises(AccessDenied):
        check_access(host.address, HOST, OTHER_TOKEN, LONG)
    wait_until(lambda: host.refused == [HOST])
    tunnel = Tunnel(host.address, HOST, OTHER_TOKEN, LOST)
    with pytest.raises(RuntimeError):
        TCPStore(HOST, tunnel.port, is_master=False, timeout=timedelta(seconds=1))
    tunnel.close()


def test_a_plain_store_client_can_not_read_keys(host: Host) -> None:
    host.store.set("secret", "value")
    with pytest.raises(RuntimeError):
        TCPStore(*host.address, is_master=False, timeout=timedelta(seconds=1)).get("secret")


@pytest.mark.parametrize("sent", [b"", b"\0" * 64, b"x" * 63, b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 64])
def test_refuses_clients_that_do_not_know_the_handshake(host: Host, sent: bytes) -> None:
    with socket.create_connection(host.address) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        received = receive_all(stranger)
    assert received.startswith(GREETING) and len(received) == len(GREETING) + NONCE  # and no proof
    wait_until(lambda: host.refused == [HOST])


def receive(connection: socket.socket, size: int) -> bytes:
    return connection.recv(size, socket.MSG_WAITALL)


def receive_all(connection: socket.socket) -> bytes:
    connection.settimeout(LONG)
    return b"".join(iter(lambda: connection.recv(1000), b""))


def test_a_recorded_handshake_opens_nothing(host: Host) -> None:
    recorded = bytearray()
    relay = bound_to(HOST, 0)
    relay.listen(1)

    def record() -> None:
        near, _ = relay.accept()
        with near, socket.create_connection(host.address) as far:
            near.sendall(receive(far, len(GREETING) + NONCE))
            recorded.extend(receive(near, NONCE + PROOF))
            far.sendall(recorded)
            near.sendall(receive(far, PROOF))

    thread = threading.Thread(target=record)
    thread.start()
    check_access((HOST, relay.getsockname()[1]), HOST, TOKEN, LONG)
    thread.join()
    relay.close()
    with socket.create_connection(host.address) as thief:
        receive(thief, len(GREETING) + NONCE)
        thief.sendall(recorded)
        thief.settimeout(LONG)
        assert thief.recv(1) == b""


def test_denies_access_to_a_host_that_does_not_know_the_token() -> None:
    impostor = bound_to(HOST, 0)
    impostor.listen(1)

    def pretend() -> None:
        near, _ = impostor.accept()
        with near:
            near.sendall(GREETING + bytes(NONCE))
            receive(near, NONCE + PROOF)
            near.sendall(bytes(PROOF))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(AccessDenied):
        check_access((HOST, impostor.getsockname()[1]), HOST, TOKEN, LONG)
    thread.join()
    impostor.close()


@pytest.mark.parametrize("answer", [BUSY, None], ids=["busy", "reset"])
def test_a_dropped_handshake_is_not_another_token(answer: bytes | None) -> None:
    crowded = bound_to(HOST, 0)
    crowded.listen(1)

    def drop() -> None:
        near, _ = crowded.accept()
        with near:
            near.sendall(GREETING + bytes(NONCE))
            if answer is None:
                near.recv(1)
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                receive(near, NONCE + PROOF)
                near.sendall(answer)

    thread = threading.Thread(target=drop)
    thread.start()
    with pytest.raises(Busy):
        check_access((HOST, crowded.getsockname()[1]), HOST, TOKEN, LONG)
    thread.join()
    crowded.close()


def test_a_client_that_says_nothing_is_told_to_try_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagewright.runtime.multinode.tunnel.MOST_TURNS", 1)
    with socket.create_connection(host.address) as slow:
        assert receive_all(slow)[len(GREETING) + NONCE :] == BUSY
    wait_until(lambda: host.refused == [HOST])


def test_counts_refusals_by_address_and_tells_few_of_them() -> None:
    refusals = Refusals({"10.0.0.2": "machine 1 (10.0.0.2)"})
    told = [line for _ in range(400) if (line := refusals.add("10.0.0.9"))]
    assert [line.split(": ")[1].split()[0] for line in told] == ["1", "10", "100"]
    assert all(line.startswith("refused 10.0.0.9: ") for line in told)
    assert str(refusals.add("10.0.0.2")).startswith("refused machine 1 (10.0.0.2): 1 ")
    assert sum(refusals.add(f"fd00::{number:x}") is not None for number in range(5000)) < 110


def test_store_keys_do_not_reveal_the_token() -> None:
    prefix = store_prefix(TOKEN)
    assert len(prefix) == 32 and TOKEN not in prefix and prefix != store_prefix(TOKEN + "!")
