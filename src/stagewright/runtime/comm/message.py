"""Messages between stages: their format, and the buffers that hold them on the host or on a GPU.

A message is one flat buffer: every tensor of the format at its offset, then the microbatch number. On the host, the
tensors are views of the buffer. On a GPU there are two kinds:

    staged   tensors ─D2H─► pinned buffer ─transport─► pinned buffer ─H2D─► tensors      gloo, which moves host memory
    direct   tensors ─────► device buffer ─transport─► device buffer = tensors           NCCL, or memory in a process
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stagewright.runtime.comm.device import Gpu, Reading, record_event
from stagewright.runtime.comm.transport import Pending, Transport

_ALIGNMENT = 64
_NUMBER_BYTES = 8
_NOT_ARRIVED = -1  # in place of the number, until the message has arrived


class FormatError(RuntimeError):
    """The two ends of a channel disagree about its messages."""


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
        """A flat run of `bytes` bytes as this tensor."""
        typed = flat.view(self.dtype)
        if not self.channels_last:
            return typed.view(self.shape)
        samples, channels, *sides = self.shape
        return typed.view(samples, *sides, channels).permute(0, 3, 1, 2)

    def __str__(self) -> str:
        order = " channels last" if self.channels_last else ""
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}{order}"


class MessageFormat:
    """The tensors of a message, and the offset of each in its buffer."""

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
    """A message's buffer and the views of its tensors, made once, since messages are reused."""

    tensors: Sequence[Tensor]

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        """Fill the buffer and send it; the caller must not change the tensors until that is complete."""
        ...

    def post(self, transport: Transport) -> Pending:
        """Start to receive into the buffer."""
        ...

    def shows(self, number: int) -> bool:
        """Whether that number has certainly arrived; False where only waiting can tell."""
        ...

    def open(self) -> int | Reading:
        """Make the received tensors usable by compute; returns the number, or its reading where it is on a GPU."""
        ...

    def close(self) -> None:
        """Sending, or compute, is done with the tensors."""
        ...


class HostMessage:
    """A message on the CPU: its tensors are views of the buffer."""

    def __init__(self, message_format: MessageFormat, *, is_pinned: bool = False) -> None:
        self.buffer = torch.empty(message_format.bytes, dtype=torch.uint8, pin_memory=is_pinned)
        self._number = self.buffer[-_NUMBER_BYTES:].view(torch.int64).numpy()  # a tenth of a tensor's cost to set
        self.tensors: Sequence[Tensor] = message_format.views(self.buffer)

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        self._number[0] = number
        for view, tensor in zip(self.tensors, tensors, strict=True):
            view.copy_(tensor)
        return transport.send(self.buffer)

    def post(self, transport: Transport) -> Pending:
        self._number[0] = _NOT_ARRIVED
        return transport.receive(self.buffer)

    def shows(self, number: int) -> bool:
        return int(self._number[0]) == number

    def open(self) -> int:
        return int(self._number[0])

    def close(self) -> None:
        pass


class _StagedSend:
    """A send whose buffer is still being filled, or which the transport has taken over."""

    def __init__(self, sending: Future[Pending]) -> None:
        self._sending = sending

    def is_completed(self) -> bool:
        return self._sending.done() and self._sending.result().is_completed()

    def wait(self) -> None:
        self._sending.result().wait()


class StagedMessage(HostMessage):
    """A message on a GPU whose transport moves host memory: a pinned buffer, and on the receiver a GPU copy.

    The thread `copies` passes the buffer to the transport once the GPU has filled it.
    """

    def __init__(self, message_format: MessageFormat, gpu: Gpu, copies: ThreadPoolExecutor) -> None:
        super().__init__(message_format, is_pinned=True)
        self._gpu = gpu
        self._copies = copies
        self._views = self.tensors
        self._format = message_format
        self._on_gpu: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._closed: torch.cuda.Event | None = None
        self._held: Sequence[Tensor] = ()

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        self._number[0] = number
        self._held = tensors  # keeps their memory from being reused before the copy is complete
        with self._gpu.on_stream(self._gpu.copy_out, record_event()):
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor, non_blocking=True)
            filled = record_event()

        def send_filled() -> Pending:
            filled.synchronize()
            return transport.send(self.buffer)

        return _StagedSend(self._copies.submit(send_filled))

    def post(self, transport: Transport) -> Pending:
        if self._on_gpu is None:
            self._on_gpu = torch.empty_like(self.buffer, device=self._gpu.device)
            self.tensors = self._format.views(self._on_gpu)
            self._closed = record_event()
        if self._copied is not None:
            self._copied.synchronize()
        return super().post(transport)

    def open(self) -> int:
        assert self._on_gpu is not None
        with self._gpu.on_stream(self._gpu.copy_in, self._closed):
            self._on_gpu.copy_(self.buffer, non_blocking=True)
            self._copied = record_event()
        torch.cuda.current_stream().wait_event(self._copied)
        return super().open()

    def close(self) -> None:
        self._held = ()
        self._closed = record_event()


class DirectMessage:
    """A message on a GPU whose transport moves device memory; its number is read back while compute continues.

    A transport that runs in stream order is called on a separate stream (`own_streams`), so that a receive posted ahead
    does not wait for what compute has queued.
    """

    def __init__(self, message_format: MessageFormat, gpu: Gpu, *, own_streams: bool) -> None:
        self._gpu = gpu
        self._own_streams = own_streams
        self._buffer = torch.empty(message_format.bytes, dtype=torch.uint8, device=gpu.device)
        self._number = self._buffer[-_NUMBER_BYTES:].view(torch.int64)
        self._closed = record_event()
        self.tensors: Sequence[Tensor] = message_format.views(self._buffer)

    def send(self, number: int, tensors: Sequence[Tensor], transport: Transport) -> Pending:
        self._number.fill_(number)
        for view, tensor in zip(self.tensors, tensors, strict=True):
            view.copy_(tensor)
        if not self._own_streams:
            return transport.send(self._buffer)
        with self._gpu.on_stream(self._gpu.copy_out, record_event()):
            return transport.send(self._buffer)

    def post(self, transport: Transport) -> Pending:
        if not self._own_streams:
            return transport.receive(self._buffer)
        with self._gpu.on_stream(self._gpu.copy_in, self._closed):
            return transport.receive(self._buffer)

    def shows(self, number: int) -> bool:
        return False

    def open(self) -> Reading:
        return self._gpu.read(self._number)

    def close(self) -> None:
        self._closed = record_event()
