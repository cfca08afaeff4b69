"""Sums of ranks on one machine, through memory that all of them have mapped.

Gloo moves every byte of a sum through the kernel twice; here each rank copies its part into the memory, and the result
out of it:

    part of rank 0 ─┐                 ┌─► share 0, added by rank 0 ─┐
    part of rank 1 ─┼─► a slot's      ├─► share 1, added by rank 1 ─┼─► the slot's result ─► all ranks
    part of rank 2 ─┘   places        └─► share 2, added by rank 2 ─┘

A tensor is summed in pieces. The memory is a ring of slots, one for each piece that is under way, so that a piece is
copied in while another is added and a third copied out. Ranks tell each other by sockets, once that a piece's parts are
`filled` in, and once that its shares are `added`. A rank fills a slot again after it has copied the last result out of
it, so "filled" of all ranks also says that the result may be written.

The memory is anonymous: its descriptor is passed over the sockets, and nothing is left when ranks are killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import Tensor
from torch.distributed import Store

from stagewright.runtime.comm.device import Gpu, record_event
from stagewright.runtime.comm.message import FormatError
from stagewright.runtime.comm.transport import LostPeer, Pending
from stagewright.runtime.comm.unix_socket import connect_all

_SMALL = 64 * 2**10  # bytes of a sum on the host that every rank adds up itself, which takes one message less
_SHARE_BYTES = 512 * 2**10  # of a piece, that a rank adds up: its core's cache holds that
_PIECE_BYTES = 4 * 2**20  # at most, so that the memory grows with the number of ranks, not with its square
_SLOTS = 4
_ALIGNMENT = 64  # elements: no two ranks write to the same line of a cache
_MESSAGE_BYTES = 256
_FILLED, _ADDED = b"f", b"a"
_JOIN_SECONDS = 5.0
_LONGEST_TIMEOUT = 1e6  # seconds; poll takes no more than twice that


def connect_sums(store: Store, ranks: Sequence[int], rank: int, timeout: timedelta, gpu: Gpu | None) -> SharedSums:
    """The collective of ranks that are all on this machine."""
    member, size = ranks.index(rank), len(ranks)
    try:
        sockets = connect_all(store, member, size, timeout)
        memory = _share_memory(sockets, member, _SLOTS * (size + 1) * _piece_bytes(size))
    except (OSError, RuntimeError, ValueError) as error:  # a message without content: a rank ended meanwhile
        raise LostPeer(f"no connection for sums with ranks {list(ranks)}: {error}") from error
    peers = [_Peer(ranks[other], stream) for other, stream in sockets.items()]
    return SharedSums(_Driver(member, rank, peers, memory, timeout.total_seconds(), gpu))


def _piece_bytes(size: int) -> int:
    return min(size * _SHARE_BYTES, _PIECE_BYTES)


def _share_memory(sockets: dict[int, socket.socket], member: int, size: int) -> Tensor:
    """The memory that the first member makes for all; no page of it exists before it is used."""
    if member == 0:
        descriptor = os.memfd_create("stagewright-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        for stream in sockets.values():
            socket.send_fds(stream, [b"memory"], [descriptor])
    else:
        _, (descriptor,), _, _ = socket.recv_fds(sockets[0], _MESSAGE_BYTES, 1)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class SharedSums:
    """Sums over the ranks of one machine.

    Every number is added up once, by one rank and in the order of the ranks: all ranks get the same bits, at every run,
    and those of ranks in one process (`memory`).
    """

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver
        weakref.finalize(self, driver.close)

    def sum(self, tensor: Tensor) -> Pending:
        summing = _Sum(self, tensor)
        self._driver.post(summing)
        return summing


class _Sum:
    """A sum; while it is under way, it keeps its collective, which ends with the last reference to it."""

    def __init__(self, owner: SharedSums, tensor: Tensor) -> None:
        self._owner: SharedSums | None = owner
        self.flat = tensor.view(-1)
        self.begun = record_event() if tensor.is_cuda else None
        self.returned: torch.cuda.Event | None = None  # the copies that end it, on a GPU
        self.error: Exception | None = None
        self._done = threading.Event()

    def complete(self, error: Exception | None = None) -> None:
        self.error = error
        self._done.set()
        self._owner = None

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.returned is not None:
            torch.cuda.current_stream().wait_event(self.returned)


@dataclass(slots=True)
class _Piece:
    number: int  # over all sums
    name: str  # what all ranks must agree about
    part: Tensor  # of this rank; in the end the sum
    summing: _Sum
    is_last: bool
    is_small: bool  # the only piece of a small sum


@dataclass(slots=True)
class _Peer:
    """What another rank has said."""

    rank: int
    stream: socket.socket
    filled: deque[str] = field(default_factory=deque)  # names of pieces that are not added yet
    added: int = 0  # pieces
    is_gone: bool = False


class _Driver:
    """The thread that moves pieces from `_waiting` to `_filled` to `_added`, in order; it begins at the first sum.

    Copies from a GPU are complete later: then pieces are in `_copied`, before they are announced as filled.
    """

    def __init__(
        self, member: int, rank: int, peers: Sequence[_Peer], memory: Tensor, timeout: float, gpu: Gpu | None
    ) -> None:
        self._member = member
        self._rank = rank
        self._peers = {peer.stream.fileno(): peer for peer in peers}
        self._size = len(self._peers) + 1
        self._piece_bytes = _piece_bytes(self._size)
        self._memory = memory
        self._timeout = min(timeout, _LONGEST_TIMEOUT)
        self._gpu = gpu
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the thread
        weakref.finalize(self, os.close, self._bell)
        self._poll = select.poll()
        for descriptor in (self._bell, *self._peers):
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._drive, name="sums", daemon=True)
        self._is_closed = False
        self._error: Exception | None = None
        self._posted: deque[_Sum] = deque()
        self._open: deque[_Sum] = deque()
        self._sums = 0
        self._pieces = 0
        self._waiting: deque[_Piece] = deque()
        self._copied: deque[_Piece] = deque()
        self._in_ring = 0
        self._filled: deque[_Piece] = deque()
        self._added: deque[_Piece] = deque()
        self._copies: _GpuCopies | None = None  # from the first sum on a GPU on

    def post(self, summing: _Sum) -> None:
        """Begin a sum, in the order of calls."""
        if summing.begun is not None and self._copies is None:
            assert self._gpu is not None
            self._copies = _GpuCopies(self._gpu, self._memory, self._notice)
        if self._thread.ident is None:
            self._thread.start()
        self._posted.append(summing)
        if self._error is None:
            os.eventfd_write(self._bell, 1)
        else:
            self._refuse(self._error)

    def close(self) -> None:
        """End the thread at once, and with it what is under way."""
        self._is_closed = True
        if self._thread.ident is None:
            self._hang_up()
        else:
            os.eventfd_write(self._bell, 1)
            if threading.current_thread() is not self._thread:  # which may drop the last reference to the collective
                self._thread.join(_JOIN_SECONDS)

    @torch.no_grad()
    def _drive(self) -> None:
        try:
            limit = 0.0  # until when a piece must have moved
            while not self._is_closed:
                now = time.monotonic()
                if self._advance():
                    limit = now + self._timeout
                    self._listen(0.0)
                elif not (self._in_ring or self._waiting):
                    self._listen(None)
                else:
                    self._require_all(is_late=now >= limit)
                    limit = limit if now < limit else now + self._timeout  # this rank's own GPU is late
                    self._listen(limit - now)
            raise RuntimeError("the sums of this rank were ended")
        except Exception as error:
            self._error = error
            for summing in self._open:
                summing.complete(error)
            self._refuse(error)
        self._hang_up()

    def _advance(self) -> bool:
        """Do the next step of each piece that can take one; returns whether there was any."""
        while self._posted:
            self._waiting.extend(self._cut(self._posted.popleft()))
        is_moved = False
        if self._filled and all(peer.filled for peer in self._peers.values()):
            self._add(self._filled.popleft())
            is_moved = True
        if self._waiting and self._in_ring < _SLOTS:
            self._fill(self._waiting.popleft())
            is_moved = True
        while self._copied:
            self._announce(self._copied.popleft())
            is_moved = True
        if self._added and all(peer.added > self._added[0].number for peer in self._peers.values()):
            self._return(self._added.popleft())
            is_moved = True
        return is_moved

    def _cut(self, summing: _Sum) -> Iterator[_Piece]:
        self._open.append(summing)
        parts = torch.split(summing.flat, self._piece_bytes // summing.flat.itemsize)
        is_small = summing.flat.nbytes <= _SMALL and not summing.flat.is_cuda
        for index, part in enumerate(parts):
            name = f"piece {index} of sum {self._sums}: {part.nbytes} bytes of {part.dtype}"
            yield _Piece(self._pieces, name, part, summing, index == len(parts) - 1, is_small)
            self._pieces += 1
        self._sums += 1

    def _fill(self, piece: _Piece) -> None:
        """Copy this rank's part to where others read it; its own share they don't."""
        self._in_ring += 1
        place = self._place(piece, self._member)
        if piece.part.is_cuda:
            assert self._copies is not None
            self._copies.begin_out(piece.part, place, piece.summing.begun)
        else:
            low, high = (0, 0) if piece.is_small else self._share(piece)
            place[:low].copy_(piece.part[:low])
            place[high:].copy_(piece.part[high:])
        if self._copies is None:
            self._announce(piece)
        else:
            self._copies.watch(piece, piece.number % _SLOTS)

    def _notice(self, copied: _Piece | Exception) -> None:
        """Called by the thread that waits for a GPU's copies."""
        if isinstance(copied, Exception):
            self._error = copied
        else:
            self._copied.append(copied)
        os.eventfd_write(self._bell, 1)

    def _announce(self, piece: _Piece) -> None:
        self._filled.append(piece)
        self._tell(_FILLED + piece.name.encode())

    def _add(self, piece: _Piece) -> None:
        """Add this rank's share of a piece, in the order of the ranks."""
        for peer in self._peers.values():
            if (name := peer.filled.popleft()) != piece.name:
                raise FormatError(f"rank {peer.rank} adds {name}, where rank {self._rank} adds {piece.name}")
        low, high = self._share(piece)
        parts = [self._place(piece, member)[low:high] for member in range(self._size)]
        if not piece.part.is_cuda:
            parts[self._member] = piece.part[low:high]
        result = torch.empty_like(piece.part) if piece.is_small else self._place(piece, self._size)[low:high]
        torch.add(parts[0], parts[1], out=result)
        for part in parts[2:]:
            result.add_(part)
        self._added.append(piece)
        self._tell(_ADDED)
        if piece.is_small:
            piece.part.copy_(result)
            self._complete(piece)

    def _return(self, piece: _Piece) -> None:
        """Copy the result of a piece to where its part was."""
        self._in_ring -= 1
        if piece.is_small:
            return
        result = self._place(piece, self._size)
        if piece.part.is_cuda:
            assert self._copies is not None
            piece.summing.returned = self._copies.begin_in(piece.part, result, piece.number % _SLOTS)
        else:
            piece.part.copy_(result)
        self._complete(piece)

    def _complete(self, piece: _Piece) -> None:
        if piece.is_last:
            self._open.remove(piece.summing)
            piece.summing.complete()

    def _place(self, piece: _Piece, member: int) -> Tensor:
        """What a slot has for a piece: a member's part, or after the last one the result."""
        begin = (piece.number % _SLOTS * (self._size + 1) + member) * self._piece_bytes
        return self._memory[begin : begin + piece.part.nbytes].view(piece.part.dtype)

    def _share(self, piece: _Piece) -> tuple[int, int]:
        """The elements of a piece that this rank adds up."""
        length = len(piece.part)
        if piece.is_small:
            return 0, length
        each = -(-length // (self._size * _ALIGNMENT)) * _ALIGNMENT
        return min(self._member * each, length), min((self._member + 1) * each, length)

    def _tell(self, message: bytes) -> None:
        for peer in self._peers.values():
            with suppress(OSError):  # a peer that is gone is noticed where something is missing from it
                peer.stream.send(message, socket.MSG_NOSIGNAL)

    def _listen(self, seconds: float | None) -> None:
        """Take what was said, or wait for it."""
        for descriptor, _ in self._poll.poll(None if seconds is None else seconds * 1000):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
                if self._error is not None:
                    raise self._error
            else:
                self._hear(self._peers[descriptor])

    def _hear(self, peer: _Peer) -> None:
        try:
            message = peer.stream.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            return  # it ended before it had read all of ours; this comes first, then what it has sent, then the end
        if message.startswith(_FILLED):
            peer.filled.append(message.removeprefix(_FILLED).decode())
        elif message == _ADDED:
            peer.added += 1
        else:
            peer.is_gone = True
            self._poll.unregister(peer.stream)

    def _lacks(self, peer: _Peer) -> bool:
        """Whether the oldest pieces wait for a peer."""
        lacks_part = bool(self._filled) and not peer.filled
        return lacks_part or (bool(self._added) and peer.added <= self._added[0].number)

    def _require_all(self, *, is_late: bool) -> None:
        lacking = [peer for peer in self._peers.values() if self._lacks(peer)]
        for peer in lacking:
            if peer.is_gone:
                raise RuntimeError(f"rank {peer.rank} is gone (its socket is closed)")
        if lacking and is_late:
            others = ", ".join(str(peer.rank) for peer in lacking)
            raise RuntimeError(f"rank {others} did not join a sum within {self._timeout:g} s")

    def _refuse(self, error: Exception) -> None:
        """Complete what was posted with an error; the caller and the thread may both do so."""
        with suppress(IndexError):
            while True:
                self._posted.popleft().complete(error)

    def _hang_up(self) -> None:
        if self._copies is not None:
            self._copies.close()
        for peer in self._peers.values():
            peer.stream.close()


class _GpuCopies:
    """Copies between a GPU and the memory, on streams of their own, and the thread that waits for them.

    A piece is complete once its part has arrived in a slot, and the last result has left it.
    """

    def __init__(self, gpu: Gpu, memory: Tensor, notice: Callable[[_Piece | Exception], None]) -> None:
        self._gpu = gpu
        self._memory = memory
        self._notice = notice
        self._out, self._in = (torch.cuda.Stream(gpu.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._arrival: torch.cuda.Event | None = None  # of the newest part
        self._returns: dict[int, torch.cuda.Event] = {}  # of the newest result of each slot
        self._watched: SimpleQueue[tuple[_Piece, Sequence[torch.cuda.Event]] | None] = SimpleQueue()
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
        self._is_pinned = int(code) == 0  # otherwise the host waits for copies
        if not self._is_pinned:
            with suppress(RuntimeError):
                torch.zeros(1, device=gpu.device)  # takes the error, which CUDA reports at whatever comes next
        self._thread = threading.Thread(target=self._watch, name="copies of sums", daemon=True)
        self._thread.start()

    def begin_out(self, part: Tensor, place: Tensor, after: torch.cuda.Event | None) -> None:
        with self._gpu.on_stream(self._out, after):
            place.copy_(part, non_blocking=True)
            self._arrival = record_event()

    def begin_in(self, part: Tensor, result: Tensor, slot: int) -> torch.cuda.Event:
        with self._gpu.on_stream(self._in, None):
            part.copy_(result, non_blocking=True)
            self._returns[slot] = record_event()
        return self._returns[slot]

    def watch(self, piece: _Piece, slot: int) -> None:
        """Notice a piece when it is complete, and after all before it."""
        events = (self._arrival, self._returns.pop(slot, None))
        self._watched.put((piece, [event for event in events if event is not None]))

    def _watch(self) -> None:
        try:
            while (watched := self._watched.get()) is not None:
                piece, events = watched
                for event in events:
                    event.synchronize()
                self._notice(piece)
        except Exception as error:
            self._notice(error)

    def close(self) -> None:
        self._watched.put(None)
        self._thread.join(_JOIN_SECONDS)
        if not self._is_pinned:
            return
        with suppress(RuntimeError):  # a GPU that has failed does not copy any more
            self._in.synchronize()
            self._out.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
