"""The tunnel to the store of machine 0: only machines that know the run's token get through.

    rank ─► loopback ─► Tunnel ═══ both sides prove that they know the token ═══► TunnelServer ─► loopback ─► store

torch's store has no authentication, so it listens on loopback only. A proof is a keyed hash of two nonces, one from
each side and new for each connection, so a recorded handshake opens nothing. Later traffic is not encrypted.

Connections that prove nothing can't keep a machine of the run out: each address has slots of its own for handshakes,
those of `--nodes` outside the total of all others, and whoever finds the slots of its address taken is next in turn."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagewright.runtime.comm.transport import LOOPBACK

GREETING = b"stagewright tunnel 1\n"
NONCE = 32  # bytes
PROOF = 32  # bytes
BUSY = b"busy, try again".ljust(PROOF, b"\n")  # instead of a proof, to a client whose time is up
_CONNECT_SECONDS = 10.0
_RETRY_SECONDS = 0.1
MOST_TURNS = 20  # that one handshake may take; one while others wait
_TURN_SECONDS = 0.25
_SLOTS_PER_ADDRESS = 16  # handshakes at a time
_SLOTS_OF_STRANGERS = 64  # of all addresses together that `--nodes` does not name
_OPEN_PER_ADDRESS = 256  # connections without a proof, with those that wait for a slot
_OPEN_OF_STRANGERS = 512
_MOST_ADDRESSES = 100  # that refusals are counted for one by one
_CHUNK = 1 << 16  # bytes
Refused = Callable[[str], None]


class AccessDenied(Exception):
    """The two machines have different tokens."""


class Busy(ConnectionError):
    """Machine 0 has too many connections without a proof; the next attempt may get through."""


@dataclass
class _Lane:
    """The connections without a proof that come from one address, or from all strangers together."""

    slots: asyncio.Semaphore  # which wakes those that wait in the order in which they came
    most: int
    open: int = 0
    waiting: int = 0  # for a slot


@dataclass
class Lanes:
    """Who may attempt a handshake now: every address has slots of its own, those not of `known` also a common total."""

    known: Collection[str] = ()  # addresses of the machines of the run
    _by_address: dict[str, _Lane] = field(default_factory=dict)
    _strangers: _Lane = field(default_factory=lambda: _Lane(asyncio.Semaphore(_SLOTS_OF_STRANGERS), _OPEN_OF_STRANGERS))

    @contextlib.asynccontextmanager
    async def slot(self, peer: str) -> AsyncIterator[Callable[[], bool]]:
        """A slot for a handshake; yields whether someone waits for it. Busy where too many wait already."""
        own = self._by_address.setdefault(peer, _Lane(asyncio.Semaphore(_SLOTS_PER_ADDRESS), _OPEN_PER_ADDRESS))
        lanes = [own] if peer in self.known else [own, self._strangers]
        is_full = any(lane.open >= lane.most for lane in lanes)
        async with contextlib.AsyncExitStack() as stack:
            for lane in lanes:
                lane.open += 1
                stack.callback(self._close, peer, lane)
            if is_full:
                raise Busy
            for lane in lanes:
                lane.waiting += 1
                try:
                    await stack.enter_async_context(lane.slots)
                finally:
                    lane.waiting -= 1
            yield lambda: any(lane.waiting for lane in lanes)

    def _close(self, peer: str, lane: _Lane) -> None:
        lane.open -= 1
        if not lane.open and lane is not self._strangers:
            del self._by_address[peer]


class Refusals:
    """Counts refused connections by address and says when a person should know: after 1, 10, 100, ... of them."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names  # of machines of the run, by address; it may be filled later
        self._counts: Counter[str] = Counter()

    def add(self, peer: str) -> str | None:
        if peer not in self._counts and len(self._counts) >= _MOST_ADDRESSES:
            peer = "other addresses"
        self._counts[peer] += 1
        count = self._counts[peer]
        if count != 10 ** (len(str(count)) - 1):
            return None
        times = "1 connection" if count == 1 else f"{count} connections"
        return f"refused {self._names.get(peer, peer)}: {times} did not prove to know the token"


class LoopThread:
    """A socket server on an event loop in its own thread."""

    def __init__(self, listener: socket.socket, serve: Callable[[Any, Any], Awaitable[None]]) -> None:
        self.port = int(listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await serve(reader, writer)
            except (TimeoutError, OSError, EOFError, asyncio.CancelledError):
                pass
            finally:
                self._tasks.discard(task)
                writer.close()

        async def start() -> asyncio.Server:
            return await asyncio.start_server(handle, sock=listener, backlog=1024)

        self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result()

    def close(self) -> None:
        """Close every connection and end the thread; calling it again does nothing."""
        if not self._thread.is_alive():
            return

        async def stop() -> None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(stop(), self._loop).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


class TunnelServer(LoopThread):
    """Machine 0's end: forwards connections that prove to know the token to a port on loopback.

    `refused` gets the address of every other one. `lost` is how many seconds a connection may go unanswered; `known`
    has the addresses of the run's machines.
    """

    def __init__(
        self,
        listener: socket.socket,
        target: int,
        token: str,
        lost: float,
        refused: Refused,
        known: Collection[str] = (),
    ) -> None:
        self._target = target
        self._token = token
        self._lost = lost
        self._refused = refused
        self._lanes = Lanes(known)
        super().__init__(listener, self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername")[0])
        try:
            async with self._lanes.slot(peer) as is_awaited:
                is_known = await self._handshake(reader, writer, is_awaited)
        except (OSError, EOFError):
            is_known = False
        if not is_known:
            self._refused(peer)
            return
        _set_keepalive(writer, self._lost)
        await _forward(reader, writer, *await asyncio.open_connection(LOOPBACK, self._target))

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_awaited: Callable[[], bool]
    ) -> bool:
        """Whether the other side proves to know the token: within one turn while someone waits for this slot."""
        task = asyncio.create_task(self._authenticate(reader, writer))
        try:
            for _ in range(MOST_TURNS):
                done, _ = await asyncio.wait({task}, timeout=_TURN_SECONDS)
                if done:
                    return task.result()
                if is_awaited():
                    break
        finally:
            task.cancel()
        writer.write(BUSY)  # a slow machine of the run may try again; a wrong proof gets no answer
        return False

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        own = secrets.token_bytes(NONCE)
        writer.write(GREETING + own)
        theirs = await reader.readexactly(NONCE)
        proof = await reader.readexactly(PROOF)
        if not hmac.compare_digest(proof, _proof(self._token, b"guest", own, theirs)):
            return False
        writer.write(_proof(self._token, b"host", own, theirs))
        return True


class Tunnel(LoopThread):
    """Another machine's end: a port on loopback that leads to the store of machine 0."""

    def __init__(self, address: tuple[str, int], source: str, token: str, lost: float) -> None:
        self._address = address
        self._source = source
        self._token = token
        self._lost = lost
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        super().__init__(listener, self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.wait_for(self._connect(), _CONNECT_SECONDS)
        except AccessDenied:
            return
        _set_keepalive(far[1], self._lost)
        await _forward(reader, writer, *far)

    async def _connect(self) -> tuple[Any, Any]:
        while True:
            try:
                return await _connect(self._address, self._source, self._token)
            except Busy:
                await asyncio.sleep(_RETRY_SECONDS)


def check_access(address: tuple[str, int], source: str, token: str, seconds: float = _CONNECT_SECONDS) -> None:
    """Try a tunnel once: OSError where machine 0 does not listen yet, AccessDenied where its token is another one."""

    async def attempt() -> None:
        _, writer = await asyncio.wait_for(_connect(address, source, token), seconds)
        writer.close()

    asyncio.run(attempt())


def store_prefix(token: str) -> str:
    """The prefix of a run's store keys: the same on each machine, and it does not reveal the token."""
    return hmac.new(token.encode(), b"keys", hashlib.sha256).hexdigest()[:32]


async def _connect(address: tuple[str, int], source: str, token: str) -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    try:
        try:
            greeting, theirs = await reader.readexactly(len(GREETING)), await reader.readexactly(NONCE)
        except (EOFError, ConnectionResetError) as error:
            raise Busy("the other side closed the connection before the handshake") from error
        if greeting != GREETING:
            raise ConnectionError("another program listens there")
        own = secrets.token_bytes(NONCE)
        writer.write(own + _proof(token, b"guest", theirs, own))
        try:
            proof = await reader.readexactly(PROOF)
        except EOFError as error:
            raise AccessDenied from error
        except ConnectionResetError as error:
            raise Busy("the other side closed the connection during the handshake") from error
        if proof == BUSY:
            raise Busy("the other side has too many connections")
        if not hmac.compare_digest(proof, _proof(token, b"host", theirs, own)):
            raise AccessDenied
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _proof(token: str, side: bytes, host: bytes, guest: bytes) -> bytes:
    return hmac.new(token.encode(), side + b"/" + host + guest, hashlib.sha256).digest()


def _set_keepalive(writer: asyncio.StreamWriter, lost: float) -> None:
    """Have the kernel close a connection that has gone unanswered for `lost` seconds."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = max(1, int(lost / 4))
    for name, value in (
        ("TCP_USER_TIMEOUT", int(lost * 1000)),
        ("TCP_KEEPIDLE", interval),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copy both ways until one side closes."""
    copies = [asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
