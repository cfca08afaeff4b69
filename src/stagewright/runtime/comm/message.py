"""What travels between stages, and the memory it travels in.

A message is one flat buffer: every tensor of the layout at its offset, then the microbatch number. On the host, tensors
are views of the buffer itself. On a GPU there are two ways:

    staged   tensors ─D2H─► pinned buffer ─transport─► pinned buffer ─H2D─► tensors      gloo, which moves host memory
    direct   tensors ─────► device buffer ─transport─► device buffer = tensors           NCCL, or memory in a process"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stagewright.runtime.comm.device import Gpu, Reading, mark
from stagewright.runtime.comm.transport import Pending, Transport

_ALIGNMENT = 64
_NUMBER_BYTES = 8
_NOT_HERE = -1


class LayoutError(RuntimeError):
    """The two ends of a channel do not mean the same messages."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a message."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """So many bytes, as this tensor."""
        typed = flat.view(self.dtype)
        if not self.channels_last:
            return typed.view(self.shape)
        samples, channels, *sides = self.shape
        return typed.view(samples, *sides, channels).permute(0, 3, 1, 2)

    def __str__(self) -> str:
        order = " channels last" if self.channels_last else ""
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}{order}"


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
            field.view(buffer[offset : offset + field.bytes])
            for field, offset in zip(self.fields, self.offsets, strict=True)
        ]

    def __str__(self) -> str:
        return ", ".join(map(str, self.fields)) or "nothing"


class Message(Protocol):
    """A message's memory with its parts cut out once; messages are reused, so the cutting is too."""

    tensors: Sequence[Tensor]

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        """Fill and send it; whoever sent it keeps the tensors until that is over."""
        ...

    def post(self, transport: Transport) -> Pending:
        """Begin to receive into it."""
        ...

    def shows(self, number: int) -> bool:
        """Whether that number has arrived for certain; False where nobody can tell yet."""
        ...

    def open(self) -> Reading | None:
        """Make what has arrived usable by compute; its number, where it takes a while to read."""
        ...

    def number(self) -> int: ...

    def close(self) -> None:
        """Sent, or no more needed by compute."""
        ...


MakeMessage = Callable[[Layout], Message]


class HostMessage:
    """On the CPU: the tensors are the buffer."""

    def __init__(self, layout: Layout) -> None:
        self.buffer = torch.empty(layout.bytes, dtype=torch.uint8)
        self._number = self.buffer[-_NUMBER_BYTES:].view(torch.int64).numpy()  # a tenth of a tensor's cost to set
        self.tensors: Sequence[Tensor] = layout.views(self.buffer)

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        self._number[0] = number
        for place, tensor in zip(self.tensors, tensors, strict=True):
            place.copy_(tensor)
        return transport.send(self.buffer)

    def post(self, transport: Transport) -> Pending:
        self._number[0] = _NOT_HERE
        return transport.receive(self.buffer)

    def shows(self, number: int) -> bool:
        return int(self._number[0]) == number

    def open(self) -> None:
        return None

    def number(self) -> int:
        return int(self._number[0])

    def close(self) -> None:
        pass


class Courier:
    """A thread that hands a buffer to its transport once the GPU has filled it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "courier")

    def send(self, filled: torch.cuda.Event, transport: Transport, buffer: Tensor) -> Pending:
        def go() -> Pending:
            filled.synchronize()
            return transport.send(buffer)

        return _Handed(self._thread.submit(go))


class _Handed:
    """A message that is filled, then under way."""

    def __init__(self, sending: Future[Pending]) -> None:
        self._sending = sending

    def is_completed(self) -> bool:
        return self._sending.done() and self._sending.result().is_completed()

    def wait(self) -> None:
        self._sending.result().wait()


class StagedMessage:
    """On a GPU whose transport moves host memory: pinned memory, and on the receiving side its twin on the GPU."""

    def __init__(self, layout: Layout, gpu: Gpu, courier: Courier) -> None:
        self._gpu = gpu
        self._courier = courier
        self._host = torch.empty(layout.bytes, dtype=torch.uint8, pin_memory=True)
        self._number = self._host[-_NUMBER_BYTES:].view(torch.int64).numpy()
        self._places = layout.views(self._host)
        self._layout = layout
        self._twin: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._closed: torch.cuda.Event | None = None
        self._held: Sequence[Tensor] = ()
        self.tensors: Sequence[Tensor] = self._places

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        self._number[0] = number
        self._held = tensors  # their memory must not be used again before the copy is over
        with self._gpu.beside(self._gpu.copy_out, mark()):
            for place, tensor in zip(self._places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
            filled = mark()
        return self._courier.send(filled, transport, self._host)

    def post(self, transport: Transport) -> Pending:
        if self._twin is None:
            self._twin = torch.empty_like(self._host, device=self._gpu.device)
            self.tensors = self._layout.views(self._twin)
            self._closed = mark()
        if self._copied is not None:
            self._copied.synchronize()
        self._number[0] = _NOT_HERE
        return transport.receive(self._host)

    def shows(self, number: int) -> bool:
        return int(self._number[0]) == number

    def open(self) -> None:
        assert self._twin is not None
        with self._gpu.beside(self._gpu.copy_in, self._closed):
            self._twin.copy_(self._host, non_blocking=True)
            self._copied = mark()
        torch.cuda.current_stream().wait_event(self._copied)

    def number(self) -> int:
        return int(self._number[0])

    def close(self) -> None:
        self._held = ()
        self._closed = mark()


class DirectMessage:
    """On a GPU whose transport moves device memory; the number is read back while compute goes on.

    A transport that orders itself by streams is called on a stream of its own, so that a receive posted ahead does not
    wait for what compute has queued.
    """

    def __init__(self, layout: Layout, gpu: Gpu, *, own_streams: bool) -> None:
        self._gpu = gpu
        self._own_streams = own_streams
        self._buffer = torch.empty(layout.bytes, dtype=torch.uint8, device=gpu.device)
        self._number = self._buffer[-_NUMBER_BYTES:].view(torch.int64)
        self._closed = mark()
        self.tensors: Sequence[Tensor] = layout.views(self._buffer)

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        self._number.fill_(number)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            place.copy_(tensor)
        if not self._own_streams:
            return transport.send(self._buffer)
        with self._gpu.beside(self._gpu.copy_out, mark()):
            return transport.send(self._buffer)

    def post(self, transport: Transport) -> Pending:
        if not self._own_streams:
            return transport.receive(self._buffer)
        with self._gpu.beside(self._gpu.copy_in, self._closed):
            return transport.receive(self._buffer)

    def shows(self, number: int) -> bool:
        return False

    def open(self) -> Reading:
        return self._gpu.read(self._number)

    def number(self) -> int:
        return int(self._number)

    def close(self) -> None:
        self._closed = mark()
