"""Events become records: in order, once, and also without a screen."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from torch.distributed import HashStore

from stagewright.events import Unsaved
from stagewright.runtime.process.log import EventReader, Journal, Ledger, Record
from stagewright.runtime.process.rank import EVENTS
from tests.parity import Case, make_job


def test_records_continue_when_the_screen_is_gone(tmp_path: Path) -> None:
    job = make_job(Case(microbatches=1, steps=3), tmp_path)

    def show(record: Record) -> None:
        raise BrokenPipeError

    with Ledger(job, show) as ledger:
        for batch in range(3):
            ledger.handle({"kind": "losses", "rank": 0, "losses": [(batch, 1.0)]})
    assert len(Journal(Path(job.folder) / "metrics.jsonl", 3).records) == 3


def test_a_restart_drops_the_records_after_its_checkpoint(tmp_path: Path) -> None:
    job = make_job(Case(microbatches=1, steps=5), tmp_path)
    with Ledger(job, lambda record: None) as ledger:
        for batch in range(4):
            ledger.handle({"kind": "losses", "rank": 0, "losses": [(batch, float(batch))]})
        ledger.handle({"kind": "restarted", "batch": 2, "restart": 1, "cause": "a test"})
        for batch in range(2, 5):
            ledger.handle({"kind": "losses", "rank": 0, "losses": [(batch, 10.0 + batch)]})
        assert [step.loss for step in ledger.collector.steps] == [0.0, 1.0, 12.0, 13.0, 14.0]
    records = Journal(Path(job.folder) / "metrics.jsonl", 5).records
    assert [type(record).__name__ for record in records] == ["Step", "Step", "Restarted", "Step", "Step", "Step"]


def test_records_wait_for_space_on_the_disk(tmp_path: Path) -> None:
    """They are written once there is space again, complete lines only."""
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = Journal(path, 0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, limits[1]))
        for batch in range(6):
            journal.write(Unsaved(batch, "a reason of some length"))
        assert path.read_text().endswith("}\n") and 0 < path.read_text().count("\n") < 6
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.close()
    assert [json.loads(line)["batch"] for line in path.read_text().splitlines()] == list(range(6))


def test_close_raises_what_the_event_handler_raised() -> None:
    store = HashStore()
    store.queue_push(EVENTS, '{"kind": "ready"}')

    def on_event(event: dict[str, object]) -> None:
        raise RuntimeError("the handler gave up")

    reader = EventReader(store, on_event)
    with pytest.raises(RuntimeError, match="the handler gave up"):
        reader.close()
