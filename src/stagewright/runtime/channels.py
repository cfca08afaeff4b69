"""Messages between stages: one channel a boundary, pair of ranks and direction; packed, numbered and in order.

    FORWARD ─► Outbox.send ─► transport ─► Inbox.receive ─► FORWARD of the next stage

A message is one flat buffer: every tensor of the layout at its offset, then the microbatch number. Both ends compare
their layouts once, with the first message of a layout, and the number with every message. The number comes last, so a
buffer that shows it has arrived: gloo itself can't be asked whether a receive is over, only be waited for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_ALIGNMENT = 64
_NUMBER_BYTES = 8
_NOT_HERE = -1


class LostPeer(RuntimeError):
    """Another rank is gone: its own story is the one to tell."""


class LayoutError(RuntimeError):
    """The two ends of a channel do not mean the same messages."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a message."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Layout:
    """The tensors of a message and where each lies in its buffer."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self.offsets: list[int] = []
        end = 0
        for field in self.fields:
            self.offsets.append(end)
            end += -(-field.bytes // _ALIGNMENT) * _ALIGNMENT
        self.bytes = end + _NUMBER_BYTES

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The message's tensors, as views of its buffer."""
        return [
            buffer[offset : offset + field.bytes].view(field.dtype).view(field.shape)
            for field, offset in zip(self.fields, self.offsets, strict=True)
        ]

    def __str__(self) -> str:
        return ", ".join(map(str, self.fields)) or "nothing"


class Message:
    """A message's buffer with its parts cut out once; buffers are reused, so the cutting is too."""

    def __init__(self, layout: Layout) -> None:
        self.buffer = torch.empty(layout.bytes, dtype=torch.uint8)
        self.number = self.buffer[-_NUMBER_BYTES:].view(torch.int64).numpy()  # a tenth of a tensor's cost to set
        self.tensors = layout.views(self.buffer)


class Pending(Protocol):
    """Something under way."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Transport(Protocol):
    """Moves whole buffers from one rank to another, in order; knows nothing of what is in them."""

    def send(self, buffer: Tensor) -> Pending: ...
    def receive(self, buffer: Tensor) -> Pending: ...


class Bulletin(Protocol):
    """A place where the sending end of a channel tells the receiving end what its messages hold."""

    def post(self, key: str, text: str) -> None: ...
    def read(self, key: str) -> str: ...


class _End:
    """What both ends of a channel share: the name, and the spare messages of the current layout."""

    def __init__(self, name: str, transport: Transport, bulletin: Bulletin) -> None:
        self.name = name
        self._transport = transport
        self._bulletin = bulletin
        self._known: list[str] = []  # layouts opened so far, the same list at both ends
        self._spare: list[Message] = []
        self.layout = Layout(())

    def open(self, layout: Layout) -> bool:
        """Begin a run of messages of one layout; whether it is a new one."""
        if str(layout) != str(self.layout):
            self._spare.clear()
        self.layout = layout
        is_new = str(layout) not in self._known
        if is_new:
            self._known.append(str(layout))
        return is_new

    def _key(self) -> str:
        return f"{self.name}/{self._known.index(str(self.layout))}"

    def _take(self) -> Message:
        return self._spare.pop() if self._spare else Message(self.layout)


class Outbox(_End):
    """The sending end. A send never waits for the receiver, as long as no more than `window` are under way."""

    def __init__(self, name: str, transport: Transport, bulletin: Bulletin, window: int) -> None:
        super().__init__(name, transport, bulletin)
        self._window = window
        self._sent: deque[tuple[Message, Pending]] = deque()

    def open(self, layout: Layout) -> bool:
        is_new = super().open(layout)
        if is_new:
            self._bulletin.post(self._key(), str(layout))
        return is_new

    def send(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        while self._sent and (len(self._sent) >= self._window or self._sent[0][1].is_completed()):
            self._reclaim()
        message = self._take()
        message.number[0] = microbatch
        for place, tensor, field in zip(message.tensors, tensors, self.layout.fields, strict=True):
            if place.shape != tensor.shape or place.dtype != tensor.dtype:
                sent = Field(field.name, tuple(tensor.shape), tensor.dtype)
                raise LayoutError(f"channel {self.name}: microbatch {microbatch} has {sent}, the layout says {field}")
            place.copy_(tensor)
        try:
            self._sent.append((message, self._transport.send(message.buffer)))
        except RuntimeError as error:
            raise LostPeer(f"channel {self.name}: {first_line(error)}") from error

    def flush(self) -> None:
        """Wait until every message is out."""
        while self._sent:
            self._reclaim()

    def _reclaim(self) -> None:
        message, pending = self._sent.popleft()
        try:
            pending.wait()
        except RuntimeError as error:
            raise LostPeer(f"channel {self.name}: {first_line(error)}") from error
        self._spare.append(message)


class Inbox(_End):
    """The receiving end: receives are posted ahead, in the order of the numbers that will come."""

    def __init__(self, name: str, transport: Transport, bulletin: Bulletin, ahead: int) -> None:
        super().__init__(name, transport, bulletin)
        self._ahead = ahead
        self._posted: deque[_Posted] = deque()
        self._coming: Iterator[int] = iter(())
        self._unverified = False

    def open(self, layout: Layout) -> bool:
        self._unverified = super().open(layout)
        return self._unverified

    def expect(self, numbers: Iterator[int]) -> None:
        """Announce the microbatches that will come, and post the first receives.

        Receives that were posted for a span that was cut short are the first of the next one.
        """
        for posted in self._posted:
            assert posted.number == next(numbers, None), f"channel {self.name} still waits for {posted.number}"
        self._coming = numbers
        while len(self._posted) < self._ahead and self._post():
            pass

    @property
    def next(self) -> Pending:
        """The arrival of the next message."""
        return self._posted[0]

    def receive(self, microbatch: int) -> Message:
        """The next message, which must have arrived and be that of `microbatch`; give it back by `release`."""
        self.verify()
        message = self._posted.popleft().message
        self._post()
        if (number := int(message.number[0])) != microbatch:
            raise LayoutError(f"channel {self.name}: microbatch {microbatch} is due but {number} came")
        return message

    def release(self, message: Message) -> None:
        """Let the buffer be used again; nothing may look at its tensors any more."""
        self._spare.append(message)

    def verify(self) -> None:
        """Compare the layout with the sender's, once a layout."""
        if self._unverified:
            self._unverified = False
            theirs = self._bulletin.read(self._key())
            if theirs != str(self.layout):
                raise LayoutError(f"channel {self.name}: the receiver expects {self.layout} but {theirs} is sent")

    def _post(self) -> bool:
        number = next(self._coming, None)
        if number is not None:
            message = self._take()
            message.number[0] = _NOT_HERE
            self._posted.append(_Posted(message, number, self._transport.receive(message.buffer), self.verify))
        return number is not None


@dataclass(frozen=True, slots=True)
class _Posted:
    """A receive under way: over when the transport says so, or when the number at the end of the buffer is there."""

    message: Message
    number: int
    receive: Pending
    verify: Callable[[], None]

    def is_completed(self) -> bool:
        return int(self.message.number[0]) == self.number or self.receive.is_completed()

    def wait(self) -> None:
        self.verify()  # first: a message of another size may never be over
        self.receive.wait()


def first_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Done:
    """Nothing to wait for."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class MemoryTransport:
    """A queue inside one process; a receive is filled once it is waited for, in the order they were posted."""

    def __init__(self) -> None:
        self._queue: deque[Tensor] = deque()

    def send(self, buffer: Tensor) -> Pending:
        self._queue.append(buffer.clone())
        return Done()

    def receive(self, buffer: Tensor) -> Pending:
        return _Claim(self._queue, buffer)


class _Claim:
    """A receive that takes the oldest message; claims are waited for in the order they were made."""

    def __init__(self, queue: deque[Tensor], buffer: Tensor) -> None:
        self._queue = queue
        self._buffer = buffer

    def is_completed(self) -> bool:
        return bool(self._queue)

    def wait(self) -> None:
        assert self._queue, "an emulated rank waits for a message that was not sent"
        self._buffer.copy_(self._queue.popleft())
