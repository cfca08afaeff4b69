"""Sums a stage's gradient over its replicas, in buckets, each under way as soon as backward has filled it. Messages between stages: one channel a boundary, pair of ranks and direction; packed, numbered and in order.

    FORWARD ─► Outbox.send ─► transport ─► Inbox.receive ─► FORWARD of the next stage

Both ends compare their layouts once, with the first message of a layout, and the number with every message. The number
comes last, so a buffer that shows it has arrived: gloo itself can't be asked whether a receive is over, only be waited
for. Where the number must be read back from a GPU, it is compared a little later. Where transports and collectives come from: torch.distributed between processes, or memory within one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stagewright.runtime.comm.channel import POSTED_AHEAD, ChannelName, Network
from stagewright.runtime.comm.device import Device, Gpu
from stagewright.runtime.comm.message import (
    DirectMessage,
    HostMessage,
    Layout,
    Message,
)
from stagewright.runtime.comm.transport import Alone, Collective, Done, Pending, Transport


class MemoryCollective:
    """One member's end of a sum inside one process, taken in the order of the members."""

    def __init__(self, board: dict[int, list[Tensor | None]], member: int, size: int) -> None:
        self._board = board
        self._member = member
        self._size = size
        self._count = 0

    def sum(self, tensor: Tensor) -> Pending:
        parts = self._board.setdefault(self._count, [None] * self._size)
        parts[self._member] = tensor.clone()
        if all(part is not None for part in parts):
            del self._board[self._count]  # every member holds the list itself by now
        self._count += 1
        return _Sum(parts, tensor)


class _Sum:
    def __init__(self, parts: list[Tensor | None], target: Tensor) -> None:
        self._parts = parts
        self._target = target

    def is_completed(self) -> bool:
        return all(part is not None for part in self._parts)

    def wait(self) -> None:
        self._target.zero_()
        for part in self._parts:
            assert part is not None, "an emulated rank waits for a sum that not all have joined"
            self._target += part


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


@dataclass
class Memory:
    """What the ranks of an emulated job share."""

    transports: dict[ChannelName, MemoryTransport] = field(default_factory=dict)
    boards: dict[str, dict[int, list[Tensor | None]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


class MemoryNetwork:
    """One rank's view of the memory that all share."""

    posted_ahead = POSTED_AHEAD

    def __init__(self, memory: Memory, rank: int, device: Device | None = None) -> None:
        self._memory = memory
        self._rank = rank
        self._gpu = device if isinstance(device, Gpu) else None
        self.bulletin = DictBulletin(memory.texts)

    @property
    def host(self) -> Network:
        return self

    def message(self, layout: Layout) -> Message:
        return HostMessage(layout) if self._gpu is None else DirectMessage(layout, self._gpu, own_streams=False)

    def transport(self, name: ChannelName, window: int) -> Transport:
        return self._memory.transports.setdefault(name, MemoryTransport())

    def collective(self, name: str, ranks: Sequence[int]) -> Collective:
        if len(ranks) == 1:
            return Alone()
        return MemoryCollective(self._memory.boards.setdefault(name, {}), ranks.index(self._rank), len(ranks))


class DictBulletin:
    """Texts in a dictionary."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def post(self, key: str, text: str) -> None:
        self._texts[key] = text

    def read(self, key: str) -> str:
        return self._texts[key]

    def has(self, key: str) -> bool:
        return key in self._texts

    def drop(self, key: str) -> None:
        self._texts.pop(key, None)
