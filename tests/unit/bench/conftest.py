"""A tiny suite, and what a whole anonymised bench of it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.bench.result import Outcome, read_outcome
from stagewright.cli.main import main

SUITE = """
title = "Tiny"
repeats = 3
steps = 6
[options]
model = { name = "resnet8" }
data = { samples = 64 }
plan = { batch = 8, microbatches = 2 }
run = { emulate = true }
[[group]]
name = "ResNet-8"
trial = [
  { name = "dp", options = { plan = { mode = "dp", placement = "0:0-1" } } },
  { name = "stale", options = { plan = { mode = "stale", staleness = 1, placement = "0:0.0:1", cut = "layer3" } } },
]
"""


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "tiny.toml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="session")
def folder(suite: Path) -> Path:
    """What a whole anonymised bench leaves."""
    main(["bench", str(suite), "--anonymise", "--runs", str(suite.parent / "runs"), "--json"])
    (found,) = (suite.parent / "runs").iterdir()
    return found


@pytest.fixture(scope="session")
def outcome(folder: Path) -> Outcome:
    return read_outcome(folder)
