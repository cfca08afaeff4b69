"""`stagewright profile` and `doctor`."""

from __future__ import annotations

import pytest
import torch

from tests.commands import fails


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the error says is missing")
def test_refuses_a_missing_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device cpu" in fails(capsys, "profile", "vgg-small", "--device", "cuda")
