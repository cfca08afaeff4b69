"""Unix sockets between ranks of one machine, which exchange their paths through a store."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store

_LONGEST_TMPDIR = 70  # bytes; a socket's path may have 107
_NUMBER_BYTES = 16  # more than a member's number has


def socket_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A folder for sockets, whose paths have at most 107 bytes: in /tmp where that of TMPDIR is too long."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR
    return tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp" if is_long else None)


def connect_two(store: Store, is_source: bool, timeout: timedelta) -> socket.socket:
    """One end of a stream between two ranks; what takes longer than `timeout` is an error."""
    (stream,) = connect_all(store, int(not is_source), 2, timeout, socket.SOCK_STREAM).values()
    stream.setblocking(True)
    seconds = timeout.total_seconds()
    limit = struct.pack("ll", int(seconds), round(seconds % 1 * 1e6))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # unlike settimeout, without further system calls
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return stream


def connect_all(
    store: Store, member: int, size: int, timeout: timedelta, kind: int = socket.SOCK_SEQPACKET
) -> dict[int, socket.socket]:
    """A socket to each other member, by its number; by default one that keeps the bounds of messages.

    Each member listens for those after it, and connects to those before it, which need not have accepted yet.
    """
    found: dict[int, socket.socket] = {}
    with socket_folder("stagewright-") as folder, socket.socket(socket.AF_UNIX, kind) as listener:
        path = str(Path(folder) / "socket")
        listener.bind(path)
        listener.listen(size)
        listener.settimeout(timeout.total_seconds())
        store.set(f"path/{member}", path)
        store.wait([f"path/{other}" for other in range(member)], timeout)
        for other in range(member):
            found[other] = socket.socket(socket.AF_UNIX, kind)
            found[other].connect(store.get(f"path/{other}").decode())
            found[other].sendall(str(member).encode())
        while len(found) < size - 1:
            peer, _ = listener.accept()
            found[int(peer.recv(_NUMBER_BYTES))] = peer
    return found
