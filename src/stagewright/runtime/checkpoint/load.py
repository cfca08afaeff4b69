"""Loads a checkpoint into a rank's replicas: bit for bit under the same plan, by parameter name under another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stagewright.runtime.checkpoint.folder import Checkpoint
from stagewright.runtime.checkpoint.format import MASTER, CheckpointError
from stagewright.runtime.stage.batch_norm import is_summed
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.worker import Worker

_STEPS = "optimizer/steps"


def restore(worker: Worker, checkpoint: Checkpoint) -> None:
    """Set a worker's replicas to the state in the checkpoint."""
    is_same = checkpoint.manifest.plan.computes_as(worker.plan)
    tied = [parameter.names for tie in worker.plan.ties for parameter in tie.parameters]
    aliases = {name: names for names in tied for name in names}
    for replica in worker.replicas.values():
        _write_flat(replica, replica.ring.master, MASTER, checkpoint, aliases=aliases)
        for name, flat in replica.optimizer.state.items():
            if flat.dim() and checkpoint.has(f"optimizer/{name}"):
                _write_flat(replica, flat, f"optimizer/{name}", checkpoint, aliases=aliases)
        if is_same:
            _restore_exactly(replica, checkpoint, replica.stage.ranks.index(worker.rank))
            replica.resume_versions(worker.plan.boundary(checkpoint.batch) // replica.stage.round)
        else:
            _restore_by_name(replica, checkpoint, replica.stage.ranks.index(worker.rank))
    worker.loss_scaling.resume(checkpoint.manifest.stages[-1].extra, checkpoint.batch, is_same=is_same)


def _restore_exactly(replica: Replica, checkpoint: Checkpoint, index: int) -> None:
    """Restore every version in its slot, and this replica's statistics."""
    stage = replica.stage.index
    if len(replica.ring.slots) > 1:
        for number, slot in enumerate(replica.ring.slots):
            _write_flat(replica, slot.flat, f"slot/{number}", checkpoint, stage)
    state = checkpoint.manifest.stages[stage]
    _write_numbers(replica, state.optimizer)
    _write_buffers(replica, checkpoint.read(f"buffers/{index}", stage=stage))
    replica.statistics.count = state.counts[index]


def _restore_by_name(replica: Replica, checkpoint: Checkpoint, index: int) -> None:
    """Fill every slot from the newest weights; set mean statistics, which count as an equal share of microbatches."""
    states, replicas = checkpoint.manifest.stages, replica.stage.replicas
    names = {name for state in states for name in state.optimizer}
    numbers = {name: max(state.optimizer.get(name, 0.0) for state in states) for name in names}
    if "step" in replica.optimizer.state and checkpoint.has(_STEPS):  # saved when each parameter had a count
        counts = [float(count.flatten()[0]) for count in checkpoint.read(_STEPS).values() if count.numel()]
        numbers["step"] = max([numbers.get("step", 0.0), *counts])
    _write_numbers(replica, numbers)
    replica.restart_versions()
    buffers = checkpoint.mean_buffers()
    for name, buffer in buffers.items():
        if is_summed(name):
            buffers[name] = (buffer + replicas - 1 - index) // replicas  # the shares add up to the sum again
    _write_buffers(replica, buffers)
    replica.statistics.count = (sum(states[0].counts) + replicas - 1 - index) // replicas


def _write_flat(
    replica: Replica,
    flat: Tensor,
    kind: str,
    checkpoint: Checkpoint,
    stage: int | None = None,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
) -> None:
    """Fill a flat buffer by the names of its parameters; `aliases` are the names of tied ones in other homes."""
    parameters = {parameter.names[0]: parameter for parameter in replica.ring.parameters}
    known = {name: (name, *(aliases or {}).get(name, ())) for name in parameters}
    found = checkpoint.read(kind, {alias for names in known.values() for alias in names}, stage)
    with torch.no_grad():
        for name, parameter in parameters.items():
            saved = next((alias for alias in known[name] if alias in found), None)
            if saved is None:
                raise CheckpointError(f"checkpoint {checkpoint.folder} has no {kind} for parameter '{name}'")
            target, held = parameter.real_view(flat), found[saved]
            if held.shape != target.shape or not held.is_floating_point():
                raise CheckpointError(
                    f"checkpoint {checkpoint.folder} has {kind} of parameter '{name}' as {list(held.shape)} "
                    f"{str(held.dtype).removeprefix('torch.')}, the model needs {list(target.shape)} of a float type"
                )
            target.copy_(held)


def _write_buffers(replica: Replica, found: Mapping[str, Tensor]) -> None:
    for name, buffer in replica.piece.training.named_buffers():
        if name in found and found[name].shape == buffer.shape:
            buffer.copy_(found[name])


def _write_numbers(replica: Replica, numbers: Mapping[str, float]) -> None:
    for name, value in replica.optimizer.state.items():
        if not value.dim() and name in numbers:
            value.fill_(numbers[name])
        elif name == "steps" and "step" in numbers:  # saved when the whole stage had one count
            value.fill_(numbers["step"])
