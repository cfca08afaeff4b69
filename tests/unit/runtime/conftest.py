"""What tests of the runtime may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from stagewright.config import rules
from stagewright.run import prepare
from stagewright.runtime.process import assemble
from stagewright.runtime.stage import precision

_SCALED = precision.Precision("fp16", "cpu", is_scaled=True)  # scaled as fp16 is, but computed in fp32: to be compared


@pytest.fixture
def scaled() -> Iterator[None]:
    with (
        mock.patch.object(assemble, "make_precision", lambda name, device: _SCALED),
        mock.patch.object(prepare, "make_precision", lambda name, device: _SCALED),
        mock.patch.object(rules, "RULES", tuple(rule for rule in rules.RULES if rule.flag != "--precision")),
    ):
        yield
