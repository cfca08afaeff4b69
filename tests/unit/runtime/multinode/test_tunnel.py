"""The store's door: whoever knows the token is let through, nobody else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from stagewright.runtime.multinode.nodes import bound_to
from stagewright.runtime.multinode.tunnel import AccessDenied, Tunnel, TunnelServer, check_access, store_prefix

TOKEN, HOST = "a token of tests, long enough", "127.0.0.1"


class House:
    """A store behind a door."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        listener = bound_to(HOST, 0)
        self.address = (HOST, int(listener.getsockname()[1]))
        self.door = TunnelServer(listener, self.store.port, TOKEN, 5.0, self.refused.append)


@pytest.fixture
def house() -> Iterator[House]:
    found = House()
    yield found
    found.door.close()


def eventually(condition: object) -> None:
    limit = time.monotonic() + 5
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_store_is_used_through_the_door(house: House) -> None:
    tunnel = Tunnel(house.address, HOST, TOKEN, 5.0)
    try:
        clients = [TCPStore(HOST, tunnel.port, is_master=False, timeout=timedelta(seconds=5)) for _ in range(3)]
        clients[0].set("key", "x" * 1_000_000)
        assert clients[1].get("key") == b"x" * 1_000_000
        threading.Timer(0.2, lambda: clients[2].set("late", "yes")).start()
        assert clients[1].get("late") == b"yes"
        check_access(house.address, HOST, TOKEN)
    finally:
        tunnel.close()
    assert house.refused == []
    with pytest.raises(RuntimeError):
        clients[0].get("key")


def test_another_token_is_no_entry(house: House) -> None:
    with pytest.raises(AccessDenied):
        check_access(house.address, HOST, "another token, as long as that")
    eventually(lambda: house.refused == [HOST])
    tunnel = Tunnel(house.address, HOST, "another token, as long as that", 5.0)
    with pytest.raises(RuntimeError):
        TCPStore(HOST, tunnel.port, is_master=False, timeout=timedelta(seconds=1))
    tunnel.close()


def test_a_store_client_that_knows_nothing_of_doors_gets_nothing(house: House) -> None:
    house.store.set("secret", "value")
    with pytest.raises(RuntimeError):
        TCPStore(*house.address, is_master=False, timeout=timedelta(seconds=1)).get("secret")


@pytest.mark.parametrize("said", [b"", b"\0" * 64, b"x" * 63, b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 64])
def test_strangers_that_say_anything_are_refused(house: House, said: bytes) -> None:
    with socket.create_connection(house.address) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        heard = b""
        while data := stranger.recv(1000):
            heard += data
    assert heard.startswith(b"stagewright door 1\n") and len(heard) == 19 + 32  # a greeting and a nonce, no proof
    eventually(lambda: house.refused == [HOST])


def test_what_was_overheard_does_not_open_it_again(house: House) -> None:
    overheard = bytearray()
    relay = bound_to(HOST, 0)
    relay.listen(1)

    def listen_in() -> None:
        near, _ = relay.accept()
        with near, socket.create_connection(house.address) as far:
            near.sendall(far.recv(51))
            overheard.extend(near.recv(64))
            far.sendall(overheard)
            near.sendall(far.recv(32))

    thread = threading.Thread(target=listen_in)
    thread.start()
    check_access((HOST, relay.getsockname()[1]), HOST, TOKEN)
    thread.join()
    relay.close()
    with socket.create_connection(house.address) as thief:
        thief.recv(51)
        thief.sendall(overheard)
        thief.settimeout(5)
        assert thief.recv(1) == b""


def test_a_host_that_does_not_know_the_token_is_no_host() -> None:
    impostor = bound_to(HOST, 0)
    impostor.listen(1)

    def pretend() -> None:
        near, _ = impostor.accept()
        with near:
            near.sendall(b"stagewright door 1\n" + bytes(32))
            near.recv(64)
            near.sendall(bytes(32))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(AccessDenied):
        check_access((HOST, impostor.getsockname()[1]), HOST, TOKEN)
    thread.join()
    impostor.close()


def test_keys_do_not_show_the_token() -> None:
    prefix = store_prefix(TOKEN)
    assert len(prefix) == 32 and TOKEN not in prefix and prefix != store_prefix(TOKEN + "!")
