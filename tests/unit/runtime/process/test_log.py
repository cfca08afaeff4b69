"""Events become records: in order, once, and also without a screen."""

from __future__ import annotations

import errno
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from stagewright.events import BatchLosses, DecodeError, Event, Finished, Ready, Restarted, Unsaved, encode
from stagewright.metrics import Span, SteadyRate
from stagewright.runtime.process.log import EventHandler, EventReader, Journal, Ledger, Record
from stagewright.runtime.process.rank import EVENTS, clock_name
from stagewright.voice import Voice
from tests.parity import Case, make_job


def test_records_continue_when_the_screen_is_gone(tmp_path: Path) -> None:
    job = make_job(Case(microbatches=1, steps=3), tmp_path)

    def show(record: Record) -> None:
        raise BrokenPipeError

    with Ledger(job, show) as ledger:
        for batch in range(3):
            ledger.handle(BatchLosses(0, ((batch, 1.0, 1.0),), time.monotonic()))
    assert len(Journal(Path(job.folder) / "metrics.jsonl", 3).records) == 3


def test_the_loss_of_a_batch_is_its_totals_over_its_counts(tmp_path: Path) -> None:
    job = make_job(Case(microbatches=2, steps=4), tmp_path)
    warnings: list[str] = []
    with Ledger(job, lambda record: None, Voice(warnings.append)) as ledger:
        for losses in [(6.0, 4.0), (0.0, 0.0)], [(0.5, 1.0), (0.25, 1.0)], [(0.0, 0.0)] * 2, [(0.0, 0.0)] * 2:
            first = 2 * len(ledger.steps.done)
            for number, (total, count) in enumerate(losses, first):
                ledger.handle(BatchLosses(0, ((number, total, count),), time.monotonic()))
        assert [step.loss for step in ledger.steps.done] == [1.5, 0.375, 0.0, 0.0]
    assert len(warnings) == 1 and "batch 2 has no targets" in warnings[0]


def test_a_restart_drops_the_records_after_its_checkpoint(tmp_path: Path) -> None:
    job = make_job(Case(microbatches=1, steps=5), tmp_path)
    with Ledger(job, lambda record: None) as ledger:
        for batch in range(4):
            ledger.handle(BatchLosses(0, ((batch, float(batch), 1.0),), time.monotonic()))
        ledger.handle(Restarted(2, "a test"))
        for batch in range(2, 5):
            ledger.handle(BatchLosses(0, ((batch, 10.0 + batch, 1.0),), time.monotonic()))
        assert [step.loss for step in ledger.steps.done] == [0.0, 1.0, 12.0, 13.0, 14.0]
    records = Journal(Path(job.folder) / "metrics.jsonl", 5).records
    assert [type(record).__name__ for record in records] == ["Step", "Step", "Restarted", "Step", "Step", "Step"]


def test_the_speed_leaves_out_batches_right_after_a_resume_or_a_restart(tmp_path: Path) -> None:
    job = replace(make_job(Case(microbatches=1, steps=9), tmp_path), start=3)
    clock = time.monotonic() + 100  # the first batch comes long after the start

    def speed(*seconds: tuple[int, int]) -> SteadyRate | None:
        for batch, second in seconds:
            ledger.handle(BatchLosses(0, ((batch, 1.0, 1.0),), clock + second))
        return ledger.steps.speed()

    with Ledger(job, lambda record: None) as ledger:
        assert speed((3, 3)) is None
        found = speed((4, 4), (5, 5))
        assert found is not None and found.times == pytest.approx((1.0, 1.0))
        ledger.handle(Restarted(5, "a test"))
        found = speed((5, 50), (6, 52), (7, 54))
        assert found is not None and found.times == pytest.approx((1.0, 2.0, 2.0))
        assert found.rate == pytest.approx(job.plan.batch / 2)


@pytest.mark.parametrize("offset", [-5e6, 0.0, 5e6])
def test_times_of_ranks_of_other_machines_are_those_of_our_clock(tmp_path: Path, offset: float) -> None:
    """Monotonic clocks count from the boot of their machine, here rank 1's from long before or after ours."""
    job = make_job(Case(placement="0:0.0:1", microbatches=1, steps=3), tmp_path)
    began = time.monotonic()
    span = Span(0, "compute", "F", "0F0@0", began, began + 0.5)
    with Ledger(job, lambda record: None) as ledger:
        ledger.handle(Ready(0, began, clock_name()))
        ledger.handle(Ready(1, time.monotonic() + offset, "another boot"))
        for batch in range(3):
            ledger.handle(BatchLosses(1, ((batch, 1.0, 1.0),), time.monotonic() + offset))
        ledger.handle(Finished(0, (span,)))
        ledger.handle(Finished(1, (replace(span, rank=1, start=began + offset, end=began + offset + 1),)))
        passed = time.monotonic() - began
        assert all(0 <= step.seconds <= passed for step in ledger.steps.done) and len(ledger.steps.done) == 3
        assert ledger.timeline.end == pytest.approx(1.0, abs=passed + 1e-3)


def test_written_rates_are_over_a_window(tmp_path: Path) -> None:
    """The losses of five batches come at once, every second: 5 batches per second, never millions."""
    job = make_job(Case(microbatches=1, steps=100), tmp_path)
    with Ledger(job, lambda record: None) as ledger:
        clock = time.monotonic()
        for batch in range(100):
            ledger.handle(BatchLosses(0, ((batch, 1.0, 1.0),), clock + batch // 5 + 1))
    rates = [step.images_per_second / job.plan.batch for step in ledger.steps.done]
    assert max(rates) <= 5.0 + 1e-9 and rates[-1] == pytest.approx(5.0, rel=0.1)


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


def test_a_rewind_without_space_on_the_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    for batch in range(4):
        journal.write(Unsaved(batch, "a reason"))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("os.fsync", full)
        journal.rewind(1)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    journal.write(Unsaved(9, "still open"))
    journal.rewind(1)
    journal.close()
    assert [json.loads(line)["batch"] for line in path.read_text().splitlines()] == [0, 1]


def test_close_raises_what_the_event_handler_raised() -> None:
    store = HashStore()
    store.queue_push(EVENTS, encode(Ready(0, 1.0, "clock")))

    class Failing(EventHandler):
        def handle(self, event: Event) -> None:
            raise RuntimeError("the handler gave up")

    reader = EventReader(store, Failing())
    with pytest.raises(RuntimeError, match="the handler gave up"):
        reader.close()


@pytest.mark.parametrize("text", ['{"kind": "redy", "rank": 0}', '{"kind": "stopped", "batch": 1, "rank": "x"}'])
def test_an_event_that_does_not_decode_fails_with_its_kind(text: str) -> None:
    store = HashStore()
    store.queue_push(EVENTS, text)
    reader = EventReader(store, EventHandler())
    with pytest.raises(DecodeError, match=r"kind 'redy' is unknown|Stopped.rank: 'x' is not int"):
        reader.close()
