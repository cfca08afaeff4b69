"""Failures of rank processes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.peers.cases import SUITES
from benchmarks.peers.launch import open_ranks


def test_a_rank_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    side = SUITES["overhead"].cases[0].sides[0]
    with ExitStack() as stack, pytest.raises(ValueError, match=r"^sync rank 0 ended with code 1: FileNotFound.*$"):
        open_ranks(stack, {side: tmp_path / "no.json"}, tmp_path, {side: 1})
