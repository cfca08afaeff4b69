"""`stagewright cluster list` and `stagewright profile`."""

from __future__ import annotations

import pytest

from tests.commands import fails


def test_refuses_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device cpu" in fails(capsys, "profile", "vgg-small", "--device", "cuda")
