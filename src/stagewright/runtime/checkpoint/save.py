"""Saves a rank's share of a checkpoint: copies it in memory while training pauses, writes it while training continues.

The r replicas of a stage hold the same weights, so replica i writes files i, i + r, i + 2r, ... of the stage. Buffers
differ between replicas, so each replica writes its own. At most two checkpoints are outstanding, written or waiting for
their commit: a rank that reaches a third waits, so that none pile up where steps are faster than the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stagewright.errors import first_line
from stagewright.events import Emit, File, ReplicaState, ShareSaved
from stagewright.runtime.checkpoint.folder import partial_folder
from stagewright.runtime.checkpoint.format import EMA, FROZEN, MASTER, sync_folder, write_shard
from stagewright.runtime.job import NEVER, Job
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.versions import Parameter
from stagewright.runtime.stage.worker import Saver, Worker

MOST_OUTSTANDING = 2
_NICENESS = 10
_POLL_SECONDS = 0.01
Shard = tuple[int, str, Callable[[], Mapping[str, Tensor]]]  # stage, kind, a function that returns tensors by name


def flats_of(replica: Replica) -> Iterator[tuple[str, Tensor]]:
    """The flat tensors that make up a stage's state, by kind; the same on every replica."""
    yield MASTER, replica.ring.master
    if replica.average.flat is not None:
        yield EMA, replica.average.flat
    for name, tensor in sorted(replica.optimizer.state.items()):
        if tensor.dim():
            yield f"optimizer/{name}", tensor
    if len(replica.ring.slots) > 1:
        for index, slot in enumerate(replica.ring.slots):
            yield f"slot/{index}", slot.flat


def frozen_of(replica: Replica) -> dict[str, Tensor]:
    """The parameters of a stage that are not trained, by all of their names, as real numbers."""
    trained = {name for parameter in replica.ring.parameters for name in parameter.names}
    named = replica.piece.training.named_parameters(remove_duplicate=False)
    held = {name: parameter.detach() for name, parameter in named if name not in trained}
    return {name: torch.view_as_real(tensor) if tensor.is_complex() else tensor for name, tensor in held.items()}


def own_flats(replica: Replica, rank: int) -> list[tuple[str, Tensor]]:
    """The flat tensors that this rank writes."""
    return list(flats_of(replica))[replica.stage.ranks.index(rank) :: replica.stage.replicas]


def own_state(replica: Replica, rank: int) -> list[tuple[str, Mapping[str, Tensor]]]:
    """The state of a user's optimizer that this rank writes, by kind; what it keeps may change from batch to batch."""
    kinds = sorted(replica.optimizer.named_state().items())
    return kinds[replica.stage.ranks.index(rank) :: replica.stage.replicas]  # type: ignore[return-value]


class DiskSaver(Saver):
    """Copies the state of a rank's replicas and writes it in a thread, which emits `ShareSaved` at the end.

    `settled` returns the batch of the newest checkpoint that is committed or given up (`commit.Committer`).
    """

    def __init__(self, job: Job, worker: Worker, emit: Emit, settled: Callable[[], int] = lambda: NEVER) -> None:
        self._folder = Path(job.folder)
        self._rank = worker.rank
        self._replicas = worker.replicas
        self._worker = worker
        self._emit = emit
        self._settled = settled
        self._outstanding: list[int] = []  # batches whose checkpoints are not settled, as far as this rank knows
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._keeps_frozen = job.config.model.init is not None
        self._frozen: dict[int, dict[str, Tensor]] = {}  # by stage
        if job.keeps_checkpoints:
            self._allocate(is_early=True)

    def save(self, batch: int) -> None:
        began = time.monotonic()
        self.close()
        self._await_commits()
        waited = time.monotonic() - began
        self._outstanding.append(batch)
        shards = list(self._copied())
        states = tuple(self._state(replica) for replica in self._replicas.values())
        took = time.monotonic() - began
        share = ShareSaved(self._rank, batch, took, states, waited=waited, best=self._worker.best)
        self._thread = threading.Thread(target=self._write, args=(share, shards), daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _await_commits(self) -> None:
        """Wait until one checkpoint more is not too many."""
        while len(self._outstanding) >= MOST_OUTSTANDING:
            settled = self._settled()
            self._outstanding = [batch for batch in self._outstanding if batch > settled]
            if len(self._outstanding) >= MOST_OUTSTANDING:
                time.sleep(_POLL_SECONDS)

    def _allocate(self, *, is_early: bool = False) -> None:
        """Allocate and touch memory for the copies: early, so that the first checkpoint is as fast as the others."""
        for stage, replica in self._replicas.items():
            for kind, flat in own_flats(replica, self._rank):
                is_pinned = is_early and flat.is_cuda  # later, pinning may have to wait for a posted receive
                copy = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=is_pinned)
                self._copies[stage, kind] = copy.fill_(0)

    def _copied(self) -> Iterator[Shard]:
        """Copies of the rank's share of the state."""
        if not self._copies:
            self._allocate()
        for stage, replica in self._replicas.items():
            for kind, flat in own_flats(replica, self._rank):
                copy = self._copies[stage, kind]
                copy.copy_(flat.detach(), non_blocking=True)
                yield stage, kind, partial(_by_name, replica.ring.parameters, copy)
            index = replica.stage.ranks.index(self._rank)
            if index == 0 and (frozen := self._frozen_copies(stage, replica)):
                yield stage, FROZEN, frozen.copy
            for kind, tensors in own_state(replica, self._rank):
                yield stage, kind, {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}.copy
            buffers = dict(replica.piece.training.named_buffers())
            if buffers:
                copies = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
                yield stage, f"buffers/{index}", copies.copy
        if any(replica.ring.master.is_cuda for replica in self._replicas.values()):
            torch.cuda.current_stream().synchronize()  # not the device: a posted receive ends only after the pause

    def _frozen_copies(self, stage: int, replica: Replica) -> dict[str, Tensor]:
        """Copies of what is not trained, made once; none where the model's factory makes it again."""
        if self._keeps_frozen and stage not in self._frozen:
            self._frozen[stage] = {name: tensor.to("cpu", copy=True) for name, tensor in frozen_of(replica).items()}
        return self._frozen.get(stage, {})

    def _state(self, replica: Replica) -> ReplicaState:
        return ReplicaState(
            replica.stage.index,
            replica.stage.ranks.index(self._rank),
            replica.statistics.count,
            {name: float(value) for name, value in replica.optimizer.state.items() if not value.dim()},
            self._worker.loss_scaling.state() if replica.stage.is_last else {},
        )

    def _write(self, share: ShareSaved, shards: list[Shard]) -> None:
        folder = partial_folder(self._folder, share.batch)
        with suppress(OSError, AttributeError):  # where cores are scarce, training goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = [write_file(folder, stage, kind, tensors()) for stage, kind, tensors in shards]
            sync_folder(folder)
        except Exception as error:  # the run continues, and reports the failed checkpoint
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {first_line(error)}"
            self._emit(replace(share, error=reason))
        else:
            self._emit(replace(share, files=tuple(files)))


def write_file(folder: Path, stage: int, kind: str, tensors: Mapping[str, Tensor]) -> File:
    """Write one file of a stage's tensors."""
    name = f"stage-{stage}.{kind.replace('/', '-')}.safetensors"
    size, digest = write_shard(folder / name, tensors)
    return File(name, stage, kind, size, digest)


def _by_name(parameters: Sequence[Parameter], flat: Tensor) -> Mapping[str, Tensor]:
    return {parameter.names[0]: parameter.real_view(flat) for parameter in parameters}
