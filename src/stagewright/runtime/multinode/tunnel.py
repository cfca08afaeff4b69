"""The door of the store: torch's store asks nobody for a name, so between machines only those with the token reach it.

    rank ─► loopback ─► Tunnel ═══ both sides prove that they know the token ═══► TunnelServer ─► loopback ─► store

The store itself listens on loopback. A proof is a keyed hash of what both sides made up for this connection, so nothing
that was overheard opens the door again."""

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

_NONCE = 32
_PROOF = 32
_HANDSHAKE_SECONDS = 10.0
_MOST_STRANGERS = 64
_CHUNK = 1 << 16
_GREETING = b"stagewright door 1\n"
Refused = Callable[[str], None]


class AccessDenied(ValueError):
    """The other machine does not know the token, or this one does not."""


class LoopThread:
    """An event loop on a thread of its own, and a server on it."""

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
        """Close every connection and end the thread; a second time does nothing."""
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


class TunnelServer:
    """Lets those who know the token through to a port of this machine's loopback."""

    def __init__(self, listener: socket.socket, target: int, token: str, lost: float, refused: Refused) -> None:
        self._target = target
        self._token = token
        self._lost = lost
        self._refused = refused
        self._strangers = 0
        self._loop = LoopThread(listener, self._serve)
        self.close = self._loop.close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername")[0])
        if self._strangers >= _MOST_STRANGERS:
            return
        self._strangers += 1
        try:
            is_known = await asyncio.wait_for(self._greet(reader, writer), _HANDSHAKE_SECONDS)
        except (TimeoutError, OSError, EOFError):
            is_known = False
        finally:
            self._strangers -= 1
        if not is_known:
            self._refused(peer)
            return
        _watch(writer, self._lost)
        await _join(reader, writer, *await asyncio.open_connection(LOOPBACK, self._target))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        own = secrets.token_bytes(_NONCE)
        writer.write(_GREETING + own)
        theirs = await reader.readexactly(_NONCE)
        proof = await reader.readexactly(_PROOF)
        if not hmac.compare_digest(proof, _proof(self._token, b"guest", own, theirs)):
            return False
        writer.write(_proof(self._token, b"host", own, theirs))
        return True


class Tunnel:
    """A port of this machine's loopback that leads through another machine's door."""

    def __init__(self, address: tuple[str, int], source: str, token: str, lost: float) -> None:
        self._address = address
        self._source = source
        self._token = token
        self._lost = lost
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        self._loop = LoopThread(listener, self._serve)
        self.port = self._loop.port
        self.close = self._loop.close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.wait_for(_enter(self._address, self._source, self._token), _HANDSHAKE_SECONDS)
        except AccessDenied:
            return
        _watch(far[1], self._lost)
        await _join(reader, writer, *far)


def check_access(address: tuple[str, int], source: str, token: str, seconds: float = _HANDSHAKE_SECONDS) -> None:
    """Pass through a door once: OSError where there is none yet, AccessDenied where the token is not the same."""

    async def visit() -> None:
        _, writer = await asyncio.wait_for(_enter(address, source, token), seconds)
        writer.close()

    try:
        asyncio.run(visit())
    except EOFError as error:
        raise ConnectionError("it does not answer as a machine of a run") from error


async def _enter(address: tuple[str, int], source: str, token: str) -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
    try:
        if await reader.readexactly(len(_GREETING)) != _GREETING:
            raise ConnectionError("something else answers there")
        theirs = await reader.readexactly(_NONCE)
        own = secrets.token_bytes(_NONCE)
        writer.write(own + _proof(token, b"guest", theirs, own))
        try:
            proof = await reader.readexactly(_PROOF)
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


def store_prefix(token: str) -> str:
    """What every key of a run begins with: it shows the token to nobody."""
    return hmac.new(token.encode(), b"keys", hashlib.sha256).hexdigest()[:32]


def _watch(writer: asyncio.StreamWriter, lost: float) -> None:
    """Let the kernel give up a connection on which nothing is answered any more."""
    line = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    beat = max(1, int(lost / 4))
    for name, value in (
        ("TCP_USER_TIMEOUT", int(lost * 1000)),
        ("TCP_KEEPIDLE", beat),
        ("TCP_KEEPINTVL", beat),
        ("TCP_KEEPCNT", 4),
    ):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Pass on what comes from either side until one of them ends."""
    ways = [asyncio.create_task(_pass(reader, far_writer)), asyncio.create_task(_pass(far_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        far_writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
