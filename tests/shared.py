"""Files that tests read from outside the project, where they are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("STAGEWRIGHT_SHARED", Path(__file__).parents[2] / "shared"))


def shared_file(name: str) -> Path:
    """A file of the shared folder; the test is skipped where it is missing."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not there; set STAGEWRIGHT_SHARED to the folder that holds {name}")
    return path
