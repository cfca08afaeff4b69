"""Export trained weights as one safetensors file that the plain model loads without Stagewright."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor, nn

from stagewright.config.sections import Config
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.model.pieces import Piece
from stagewright.runtime.checkpoint.folder import Checkpoint
from stagewright.runtime.checkpoint.format import EMA, FROZEN, MASTER
from stagewright.runtime.process.assemble import open_model

RAW = "raw"


def export_states(config: Config, states: Sequence[dict[str, Tensor]], path: Path) -> Path:
    """Write the whole model to one file; what no state holds keeps its first value."""
    model = open_model(config)
    initial = model.state_dict(keep_vars=True)
    held = {id(initial[name]) for state in states for name in state if name in initial}
    if config.model.init is not None and any(id(tensor) not in held for tensor in initial.values()):
        model = open_model(config, init=config.model.init)
        initial = model.state_dict(keep_vars=True)
    buffers = {name for name, _ in model.named_buffers()}
    weights = {name: tensor.detach().clone() for name, tensor in initial.items()}
    for state in states:
        for name, tensor in state.items():
            if name in buffers - initial.keys():
                continue  # a buffer that is not persistent
            if name not in initial:
                raise UserError(
                    f"'{name}' is not a parameter of model {config.model.name}; export with the code that trained it"
                )
            if tensor.shape != initial[name].shape:
                raise UserError(
                    f"'{name}' has shape {list(tensor.shape)}, in model {config.model.name} {list(initial[name].shape)}"
                    "; export with the code that trained it"
                )
            ties = [other for other, held in initial.items() if held is initial[name]]
            weights |= {tied: tensor.clone() for tied in ties}
    require_target(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"weights could not be written to {path}: {error}; give another file") from error
    return path


def rehearse(model: nn.Module, pieces: Sequence[Piece], path: Path) -> None:
    """An error, before training, where the weights could not be exported after it."""
    require_target(path)
    held = model.state_dict()
    known = held.keys() | {name for name, _ in model.named_buffers()}
    for piece in pieces:
        for name in piece.training.state_dict():
            if name not in known:
                raise UserError(
                    f"'{name}' of a stage is no tensor of the model, so it can't be exported; train without --export"
                )
    for name, tensor in held.items():
        try:
            save({name: torch.empty(0, dtype=tensor.dtype)})
        except Exception as error:  # safetensors has its own exceptions for each reason
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"'{name}' is {kind}, which no .safetensors file can hold; train without --export"
            ) from error


def require_target(path: Path) -> None:
    """An error where weights can't be written to a path; called before training."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "not a plain file"
        raise UserError(f"weights can't be written to {path}, which is {kind}; give a file such as w.safetensors")
    there = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK):
        kind = "is not writable" if there.is_dir() else "is not a folder"
        raise UserError(f"weights can't be written to {path}: {there} {kind}; give another file")


def export_checkpoint(checkpoint: Checkpoint, path: Path, weights: str | None = None) -> Path:
    """Export a checkpoint: its averaged weights, or where it has none its newest, and the mean buffers.

    `weights` asks for one of them: `RAW` or `EMA`.
    """
    if weights == EMA and not checkpoint.has(EMA):
        raise UserError(f"checkpoint {checkpoint.folder} has no averaged weights; train with --ema, or export raw ones")
    config, held = make_config(checkpoint.manifest.config, given=()), checkpoint.read(MASTER)
    if weights != RAW:
        held |= {name: average.to(held[name].dtype) for name, average in checkpoint.read(EMA).items() if name in held}
    return export_states(config, [held, checkpoint.read(FROZEN), checkpoint.mean_buffers()], path)
