"""What takes too long for every day; `make soak` or `make nightly` runs it."""

import os
from collections.abc import Iterable
from itertools import product
from typing import TypeVar

import pytest

First = TypeVar("First")
Second = TypeVar("Second")

soak = pytest.mark.skipif("STAGEWRIGHT_SOAK" not in os.environ, reason="takes long: make soak")
IS_NIGHTLY = "STAGEWRIGHT_NIGHTLY" in os.environ
nightly = pytest.mark.skipif(not IS_NIGHTLY, reason="takes long: make nightly")


def daily(cases: Iterable[First], step: int) -> list[First]:
    """Every `step`-th case; nightly all of them."""
    return list(cases)[:: 1 if IS_NIGHTLY else step]


def pairs(first: Iterable[First], second: Iterable[Second]) -> list[tuple[First, Second]]:
    """Each of either with some of the other; nightly all pairs."""
    ones, others = list(first), list(second)
    if IS_NIGHTLY:
        return list(product(ones, others))
    return [(ones[i % len(ones)], others[i % len(others)]) for i in range(max(len(ones), len(others)))]
