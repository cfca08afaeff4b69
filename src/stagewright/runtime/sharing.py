"""Checkpoints of several machines lie in the run folder of the first, which the others must see too.

machine 0: runs/A/checkpoints/        machine 1: runs/B/checkpoints ─► runs/A/checkpoints
"""

from __future__ import annotations

import json
from pathlib import Path

from torch.distributed import Store

from stagewright.runtime.checkpoint import checkpoints_folder

_KEY = "folder"
_MARK = ".session"


def post_folder(store: Store, folder: Path, session: str) -> None:
    """Tell where the run folder is, and leave a mark in it by which it is known."""
    checkpoints_folder(folder).mkdir(exist_ok=True)
    (checkpoints_folder(folder) / _MARK).write_text(session)
    store.set(_KEY, json.dumps(str(folder)))


def link_checkpoints(store: Store, folder: Path, session: str) -> bool:
    """Have this machine's checkpoints in the run folder of the first; whether it is the same folder from here."""
    there, here = checkpoints_folder(Path(json.loads(store.get(_KEY)))), checkpoints_folder(folder)
    try:
        if (there / _MARK).read_text() != session:
            return False
        if not here.is_symlink():
            here.symlink_to(there, target_is_directory=True)
    except OSError:
        return False
    return True
