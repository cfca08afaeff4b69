"""The processes that train beside a profile: they train at the size that is measured, and end by themselves."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from stagewright.errors import UserError
from stagewright.profile.measure import Workload
from stagewright.run.background_load import background_load


def test_processes_train_at_every_size_and_are_never_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of CUDA MPS that is killed while its kernels run leaves the others on the GPU broken."""
    started = []

    class Noted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    workload = Workload("tests.models:plain", None, (3, 8, 8), "bf16", "cpu", 1, (2, 4))
    with background_load(workload, 1) as use:
        use(2)
        use(4)
    assert [process.returncode for process in started] == [0]


def test_a_process_that_dies_is_one_line() -> None:
    workload = Workload("tests.models:no_such_model", None, (3, 8, 8), "fp32", "cpu", 1, (2,))
    with pytest.raises(UserError, match="ended with code"), background_load(workload, 1) as use:
        use(2)
