"""Libraries of models are imported where they are installed, and named where they are not."""

import subprocess
import sys

import pytest

from stagewright.bench.models.libraries import import_library, is_installed
from stagewright.errors import UserError
from tests.waiting import LONG


def test_a_missing_library_is_named_with_what_installs_it() -> None:
    assert not is_installed("no_such_library") and is_installed("torch") and is_installed("")
    with pytest.raises(UserError, match=r"no_such_library.*stagewright\[libraries\]"):
        import_library("no_such_library.models")


def test_timm_imports_torchvision_in_a_new_process() -> None:
    if not is_installed("timm"):
        pytest.skip("timm is not installed")
    script = (
        "from stagewright.bench.models.libraries import import_library; print(import_library('timm.models').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG)
    assert done.stdout.split() == ["timm.models"], done.stderr
