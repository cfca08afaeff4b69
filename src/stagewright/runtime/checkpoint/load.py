"""Loads a checkpoint into a rank's replicas: bit for bit under the same plan, by parameter name under another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    is_same = checkpoint.manifest.plan.computes_as(worker.plan)
    tied = [parameter.names for tie in worker.plan.ties for parameter in tie.parameters]
    aliases = {name: names for names in tied for name in names}
    for replica in worker.replicas.values():
        _write_flat(replica, replica.ring.master, MASTER, checkpoint, aliases=aliases)
        _write_frozen(replica, checkpoint, starts_from_file=worker.job.config.model.init is not None)
        replica.average.restart()
        if replica.average.flat is not None and checkpoint.has(EMA):
            _write_flat(replica, replica.average.flat, EMA, checkpoint, aliases=aliases)
        for name, flat in replica.optimizer.state.items() if _continues(replica, checkpoint) else ():
            if flat.dim() and checkpoint.has(f"optimizer/{name}"):
                _write_flat(replica, flat, f"optimizer/{name}", checkpoint, aliases=aliases)
        _load_named_state(replica, checkpoint, aliases)
        if is_same:
            _restore_exactly(replica, checkpoint, replica.stage.ranks.index(worker.rank))
            replica.resume_versions(worker.plan.boundary(checkpoint.batch) // replica.stage.round)
        else:
            _restore_by_name(replica, checkpoint, replica.stage.ranks.index(worker.rank))
    worker.best = checkpoint.manifest.best_by(worker.job.criterion)
    worker.loss_scaling.resume(checkpoint.manifest.stages[-1].extra, checkpoint.batch, is_same=is_same)


def _continues(replica: Replica, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint is of the same optimizer; another one starts without state."""
    return bool(checkpoint.manifest.config["optimizer"]["name"] == replica.optimizer.config.name)


def _restore_exactly(replica: Replica, checkpoint: Checkpoint, index: int) -> None:
    """Restore every version in its slot, and this replica's statistics."""
    stage = replica.stage.index
    if len(replica.ring.slots) > 1:
        for number, slot in enumerate(replica.ring.slots):
            _write_flat(replica, slot.flat, f"slot/{number}", checkpoint, stage)
    state = checkpoint.manifest.stages[stage]
    _write_numbers(replica, checkpoint, [state], stage)
    _write_buffers(replica, checkpoint.read(f"buffers/{index}", stage=stage))
    replica.statistics.count = state.counts[index]


def _restore_by_name(replica: Replica, checkpoint: Checkpoint, index: int) -> None:
    """Fill every slot from the newest weights; set mean statistics, which count as an equal share of microbatches."""
    states, replicas = checkpoint.manifest.stages, replica.stage.replicas
    _write_numbers(replica, checkpoint, states)
    replica.restart_versions()
    buffers = checkpoint.mean_buffers()
    for name, buffer in buffers.items():
        if is_summed(name):
            buffers[name] = share_of(buffer, index, replicas)
    _write_buffers(replica, buffers)
    replica.statistics.count = (sum(states[0].counts) + replicas - 1 - index) // replicas


def _load_named_state(replica: Replica, checkpoint: Checkpoint, aliases: Mapping[str, tuple[str, ...]]) -> None:
    """Give an optimizer what is not flat; what had the type of the weights then has that of the weights now."""

    def find(kind: str) -> dict[str, Tensor]:
        name = replica.ring.parameters[0].names[0]
        then = {held.dtype for held in checkpoint.read(MASTER, {name, *aliases.get(name, ())}).values()}
        found, now = _find(replica, kind, checkpoint, aliases=aliases), replica.ring.master.dtype
        is_own = kind != COUNTS
        return {name: tensor.to(now) if is_own and tensor.dtype in then else tensor for name, tensor in found.items()}

    try:
        kinds = {file.kind for file in checkpoint.manifest.files}
        replica.optimizer.load_named_state(sorted(kinds if _continues(replica, checkpoint) else kinds - {COUNTS}), find)
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError) as error:  # a user's optimizer may refuse its state
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} has a state that the optimizer can't take: {first_line(error)}"
        ) from error


def _write_flat(
    replica: Replica,
    flat: Tensor,
    kind: str,
    checkpoint: Checkpoint,
    stage: int | None = None,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Fill a flat buffer by the names of its parameters."""
    found = _find(replica, kind, checkpoint, stage, aliases)
    with torch.no_grad():
        for parameter in replica.ring.parameters:
            name = parameter.names[0]
            if name not in found:
                raise CheckpointError(f"checkpoint {checkpoint.folder} has no {kind} for parameter '{name}'")
            target, held = parameter.real_view(flat), found[name]
            if held.shape != target.shape or not held.is_floating_point():
                raise CheckpointError(
                    f"checkpoint {checkpoint.folder} has {kind} of parameter '{name}' as {list(held.shape)} "
                    f"{str(held.dtype).removeprefix('torch.')}, the model needs {list(target.shape)} of a float type"
                )
            target.copy_(held)


def _write_frozen(replica: Replica, checkpoint: Checkpoint, *, starts_from_file: bool) -> None:
    """Set what is not trained now, which may have been before; a model's factory has made what no checkpoint has."""
    targets = frozen_of(replica)
    found = checkpoint.read(MASTER, targets) | checkpoint.read(FROZEN, targets)
    for name, target in targets.items():
        if name not in found:
            if starts_from_file:
                raise CheckpointError(f"checkpoint {checkpoint.folder} has no values of frozen parameter '{name}'")
            continue
        if found[name].shape != target.shape:
            raise CheckpointError(
                f"checkpoint {checkpoint.folder} has frozen parameter '{name}' as {list(found[name].shape)}, the model "
                f"needs {list(target.shape)}"
            )
        target.copy_(found[name])


def _find(
    replica: Replica,
    kind: str,
    checkpoint: Checkpoint,
    stage: int | None = None,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, Tensor]:
    """The tensors of one kind of a replica's parameters; `aliases` are the names of tied ones in other homes."""
    names = [parameter.names[0] for parameter in replica.ring.parameters]
    known = {name: (name, *(aliases or {}).get(name, ())) for name in names}
    found = checkpoint.read(kind, {alias for own in known.values() for alias in own}, stage)
    saved = {name: next((alias for alias in own if alias in found), None) for name, own in known.items()}
    return {name: found[alias] for name, alias in saved.items() if alias is not None}


def _write_buffers(replica: Replica, found: Mapping[str, Tensor]) -> None:
    for name, buffer in replica.piece.training.named_buffers():
        if name in found and found[name].shape == buffer.shape:
            buffer.copy_(found[name])


def _write_numbers(
    replica: Replica, checkpoint: Checkpoint, states: Sequence[StageState], stage: int | None = None
) -> None:
    """Set the scalars of the optimizer's state, of several stages to the largest."""
    if not _continues(replica, checkpoint):
        return
    names = {name for state in states for name in state.optimizer}
    numbers = {name: max(state.optimizer.get(name, 0.0) for state in states) for name in names}
    has_counts = checkpoint.has(COUNTS)  # of each parameter; a stage without any has a number as well
    if has_counts and "step" in replica.optimizer.state:
        counts = [float(count.flatten()[0]) for count in checkpoint.read(COUNTS, stage=stage).values() if count.numel()]
        numbers["step"] = max(counts, default=numbers.get("step", 0.0))
    for name, value in replica.optimizer.state.items():
        if not value.dim() and name in numbers:
            value.fill_(numbers[name])
    if replica.optimizer.counts is not None and not has_counts:
        replica.optimizer.counts.fill_(numbers.get("step", 0.0))
