"""Messages between stages: one channel a boundary, pair of ranks and direction; packed, numbered and in order.

    FORWARD ─► Outbox.send ─► transport ─► Inbox.receive ─► FORWARD of the next stage

Both ends compare their layouts once, with the first message of a layout, and the number with every message. The number
comes last, so a buffer that shows it has arrived: gloo itself can't be asked whether a receive is over, only be waited
for. Where the number must be read back from a GPU, it is compared a little later. Where transports and collectives come from: torch.distributed between processes, or memory within one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stagewright.errors import first_line
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.comm.message import (
    Field,
    HostMessage,
    Layout,
    LayoutError,
    MakeMessage,
    Message,
)
from stagewright.runtime.comm.transport import Collective, LostPeer, Pending, Transport


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


POSTED_AHEAD = 2  # one more than is needed to never be late


@dataclass(frozen=True, slots=True, order=True)
class ChannelName:
    """One direction of one boundary between one pair of ranks."""

    kind: str  # act or grad
    stage: int  # that sends
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.stage}/{self.source}-{self.target}"


def channels_of(plan: Plan) -> Iterator[ChannelName]:
    """Every channel a plan uses, in the one order in which all ranks make them."""
    for before, behind in zip(plan.stages, plan.stages[1:], strict=False):
        pairs = {
            (a, b) for a in before.ranks for b in behind.ranks if a != b and _meet(before.ranks, behind.ranks, a, b)
        }
        for source, target in sorted(pairs):
            yield ChannelName("act", before.index, source, target)
            yield ChannelName("grad", behind.index, target, source)


def _meet(before: Sequence[int], behind: Sequence[int], source: int, target: int) -> bool:
    """Whether some microbatch runs on both ranks: i mod r and i mod r' can be any pair that agrees mod their gcd."""
    common = math.gcd(len(before), len(behind))
    return before.index(source) % common == behind.index(target) % common


class Network(Protocol):
    """What connects the ranks of a job."""

    @property
    def bulletin(self) -> Bulletin: ...

    @property
    def posted_ahead(self) -> int:
        """Receives that a channel has waiting."""
        ...

    def transport(self, name: ChannelName, window: int) -> Transport:
        """A channel's way, on which no more than `window` messages are under way in training."""
        ...

    def collective(self, name: str, ranks: Sequence[int]) -> Collective: ...

    def message(self, layout: Layout) -> Message:
        """Memory that the transports can move."""
        ...

    @property
    def host(self) -> Network:
        """What moves memory of the host."""
        ...
