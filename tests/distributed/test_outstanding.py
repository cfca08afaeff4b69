"""Ranks that train faster than checkpoints are committed wait: at most two are outstanding."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stagewright.events import Record, Saved
from stagewright.runtime.checkpoint.folder import list_folders
from stagewright.runtime.checkpoint.format import sync_folder
from stagewright.runtime.process.launch import launch
from stagewright.runtime.process.log import Ledger
from tests.keeping import keeping
from tests.parity import Case, make_job
from tests.waiting import wait_until

BATCHES = 12


def test_at_most_two_checkpoints_are_outstanding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first commit takes long, ranks write the second checkpoint, and then wait."""
    job = keeping(make_job(Case("plain", "0:0.0:1", "third", steps=BATCHES), tmp_path), every=1, keep=2)
    records: list[Record] = []
    seen: list[int] = []

    def count_partial() -> int:
        seen.append(len(list(Path(job.folder).glob("checkpoints/*.partial"))))
        return seen[-1]

    def slow_sync(folder: Path) -> None:
        if not seen:
            wait_until(lambda: count_partial() >= 2)
            for _ in range(100):  # ranks that did not wait would write all others meanwhile
                time.sleep(0.02)
                count_partial()
        count_partial()
        sync_folder(folder)

    monkeypatch.setattr("stagewright.runtime.checkpoint.commit.sync_folder", slow_sync)
    with Ledger(job, records.append) as ledger:
        launch(job, ledger)
    saved = [record for record in records if isinstance(record, Saved)]
    assert [record.batch for record in saved] == list(range(1, BATCHES + 1)) and max(seen) == 2
    assert saved[2].waited > 0.1, "the third waited for the first"
    assert [int(folder.name) for folder in list_folders(Path(job.folder))] == [BATCHES - 1, BATCHES]
    assert count_partial() == 0
