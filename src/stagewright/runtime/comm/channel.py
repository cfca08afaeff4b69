"""Channels between stages: numbered messages, in order, one channel per boundary, pair of ranks and direction.

    FORWARD ─► Outbox.send ─► transport ─► Inbox.receive ─► FORWARD of the next stage

Both ends compare their message formats once, at the first message of a format, and the number of every message. The
number is the end of the buffer, so once it shows, the whole message has arrived: gloo can only wait for a receive, not
say whether it is complete. Where the number must be read back from a GPU, it is compared a little later.

`channels_of` names a plan's channels; a `Network` provides the transports, collectives and buffers that they use.

Two boundaries between the same ranks have channels of their own: dynamic scheduling does not fix their order among each
other. Receives are posted ahead and buffers are reused, so memory grows with the depth, not with the run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import Store

from stagewright.errors import first_line
from stagewright.plan.plan import Plan
from stagewright.runtime.comm.device import Reading
from stagewright.runtime.comm.message import Field, FormatError, Message, MessageFormat
from stagewright.runtime.comm.transport import Collective, LostPeer, Pending, Solo, Transport


@dataclass(frozen=True, slots=True, order=True)
class ChannelName:
    """One direction of one boundary between one pair of ranks."""

    kind: str  # act or grad
    stage: int  # the sending stage
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.stage}/{self.source}-{self.target}"


def channels_of(plan: Plan) -> Iterator[ChannelName]:
    """Every channel of a plan, in the one order in which all ranks open them."""
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        pairs = {
            (a, b) for a in before.ranks for b in after.ranks if a != b and _share_any(before.ranks, after.ranks, a, b)
        }
        for source, target in sorted(pairs):
            yield ChannelName("act", before.index, source, target)
            yield ChannelName("grad", after.index, target, source)


def _share_any(before: Sequence[int], after: Sequence[int], source: int, target: int) -> bool:
    """Whether any microbatch runs on both ranks: (i mod r, i mod r') takes every pair that agrees modulo their gcd."""
    common = math.gcd(len(before), len(after))
    return before.index(source) % common == after.index(target) % common


class Network(ABC):
    """Connects the ranks of a job: makes what channels and collectives move their content with."""

    store: Store  # short texts that all ranks share: what messages hold, whether a gradient overflowed
    posted_ahead = 2  # receives that a channel keeps posted; one more than is needed to be never late

    @property
    def host(self) -> Network:
        """The network that moves host memory."""
        return self

    @abstractmethod
    def transport(self, name: ChannelName, window: int) -> Transport:
        """The transport of a channel, which never has more than `window` messages in flight during training."""

    @abstractmethod
    def message(self, message_format: MessageFormat) -> Message:
        """A buffer that the transports can move."""

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        """The sums of some ranks, of which this is one."""
        return Solo() if len(ranks) == 1 else self.connect(name, ranks)

    @abstractmethod
    def connect(self, name: str, ranks: Sequence[int]) -> Collective:
        """The sums of several ranks."""


class _End:
    """The common part of both ends of a channel: its name, and the spare messages of the current format."""

    def __init__(self, network: Network, name: ChannelName, window: int) -> None:
        self.name = name
        self.format = MessageFormat(())
        self._network = network
        self._transport = network.transport(name, window)
        self._window = window
        self._opened: list[str] = []  # every format so far; the list is the same at both ends
        self._spare: list[Message] = []

    def open(self, message_format: MessageFormat) -> bool:
        """Use this format from the next message on; returns whether the channel has not used it before."""
        if str(message_format) != str(self.format):
            self._spare.clear()
        self.format = message_format
        is_new = str(message_format) not in self._opened
        if is_new:
            self._opened.append(str(message_format))
        return is_new

    def _key(self) -> str:
        return f"{self.name}/{self._opened.index(str(self.format))}"

    def _take(self) -> Message:
        return self._spare.pop() if self._spare else self._network.message(self.format)

    def release(self, message: Message) -> None:
        """Reuse the buffer; nothing may read its tensors any more."""
        message.close()
        self._spare.append(message)


class Outbox(_End):
    """The sending end; a send never waits for the receiver while fewer than `window` messages are in flight."""

    def __init__(self, network: Network, name: ChannelName, window: int) -> None:
        super().__init__(network, name, window)
        self._sent: deque[tuple[Message, Pending]] = deque()

    def open(self, message_format: MessageFormat) -> bool:
        is_new = super().open(message_format)
        if is_new:
            self._network.store.set(self._key(), str(message_format))
        return is_new

    def send(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        while self._sent and (len(self._sent) >= self._window or self._sent[0][1].is_completed()):
            self._reclaim()
        for tensor, field in zip(tensors, self.format.fields, strict=True):
            if tensor.shape != field.shape or tensor.dtype != field.dtype:
                sent = Field(field.name, tuple(tensor.shape), tensor.dtype)
                raise FormatError(f"channel {self.name}: microbatch {microbatch} has {sent} instead of {field}")
        message = self._take()
        try:
            self._sent.append((message, message.send(microbatch, tensors, self._transport)))
        except RuntimeError as error:
            raise LostPeer(f"channel {self.name}: {first_line(error)}") from error

    def flush(self) -> None:
        """Wait until every message has been sent."""
        while self._sent:
            self._reclaim()

    def _reclaim(self) -> None:
        message, pending = self._sent.popleft()
        try:
            pending.wait()
        except RuntimeError as error:
            raise LostPeer(f"channel {self.name}: {first_line(error)}") from error
        self.release(message)


class Inbox(_End):
    """The receiving end, which posts receives ahead of time in the order of the microbatches to come."""

    def __init__(self, network: Network, name: ChannelName, window: int) -> None:
        super().__init__(network, name, window)
        self._posted: deque[_Posted] = deque()
        self._expected: Iterator[int] = iter(())
        self._following: int | None = None  # the next of them, where it may not be posted yet
        self._limit: Callable[[], int] | None = None
        self._is_unverified = False
        self._unread: deque[tuple[int, Reading]] = deque()  # expected numbers, and those being read from a GPU

    def open(self, message_format: MessageFormat) -> bool:
        self._is_unverified = super().open(message_format)
        return self._is_unverified

    def expect(self, numbers: Iterator[int], limit: Callable[[], int] | None = None) -> None:
        """Announce the microbatches to come, and post the first receives.

        Receives left over from a span that was cut short are the first of the next span. `limit` tells at any time
        which microbatches will surely come: those before it; others are not posted, so that none are left over.
        """
        for posted in self._posted:
            assert posted.number == next(numbers, None), f"channel {self.name} still waits for {posted.number}"
        self._expected, self._following, self._limit = numbers, None, limit
        self._post_ahead()

    @property
    def next(self) -> Pending:
        """The receive of the next message; nothing that ever completes where it is not sure to come yet."""
        if not self._posted:
            self._post_ahead()
        return self._posted[0] if self._posted else _NotPosted()

    def receive(self, microbatch: int) -> Message:
        """The next message, which must have arrived and be that of `microbatch`; give it back with `release`."""
        self.verify()
        message = self._posted.popleft().message
        number = message.open()
        self._post_ahead()
        if isinstance(number, int):
            self._compare(microbatch, number)
        else:
            self._unread.append((microbatch, number))
            self._compare_readings(wait=False)
        return message

    def flush(self) -> None:
        """Compare the numbers that are still being read."""
        self._compare_readings(wait=True)

    def verify(self) -> None:
        """Compare the format with the sender's, once per format."""
        if self._is_unverified:
            self._is_unverified = False
            sent = self._network.store.get(self._key()).decode()
            if sent != str(self.format):
                raise FormatError(f"channel {self.name}: the receiver expects {self.format} but the sender has {sent}")

    def _compare_readings(self, *, wait: bool) -> None:
        while self._unread and (wait or self._unread[0][1].is_completed()):
            expected, reading = self._unread.popleft()
            self._compare(expected, int(reading.value()))

    def _compare(self, expected: int, number: int) -> None:
        if number != expected:
            raise FormatError(f"channel {self.name}: expected microbatch {expected} but received {number}")

    def _post_ahead(self) -> None:
        while len(self._posted) < self._network.posted_ahead and self._post():
            pass

    def _post(self) -> bool:
        number = next(self._expected, None) if self._following is None else self._following
        self._following = number
        if number is None or (self._limit is not None and number >= self._limit()):
            return False
        self._following = None
        message = self._take()
        self._posted.append(_Posted(message, number, message.post(self._transport), self.verify))
        return True


class _NotPosted:
    """A receive that no rank may be sure of yet."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise RuntimeError("a message is waited for before it is sure to come")


@dataclass(frozen=True, slots=True)
class _Posted:
    """A posted receive: complete when the transport says so, or when the number shows at the end of the buffer."""

    message: Message
    number: int
    receive: Pending
    verify: Callable[[], None]

    def is_completed(self) -> bool:
        return self.message.shows(self.number) or self.receive.is_completed()

    def wait(self) -> None:
        self.verify()  # first, since a message of another size may never complete
        self.receive.wait()
