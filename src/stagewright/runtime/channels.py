"""Messages between stages: one channel a boundary, pair of ranks and direction; packed, numbered and in order.

    FORWARD ─► Outbox.send ─► transport ─► Inbox.receive ─► FORWARD of the next stage

Both ends compare their layouts once, with the first message of a layout, and the number with every message. The number
comes last, so a buffer that shows it has arrived: gloo itself can't be asked whether a receive is over, only be waited
for. Where the number must be read back from a GPU, it is compared a little later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stagewright.runtime.device import Reading
from stagewright.runtime.messages import Field, HostMessage, Layout, LayoutError, MakeMessage, Message
from stagewright.runtime.pending import Done, LostPeer, Pending, Transport, first_line


class Bulletin(Protocol):
    """A place where ranks leave short texts for each other: what messages hold, whether a gradient overflowed."""

    def post(self, key: str, text: str) -> None: ...
    def read(self, key: str) -> str: ...
    def has(self, key: str) -> bool: ...
    def drop(self, key: str) -> None: ...


class _End:
    """What both ends of a channel share: the name, and the spare messages of the current layout."""

    def __init__(self, name: str, transport: Transport, bulletin: Bulletin, make: MakeMessage) -> None:
        self.name = name
        self._transport = transport
        self._bulletin = bulletin
        self._make = make
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
        return self._spare.pop() if self._spare else self._make(self.layout)


class Outbox(_End):
    """The sending end. A send never waits for the receiver, as long as no more than `window` are under way."""

    def __init__(
        self, name: str, transport: Transport, bulletin: Bulletin, window: int, make: MakeMessage = HostMessage
    ) -> None:
        super().__init__(name, transport, bulletin, make)
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
        for tensor, field in zip(tensors, self.layout.fields, strict=True):
            if tensor.shape != field.shape or tensor.dtype != field.dtype:
                sent = Field(field.name, tuple(tensor.shape), tensor.dtype)
                raise LayoutError(f"channel {self.name}: microbatch {microbatch} has {sent}, the layout says {field}")
        message = self._take()
        try:
            self._sent.append((message, message.send(microbatch, tensors, self._transport)))
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
        message.close()
        self._spare.append(message)


class Inbox(_End):
    """The receiving end: receives are posted ahead, in the order of the numbers that will come."""

    def __init__(
        self, name: str, transport: Transport, bulletin: Bulletin, ahead: int, make: MakeMessage = HostMessage
    ) -> None:
        super().__init__(name, transport, bulletin, make)
        self._ahead = ahead
        self._posted: deque[_Posted] = deque()
        self._coming: Iterator[int] = iter(())
        self._unverified = False
        self._unread: deque[tuple[int, Reading]] = deque()  # numbers that are due, on their way from a GPU

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
        reading = message.open()
        self._post()
        if reading is None:
            self._compare(microbatch, message.number())
        else:
            self._unread.append((microbatch, reading))
            self._settle(wait=False)
        return message

    def release(self, message: Message) -> None:
        """Let the buffer be used again; nothing may look at its tensors any more."""
        message.close()
        self._spare.append(message)

    def flush(self) -> None:
        """Compare the numbers that are still on their way."""
        self._settle(wait=True)

    def _settle(self, *, wait: bool) -> None:
        while self._unread and (wait or self._unread[0][1].is_completed()):
            due, reading = self._unread.popleft()
            self._compare(due, int(reading.value()))

    def _compare(self, due: int, number: int) -> None:
        if number != due:
            raise LayoutError(f"channel {self.name}: microbatch {due} is due but {number} came")

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
            self._posted.append(_Posted(message, number, message.post(self._transport), self.verify))
        return number is not None


@dataclass(frozen=True, slots=True)
class _Posted:
    """A receive under way: over when the transport says so, or when the number at the end of the buffer is there."""

    message: Message
    number: int
    receive: Pending
    verify: Callable[[], None]

    def is_completed(self) -> bool:
        return self.message.shows(self.number) or self.receive.is_completed()

    def wait(self) -> None:
        self.verify()  # first: a message of another size may never be over
        self.receive.wait()


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
