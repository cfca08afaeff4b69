"""Checks between machines: the values that must be equal, and the checkpoint folder that they must share.

Checkpoints lie in the run folder of machine 0; the other machines link to it, if they can see it:

machine 0: runs/A/checkpoints/        machine 1: runs/B/checkpoints ─► runs/A/checkpoints"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.distributed import Store

from stagewright import __version__
from stagewright.config.sources import SourceOptions
from stagewright.config.toml import as_tables
from stagewright.data.own import open_own
from stagewright.objects import is_given, load_object
from stagewright.runtime.checkpoint.folder import checkpoints_folder
from stagewright.runtime.job import Job

# Options that may differ between machines: where files are, how to read them, which machine this is.
_LOCAL = {
    "model.init",
    "data.source",
    "data.val",
    "data.class_names",
    "data.loader_threads",
    "data.workers",
    "data.ahead",
    "plan.file",
    "plan.profile",
    "run.export",
    "run.log_every",
    "run.monitor_every",
    "run.resume",
    "run.runs",
    "run.track",
    "nodes.index",
    "nodes.token",
}
_MISSING = "nothing"
_WEIGHTS, _NEW, _RESUMED = "weights of --init", "none", "those of a checkpoint"
_FOLDER_KEY = "folder"
_SESSION_FILE = ".session"


def consistency_values(job: Job) -> dict[str, Any]:
    """Versions, options, the data's fingerprint and the plan, each under a name that users know."""
    values: dict[str, Any] = {"stagewright": __version__, "torch": torch.__version__}
    for section, options in as_tables(job.config).items():
        values |= {f"{section}.{name}": value for name, value in options.items()}
    values = {name: value for name, value in values.items() if name not in _LOCAL}
    values["data fingerprint"] = job.fingerprint
    values[_WEIGHTS] = _RESUMED if job.resume else _NEW if job.weights is None else job.weights.digest
    values |= {f"plan {name}": value for name, value in job.plan.describe().items()}
    values["model and schedule"] = _digest(job)
    return values | _of_objects(job)


def _of_objects(job: Job) -> dict[str, str]:
    """What the objects of a script hold, of which the script has made others in every process."""
    found, config = dict[str, str](), job.config
    model = load_object(config.model.name, "model") if is_given(config.model.name) else None
    if isinstance(model, nn.Module):  # a factory is seeded by the run
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in model.state_dict().items():
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        found["model weights (torch.manual_seed before the model makes them equal)"] = digest.hexdigest()
    if is_given(source := config.data.source):
        options = SourceOptions(seed=config.run.seed, ignore_index=config.loss.ignore_index, limit=config.data.limit)
        found["data fingerprint"] = open_own(source, options).fingerprint
    return found


def first_difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first name, in the order of `own`, whose values differ, with both values."""
    for name in dict.fromkeys([*own, *other]):
        here, there = own.get(name, _MISSING), other.get(name, _MISSING)
        if name == _WEIGHTS and _RESUMED in (here, there):
            continue  # machine 0 may be started again to resume, while the others wait: ranks then take its checkpoint
        if json.dumps(here) != json.dumps(there):
            return name, here, there
    return None


def announce_folder(store: Store, folder: Path, session: str) -> None:
    """Publish where machine 0's run folder is, and leave a file in it by which other machines recognize it."""
    file = checkpoints_folder(folder) / _SESSION_FILE
    if not file.is_file() or file.read_text() != session:  # once: on a restart the disk may be full
        file.parent.mkdir(exist_ok=True)
        file.write_text(session)
    store.set(_FOLDER_KEY, json.dumps(str(folder)))


def link_checkpoints(store: Store, folder: Path, session: str) -> bool:
    """Link this machine's checkpoints to those of machine 0; False where this machine can't see that folder."""
    there, here = checkpoints_folder(Path(json.loads(store.get(_FOLDER_KEY)))), checkpoints_folder(folder)
    try:
        if (there / _SESSION_FILE).read_text() != session:
            return False
        if not here.exists():
            here.symlink_to(there, target_is_directory=True)
        return here.samefile(there)
    except OSError:
        return False


def _digest(job: Job) -> str:
    """A hash of the rest of the job: what crosses each cut, and when the ranks pause.

    Not where the run starts: machine 0 decides that, and a machine that is started again may know a newer checkpoint.
    """
    same = replace(job, folder="", start=0, resume=None, export=None, weights=None, config=type(job.config)())
    text = json.dumps(
        TypeAdapter(Job).dump_python(same),
        sort_keys=True,
        default=lambda value: sorted(value) if isinstance(value, Set) else str(value),
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
