"""The tunnel to the store of machine 0: only machines that know the run's token get through.

    rank ─► loopback ─► Tunnel ═══ both sides prove that they know the token ═══► TunnelServer ─► loopback ─► store

torch's store has no authentication, so it listens on loopback only. A proof is a keyed hash of two nonces, one from
each side and new for each connection, so a recorded handshake opens nothing. Later traffic is not encrypted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from stagewright.runtime.comm.transport import LOOPBACK

GREETING = b"stagewright tunnel 1\n"
NONCE = 32  # bytes
PROOF = 32  # bytes
_HANDSHAKE_SECONDS = 10.0
_MAX_HANDSHAKES = 64  # at a time
_CHUNK = 1 << 16  # bytes
Refused = Callable[[str], None]


class AccessDenied(ValueError):
    """The two machines have different tokens."""


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

    `refused` gets the address of every other one. `lost` is how many seconds a connection may go unanswered.
    """

    def __init__(self, listener: socket.socket, target: int, token: str, lost: float, refused: Refused) -> None:
        self._target = target
        self._token = token
        self._lost = lost
        self._refused = refused
        self._handshakes = 0
        super().__init__(listener, self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername")[0])
        if self._handshakes >= _MAX_HANDSHAKES:
            return
        self._handshakes += 1
        try:
            is_known = await asyncio.wait_for(self._authenticate(reader, writer), _HANDSHAKE_SECONDS)
        except (TimeoutError, OSError, EOFError):
            is_known = False
        finally:
            self._handshakes -= 1
        if not is_known:
            self._refused(peer)
            return
        _set_keepalive(writer, self._lost)
        await _forward(reader, writer, *await asyncio.open_connection(LOOPBACK, self._target))

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
            far = await asyncio.wait_for(_connect(self._address, self._source, self._token), _HANDSHAKE_SECONDS)
        except AccessDenied:
            return
        _set_keepalive(far[1], self._lost)
        await _forward(reader, writer, *far)


def check_access(address: tuple[str, int], source: str, token: str, seconds: float = _HANDSHAKE_SECONDS) -> None:
    """Try a tunnel once: OSError where machine 0 does not listen yet, AccessDenied where its token is another one."""

    async def attempt() -> None:
        _, writer = await asyncio.wait_for(_connect(address, source, token), seconds)
        writer.close()

    try:
        asyncio.run(attempt())
    except EOFError as error:
        raise ConnectionError("the other side closed the connection during the handshake") from error


def store_prefix(token: str) -> str:
    """The prefix of a run's store keys: the same on each machine, and it does not reveal the token."""
    return hmac.new(token.encode(), b"keys", hashlib.sha256).hexdigest()[:32]


async def _connect(address: tuple[str, int], source: str, token: str) -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    try:
        if await reader.readexactly(len(GREETING)) != GREETING:
            raise ConnectionError("another program listens there")
        theirs = await reader.readexactly(NONCE)
        own = secrets.token_bytes(NONCE)
        writer.write(own + _proof(token, b"guest", theirs, own))
        try:
            proof = await reader.readexactly(PROOF)
        except EOFError as error:
            raise AccessDenied from error
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
