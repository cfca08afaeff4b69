"""What every GPU test may rely on: it starts from torch's defaults, and leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stagewright.runtime.process.torch_flags import FLAGS


def _state() -> dict[str, Any]:
    flags = {flag.name: flag.read() for flag in FLAGS}
    random = [torch.get_rng_state().tolist(), torch.cuda.get_rng_state(0).tolist()]
    return flags | {"random": random, "gpu": torch.cuda.current_device(), "grad": torch.is_grad_enabled()}


@pytest.fixture(autouse=True)
def unchanged_torch() -> Iterator[None]:
    """Fail a test that leaves torch's global state changed, so that the tests pass in any order."""
    if not torch.cuda.is_available():
        yield
        return
    before = _state()
    yield
    torch.cuda.empty_cache()
    assert _state() == before
