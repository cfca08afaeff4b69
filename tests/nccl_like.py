"""A stand-in for NCCL: what ranks launch is recorded while they run in one process, then replayed by NCCL's rules.

    host      launches in its program's order, and never waits for a message; it waits where its launch queue is full
    stream    a channel or a group runs its operations in order; without tags, the n-th send meets the n-th receive
    start     an operation starts once compute, up to where it was launched, is done
    end       a send and its receive end together, as do all members of a sum; until then each occupies the queue
    compute   continues once the operations that it waits for have ended

Where the replay stops before the end, NCCL would hang.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from stagewright.runtime.comm.channel import ChannelName
from stagewright.runtime.comm.memory import MemoryNetwork
from stagewright.runtime.comm.transport import Collective, Pending, Transport
from stagewright.runtime.job import Job
from stagewright.runtime.process import emulate
from stagewright.runtime.process.emulate import Emulation


@dataclass(frozen=True)
class Launch:
    """An operation launched on the GPU: the n-th of its stream."""

    stream: str
    side: str  # send, receive or sum
    number: int


@dataclass(frozen=True)
class Wait:
    """Compute waits here for an operation to end."""

    launch: Launch


Step = Launch | Wait


class Hang(AssertionError):
    """The ranks wait for each other."""


@dataclass
class Recording:
    """Every rank's launches and waits, in the order of its program."""

    steps: dict[int, list[Step]] = field(default_factory=lambda: defaultdict(list))
    members: dict[str, int] = field(default_factory=dict)  # of a stream

    def launch(self, rank: int, stream: str, side: str) -> Launch:
        count = sum(
            isinstance(step, Launch) and (step.stream, step.side) == (stream, side) for step in self.steps[rank]
        )
        launch = Launch(stream, side, count)
        self.steps[rank].append(launch)
        return launch


def record(job: Job, posted_ahead: int = 1) -> Recording:
    """Run a job with all ranks in this process, and record what each would launch on NCCL."""
    recording = Recording()

    class Network(MemoryNetwork):
        def __init__(self, memory: emulate.Memory, rank: int, device: object = None) -> None:
            super().__init__(memory, rank)
            self.posted_ahead = posted_ahead
            self.rank = rank

        def transport(self, name: ChannelName, window: int) -> Transport:
            recording.members[str(name)] = 2
            return _Transport(recording, self.rank, str(name), super().transport(name, window))

        def collective(self, name: str, ranks: Sequence[int]) -> Collective:
            inner = super().collective(name, ranks)
            if len(ranks) == 1:
                return inner
            recording.members[name] = len(ranks)
            return _Collective(recording, self.rank, name, inner)

    with mock.patch.object(emulate, "MemoryNetwork", Network):
        Emulation(job, lambda event: None).run()
    return recording


@dataclass
class _Transport:
    recording: Recording
    rank: int
    name: str
    inner: Transport

    def send(self, buffer: Tensor) -> Pending:
        launch = self.recording.launch(self.rank, self.name, "send")
        return _Recorded(self.recording, self.rank, launch, self.inner.send(buffer))

    def receive(self, buffer: Tensor) -> Pending:
        launch = self.recording.launch(self.rank, self.name, "receive")
        return _Recorded(self.recording, self.rank, launch, self.inner.receive(buffer))


@dataclass
class _Collective:
    recording: Recording
    rank: int
    name: str
    inner: Collective

    def sum(self, tensor: Tensor) -> Pending:
        if tensor.dtype == torch.float64 and tensor.dim() > 1:
            return self.inner.sum(tensor)  # statistics are exchanged on the host
        launch = self.recording.launch(self.rank, self.name, "sum")
        return _Recorded(self.recording, self.rank, launch, self.inner.sum(tensor))


@dataclass
class _Recorded:
    recording: Recording
    rank: int
    launch: Launch
    inner: Pending
    is_recorded: bool = False

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def wait(self) -> None:
        if not self.is_recorded:
            self.recording.steps[self.rank].append(Wait(self.launch))
            self.is_recorded = True
        self.inner.wait()


class _Gpu:
    """One rank: how far its host, its compute and its streams have got."""

    def __init__(self, steps: Sequence[Step], queue: int) -> None:
        self.steps = steps
        self.queue = queue
        self.issued = 0  # steps that the host has issued
        self.computed = 0  # steps that compute has finished
        self.ended: set[Launch] = set()
        self.under_way: list[tuple[Launch, int]] = []  # with the step at which it was launched

    def advance(self) -> bool:
        """Advance the host and compute as far as they can; whether they moved."""
        before = (self.issued, self.computed)
        while self.issued < len(self.steps):
            step = self.steps[self.issued]
            if isinstance(step, Launch):
                if len(self.under_way) >= self.queue:
                    break
                self.under_way.append((step, self.issued))
            self.issued += 1
        while self.computed < self.issued:
            step = self.steps[self.computed]
            if isinstance(step, Wait) and step.launch not in self.ended:
                break
            self.computed += 1
        return (self.issued, self.computed) != before

    def started(self, stream_of: Callable[[Launch], str]) -> dict[str, Launch]:
        """The current operation of each stream, if compute has reached the point of its launch."""
        heads: dict[str, tuple[Launch, int]] = {}
        for launch, step in self.under_way:
            heads.setdefault(stream_of(launch), (launch, step))
        return {stream: launch for stream, (launch, step) in heads.items() if self.computed >= step}

    def end(self, launch: Launch) -> None:
        self.ended.add(launch)
        self.under_way = [(other, step) for other, step in self.under_way if other != launch]


def replay(
    steps: Mapping[int, Sequence[Step]],
    members: Mapping[str, int],
    queue: int,
    stream_of: Callable[[Launch], str] = lambda launch: f"{launch.stream}/{launch.side}",
) -> int:
    """Replay a recording by NCCL's rules; the largest number of operations that a GPU held at once. Raises Hang."""
    gpus = {rank: _Gpu(own, queue) for rank, own in steps.items()}
    most = 0
    moved = True
    while moved:
        moved = sum(gpu.advance() for gpu in gpus.values()) > 0
        most = max(most, *(len(gpu.under_way) for gpu in gpus.values()))
        present: Counter[tuple[str, int]] = Counter()
        for gpu in gpus.values():
            present.update((launch.stream, launch.number) for launch in gpu.started(stream_of).values())
        whole = {met for met, count in present.items() if count == members[met[0]]}
        for gpu in gpus.values():
            for launch in gpu.started(stream_of).values():
                if (launch.stream, launch.number) in whole:
                    gpu.end(launch)
                    moved = True
    stuck = {rank: gpu.steps[gpu.computed] for rank, gpu in gpus.items() if gpu.computed < len(gpu.steps)}
    left = [launch for gpu in gpus.values() for launch, _ in gpu.under_way]
    if stuck or left:
        raise Hang(f"{len(stuck)} of {len(gpus)} ranks hang: {stuck}; under way: {left[:4]}")
    return most
