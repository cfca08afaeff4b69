"""Small messages between ranks of one machine: a socket a channel, one system call at each end.

With near-empty stages, messages by gloo are about half of a microbatch's time. Large messages stay with it: its thread
copies while this one computes."""

from __future__ import annotations

import socket
import struct
import tempfile
from datetime import timedelta
from pathlib import Path

from torch import Tensor
from torch.distributed import Store

from stagewright.runtime.comm.transport import Done, Pending, Transport

_CAPACITY = 128 * 2**10  # bytes that a socket holds for certain; Linux gives it 208 KiB
_OVERHEAD = 1024  # of the kernel for a message; it also rounds sizes up, at most to twice
_DONE = Done()


class StreamTransport:
    """Sends what fits into a socket's buffer `window` times by the socket, so that it never waits, the rest by gloo.

    Both ends know a message's size before they send or receive it, so they agree on the way it takes.
    """

    def __init__(self, stream: socket.socket, large: Transport, window: int) -> None:
        self._stream = stream
        self._large = large
        self._most = (_CAPACITY // window - _OVERHEAD) // 2

    def send(self, buffer: Tensor) -> Pending:
        if buffer.nbytes > self._most:
            return self._large.send(buffer)
        try:
            self._stream.sendall(buffer.numpy().data)
        except OSError as error:
            raise RuntimeError(f"the other rank is gone ({error.strerror})") from error
        return _DONE

    def receive(self, buffer: Tensor) -> Pending:
        if buffer.nbytes > self._most:
            return self._large.receive(buffer)
        return _Reading(self._stream, buffer.numpy().data)


class _Reading:
    """A message that is read when it is asked for; the kernel keeps it until then."""

    def __init__(self, stream: socket.socket, rest: memoryview) -> None:
        self._stream = stream
        self._rest = rest

    def is_completed(self) -> bool:
        if self._rest:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return not self._rest

    def wait(self) -> None:
        while self._rest:
            try:
                self._read(socket.MSG_WAITALL)
            except BlockingIOError:
                raise RuntimeError("nothing came from the other rank in time") from None

    def _read(self, flags: int) -> None:
        try:
            size = self._stream.recv_into(self._rest, len(self._rest), flags)
        except ConnectionError as error:
            raise RuntimeError(f"the other rank is gone ({error.strerror})") from error
        if not size:
            raise RuntimeError("the other rank is gone (its socket is closed)")
        self._rest = self._rest[size:]


def connect(store: Store, is_source: bool, timeout: timedelta) -> socket.socket:
    """One end of a socket between two ranks that meet in a store."""
    seconds = timeout.total_seconds()
    if is_source:
        with tempfile.TemporaryDirectory(prefix="stagewright-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = str(Path(folder) / "stream")
            listener.bind(path)
            listener.listen(1)
            store.set("path", path)
            listener.settimeout(seconds)
            stream, _ = listener.accept()
    else:
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(store.get("path").decode())
    stream.setblocking(True)
    limit = struct.pack("ll", int(seconds), round(seconds % 1 * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # unlike settimeout, at no call more
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return stream
