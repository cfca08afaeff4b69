"""A script's own objects on their way to its ranks: through a pipe that nobody but the rank inherits.

supervisor: pack, once for each set of names ──► pipe, written by a thread ──► rank: receive, before it builds anything

The folders that the script imports from come first, for its modules that are named. cloudpickle stores classes and
functions of `__main__` and of notebook cells by value, those of modules by name. torch stores tensors, each storage
once and by value, not in shared memory. What a process unpickles came from the one that started it: never from a file,
never over a network.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from stagewright import objects
from stagewright.config.sections import Config
from stagewright.errors import UserError, first_line
from stagewright.plan.plan import Plan
from stagewright.runtime.process.children import DESCRIPTOR


def given_names(config: Config, plan: Plan | None = None, rank: int = 0) -> tuple[str, ...]:
    """The objects of a script that a configuration names; with a plan, those that one rank needs."""
    return tuple(name for name in _users_names(config, plan, rank) if objects.is_given(name))


def content_for(config: Config, plan: Plan, rank: int, packed: dict[tuple[str, ...], bytes]) -> bytes | None:
    """What a rank reads first; None where nothing but our own code runs. `packed` keeps it for others and restarts."""
    if not _users_names(config):
        return None
    names = given_names(config, plan, rank)
    if names not in packed:
        packed[names] = pack(names)
    return packed[names]


def _users_names(config: Config, plan: Plan | None = None, rank: int = 0) -> tuple[str, ...]:
    """The names of a user's own code and objects, of the whole run or of one rank."""
    names = [config.model.name, config.optimizer.name]
    if plan is None or rank in plan.stages[0].ranks:
        names += [name.removeprefix("python:") for name in (config.data.source, config.data.val or "")]
    if plan is None or rank in plan.stages[-1].ranks:
        names += [config.loss.name, *(name.rpartition("=")[2] for name in config.run.metrics.split(","))]
    return tuple(dict.fromkeys(name for name in names if ":" in name))


def require_portable(config: Config) -> None:
    """An error that names an object which can't be sent to ranks; called before anything starts."""
    for name in given_names(config):
        _save({name: objects.load_object(name, "object")}, _Nowhere())


def pack(names: Sequence[str]) -> bytes:
    """Objects as bytes, if there are any, after the folders that a user's modules are imported from."""
    buffer = io.BytesIO()
    buffer.write(json.dumps([str(Path(folder).absolute()) for folder in sys.path]).encode() + b"\n")
    if names:
        _save({name: objects.load_object(name, "object") for name in names}, buffer)
    return buffer.getvalue()


def _save(found: Mapping[str, Any], target: Any) -> None:
    by_name = {name.partition(":")[2]: what for name, what in found.items()}
    try:
        torch.save(by_name, target, pickle_module=cloudpickle, pickle_protocol=cloudpickle.DEFAULT_PROTOCOL)
    except Exception as error:  # an object's own code may raise anything
        raise UserError(
            f"{', '.join(by_name)} can't be sent to ranks ({type(error).__name__}: {first_line(error, 160)}); give a "
            "function that makes it instead"
        ) from error


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, content: Any) -> int:
        return len(content)


def receive_objects() -> None:
    """Keep the objects that the process which started this one has sent, if it has sent any."""
    descriptor = os.environ.pop(DESCRIPTOR, None)
    if descriptor is None:
        return
    with os.fdopen(int(descriptor), "rb") as pipe:
        folders, content = json.loads(pipe.readline()), pipe.read()
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
    if not content:
        return
    try:
        objects.install(torch.load(io.BytesIO(content), map_location="cpu", weights_only=False))
    except Exception as error:  # the code of an object's module may raise anything
        raise UserError(
            f"an object of the script can't be made again in another process ({type(error).__name__}: "
            f"{first_line(error, 160)}); give a function that makes it instead"
        ) from error
