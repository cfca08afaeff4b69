"""Loads a checkpoint into a rank's replicas: bit for bit under the same plan, by parameter name under another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from stagewright.errors import first_line
from stagewright.runtime.checkpoint.folder import Checkpoint
from stagewright.runtime.checkpoint.format import EMA, FROZEN, MASTER, CheckpointError, StageState
from stagewright.runtime.checkpoint.save import frozen_of
from stagewright.runtime.stage.batch_norm import is_summed, share_of
from stagewright.runtime.stage.optimizer import COUNTS
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.worker import Worker


def restore(worker: Worker, checkpoint: Checkpoint) -> None:
    """Set a worker's replicas to the state in the checkpoint."""
    manifest = checkpoint.manifest
    is_same = manifest.plan.computes_as(worker.plan)
    tied = [parameter.names for parameter in worker.plan.tied]
    aliases = {name: names for names in tied for name in names}
    for replica in worker.replicas.values():
        loading = _Loading(replica, checkpoint, replica.stage.ranks.index(worker.rank), aliases)
        loading.write_weights(starts_from_file=worker.job.config.model.init is not None)
        loading.write_optimizer()
        if is_same:
            loading.restore_exactly()
            replica.resume_versions(worker.plan.boundary(checkpoint.batch) // replica.stage.round)
        else:
            loading.restore_by_name()
    worker.best = manifest.best_by(worker.job.criterion)
    worker.loss_scaling.resume(manifest.stages[-1].extra, checkpoint.batch, is_same=is_same)


class _Loading:
    """Sets one replica to the state in a checkpoint; `aliases` are the names that a tied parameter has in all homes."""

    def __init__(
        self, replica: Replica, checkpoint: Checkpoint, index: int, aliases: Mapping[str, Sequence[str]]
    ) -> None:
        self._replica = replica
        self._checkpoint = checkpoint
        self._index = index  # of the replica in its stage
        self._aliases = aliases
        # Another optimizer of the register starts without state; a user's finds that of its own class.
        self._continues = checkpoint.manifest.config["optimizer"]["name"] == replica.optimizer.config.name

    def write_weights(self, *, starts_from_file: bool) -> None:
        """Set the newest weights, their average, and what is not trained."""
        average = self._replica.average
        self._write_flat(self._replica.ring.master, MASTER)
        self._write_frozen(starts_from_file=starts_from_file)
        average.restart()
        if average.flat is not None and self._checkpoint.has(EMA):
            self._write_flat(average.flat, EMA)

    def write_optimizer(self) -> None:
        """Set the optimizer's state but for its scalars; a user's may refuse it."""
        for name, flat in self._replica.optimizer.state.items() if self._continues else ():
            if flat.dim() and self._checkpoint.has(f"optimizer/{name}"):
                self._write_flat(flat, f"optimizer/{name}")
        kinds = {file.kind for file in self._checkpoint.manifest.files} - (set() if self._continues else {COUNTS})
        try:
            self._replica.optimizer.load_named_state(sorted(kinds), self._find_state)
        except CheckpointError:
            raise
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {self._checkpoint.folder} has a state that the optimizer can't take: {first_line(error)}"
            ) from error

    def restore_exactly(self) -> None:
        """Restore every version in its slot, and this replica's statistics."""
        stage = self._replica.stage.index
        if len(self._replica.ring.slots) > 1:
            for number, slot in enumerate(self._replica.ring.slots):
                self._write_flat(slot.flat, f"slot/{number}", stage)
        state = self._checkpoint.manifest.stages[stage]
        self._write_numbers([state], stage)
        self._write_buffers(self._checkpoint.read(f"buffers/{self._index}", stage=stage))
        self._replica.statistics.count = state.counts[self._index]

    def restore_by_name(self) -> None:
        """Fill every slot from the newest weights; set mean statistics, as of an equal share of microbatches."""
        states, replicas = self._checkpoint.manifest.stages, self._replica.stage.replicas
        self._write_numbers(states)
        self._replica.restart_versions()
        buffers = self._checkpoint.mean_buffers()
        shares = {name: share_of(one, self._index, replicas) for name, one in buffers.items() if is_summed(name)}
        self._write_buffers(buffers | shares)
        self._replica.statistics.count = (sum(states[0].counts) + replicas - 1 - self._index) // replicas

    def _find(self, kind: str, stage: int | None = None) -> dict[str, Tensor]:
        """The tensors of one kind of the replica's parameters; of the state of one stage alone, by its own names."""
        names = [parameter.names[0] for parameter in self._replica.ring.parameters]
        known = {name: (name, *(self._aliases.get(name, ()) if stage is None else ())) for name in names}
        found = self._checkpoint.read(kind, {alias for own in known.values() for alias in own}, stage)
        saved = {name: next((alias for alias in own if alias in found), None) for name, own in known.items()}
        return {name: found[alias] for name, alias in saved.items() if alias is not None}

    def _find_state(self, kind: str) -> dict[str, Tensor]:
        """State that is not flat; what had the type of the weights then has that of the weights now."""
        name = self._replica.ring.parameters[0].names[0]
        masters = self._checkpoint.read(MASTER, {name, *self._aliases.get(name, ())})
        then = {held.dtype for held in masters.values()} if kind != COUNTS else set()
        now = self._replica.ring.master.dtype
        return {name: held.to(now) if held.dtype in then else held for name, held in self._find(kind).items()}

    def _write_flat(self, flat: Tensor, kind: str, stage: int | None = None) -> None:
        """Fill a flat buffer by the names of its parameters."""
        found, folder = self._find(kind, stage), self._checkpoint.folder
        with torch.no_grad():
            for parameter in self._replica.ring.parameters:
                name = parameter.names[0]
                if name not in found:
                    raise CheckpointError(f"checkpoint {folder} has no {kind} for parameter '{name}'")
                target, held = parameter.real_view(flat), found[name]
                if held.shape != target.shape or not held.is_floating_point():
                    raise CheckpointError(
                        f"checkpoint {folder} has {kind} of parameter '{name}' as {list(held.shape)} "
                        f"{str(held.dtype).removeprefix('torch.')}, the model needs {list(target.shape)} of floats"
                    )
                target.copy_(held)

    def _write_frozen(self, *, starts_from_file: bool) -> None:
        """Set what is not trained now, but may have been before; what no checkpoint has, the model's factory made."""
        targets, folder = frozen_of(self._replica), self._checkpoint.folder
        found = self._checkpoint.read(MASTER, targets) | self._checkpoint.read(FROZEN, targets)
        if starts_from_file and (missing := [name for name in targets if name not in found]):
            raise CheckpointError(f"checkpoint {folder} has no values of frozen parameter '{missing[0]}'")
        for name, held in found.items():
            if held.shape != targets[name].shape:
                raise CheckpointError(
                    f"checkpoint {folder} has frozen parameter '{name}' as {list(held.shape)}, the model "
                    f"needs {list(targets[name].shape)}"
                )
            targets[name].copy_(held)

    def _write_buffers(self, found: Mapping[str, Tensor]) -> None:
        for name, buffer in self._replica.piece.training.named_buffers():
            if name in found and found[name].shape == buffer.shape:
                buffer.copy_(found[name])

    def _write_numbers(self, states: Collection[StageState], stage: int | None = None) -> None:
        """Set the scalars of the optimizer's state, of several stages to the largest."""
        if not self._continues:
            return
        optimizer, has_counts = self._replica.optimizer, self._checkpoint.has(COUNTS)
        names = {name for state in states for name in state.optimizer}
        numbers = {name: max(state.optimizer.get(name, 0.0) for state in states) for name in names}
        if has_counts and "step" in optimizer.state:  # counts of each parameter; a stage without any has a number
            held = self._checkpoint.read(COUNTS, stage=stage).values()
            counts = [float(count.flatten()[0]) for count in held if count.numel()]
            numbers["step"] = max(counts, default=numbers.get("step", 0.0))
        for name, value in optimizer.state.items():
            if not value.dim() and name in numbers:
                value.fill_(numbers[name])
        if optimizer.counts is not None and not has_counts:
            optimizer.counts.fill_(numbers.get("step", 0.0))
