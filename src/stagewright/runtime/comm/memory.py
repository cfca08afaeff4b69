"""The network within one process: emulated ranks exchange messages and sums through memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed import HashStore, Store

from stagewright.runtime.comm.channel import ChannelName, Network
from stagewright.runtime.comm.device import Device, Gpu
from stagewright.runtime.comm.message import DirectMessage, HostMessage, Message, MessageFormat
from stagewright.runtime.comm.transport import Collective, Done, Pending, Transport

Parts = list[Tensor | None]  # one addend per member of a sum; None until that member joins


@dataclass
class Memory:
    """What the ranks of an emulated job share."""

    transports: dict[ChannelName, MemoryTransport] = field(default_factory=dict)
    sums: dict[str, dict[int, Parts]] = field(default_factory=dict)  # by collective, then number
    store: Store = field(default_factory=HashStore)


class MemoryNetwork(Network):
    """One rank's view of the shared memory."""

    def __init__(self, memory: Memory, rank: int, device: Device | None = None) -> None:
        self._memory = memory
        self._rank = rank
        self._gpu = device if isinstance(device, Gpu) else None
        self.store = memory.store

    def message(self, message_format: MessageFormat) -> Message:
        if self._gpu is None:
            return HostMessage(message_format)
        return DirectMessage(message_format, self._gpu, own_streams=False)

    def transport(self, name: ChannelName, window: int) -> Transport:
        return self._memory.transports.setdefault(name, MemoryTransport())

    def connect(self, name: str, ranks: Sequence[int]) -> Collective:
        return MemoryCollective(self._memory.sums.setdefault(name, {}), ranks.index(self._rank), len(ranks))


class MemoryTransport:
    """A queue inside one process; waiting for a receive fills its buffer, in the order of posting."""

    def __init__(self) -> None:
        self._queue: deque[Tensor] = deque()

    def send(self, buffer: Tensor) -> Pending:
        self._queue.append(buffer.clone())
        return Done()

    def receive(self, buffer: Tensor) -> Pending:
        return _MemoryReceive(self._queue, buffer)


class _MemoryReceive:
    """A receive that takes the oldest message; receives must be waited for in the order of posting."""

    def __init__(self, queue: deque[Tensor], buffer: Tensor) -> None:
        self._queue = queue
        self._buffer = buffer

    def is_completed(self) -> bool:
        return bool(self._queue)

    def wait(self) -> None:
        assert self._queue, "an emulated rank waits for a message that was not sent"
        self._buffer.copy_(self._queue.popleft())


class MemoryCollective:
    """One member's end of the sums inside one process, added up in the order of the members."""

    def __init__(self, sums: dict[int, Parts], member: int, size: int) -> None:
        self._sums = sums
        self._member = member
        self._size = size
        self._count = 0

    def sum(self, tensor: Tensor) -> Pending:
        parts = self._sums.setdefault(self._count, [None] * self._size)
        parts[self._member] = tensor.clone()
        if all(part is not None for part in parts):
            del self._sums[self._count]  # by now every member has a reference to the list
        self._count += 1
        return _MemorySum(parts, tensor)


class _MemorySum:
    def __init__(self, parts: Parts, target: Tensor) -> None:
        self._parts = parts
        self._target = target

    def is_completed(self) -> bool:
        return all(part is not None for part in self._parts)

    def wait(self) -> None:
        for member, part in enumerate(self._parts):
            assert part is not None, "an emulated rank waits for a sum that not every member has joined"
            if member == 0:
                self._target.copy_(part)
            else:
                self._target += part
