"""What tests of the runtime may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from stagewright.config import rules
from stagewright.runtime import precision


@pytest.fixture
def scaled() -> Iterator[None]:
    """Runs in fp16 on the CPU, scaled as it is but computed in fp32: to be compared."""
    with (
        mock.patch.dict(precision.FORMATS, {"fp16": (torch.float32, None)}),
        mock.patch.object(rules, "RULES", tuple(rule for rule in rules.RULES if rule.flag != "--precision")),
    ):
        yield
