"""The launches of a plan never hang under NCCL's rules, and the stand-in for NCCL hangs where NCCL would."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.runtime.comm.channel import channels_of
from tests.nccl_like import Hang, Launch, Recording, Step, Wait, record, replay
from tests.parity import Case, make_job

CASES = [
    Case("plain", "0:0-6.0:7", "third", mode="stale", staleness=1, batch=14, microbatches=7, steps=4),
    Case("plain", "0:0-6.0:7", "third", mode="sync", batch=14, microbatches=14, steps=3),
    Case("plain", "0:0-1.0:2-3", "third", mode="stale", staleness=1, steps=4),
    Case("plain", "0:0-2.0:3-4.0:5", "second,third", mode="stale", staleness=2, microbatches=6, steps=4),
    Case("plain", "0:0.0:1-3.0:4-5", "second,third", mode="pipedream", microbatches=6, steps=4),
    Case("plain", "0:0-1.0:0-1", "third", microbatches=4, steps=3),
    Case("plain", "0:0-2.0:2-3", "third", mode="stale", staleness=1, microbatches=6, steps=4),
    Case("plain", "0:0-1.0:2-3", "third", microbatches=4, steps=3, policy="gpipe"),
    Case("plain", "0:0-3", mode="dp", microbatches=4, steps=3),
    Case("plain", "0:0-1.0:2", "third", microbatches=4, steps=3, optimizer={"clip": 0.3}),
    Case("language", "0:0.0:1.0:2.0:3", "first,second,head", mode="stale", staleness=3, steps=6),
    Case("chained", "0:0-1.0:2.0:1,0.0:3", "first,second,head", mode="stale", staleness=1, microbatches=3, steps=4),
]


def num_streams(recording: Recording, rank: int) -> int:
    return len({(step.stream, step.side) for step in recording.steps[rank] if isinstance(step, Launch)})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_plan_hangs_even_with_a_short_queue(case: Case, tmp_path: Path) -> None:
    """One more place than a rank has streams is enough, since only receives posted ahead are out of order."""
    recording = record(make_job(case, tmp_path))
    queue = 1 + max(num_streams(recording, rank) for rank in recording.steps)
    assert replay(recording.steps, recording.members, queue) <= queue
    assert replay(recording.steps, recording.members, 10_000) > 0


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_one_stream_for_both_directions_of_a_pair_hangs(case: Case, tmp_path: Path) -> None:
    """This is why channels have one direction: an activation would wait behind a gradient that waits for it."""
    recording = record(make_job(case, tmp_path))

    def by_pair(launch: Launch) -> str:
        kind, *_, ends = launch.stream.split("/")
        return "-".join(sorted(ends.split("-"))) if kind in ("act", "grad") else launch.stream

    with pytest.raises(Hang):
        replay(recording.steps, recording.members, 10_000, by_pair)


def test_a_queue_of_one_hangs(tmp_path: Path) -> None:
    recording = record(make_job(CASES[0], tmp_path))
    with pytest.raises(Hang):
        replay(recording.steps, recording.members, 1)


def test_sums_in_different_orders_hang() -> None:
    one, other = Launch("a", "sum", 0), Launch("b", "sum", 0)
    members = {"a": 2, "b": 2}
    agreed: dict[int, list[Step]] = {0: [one, Wait(one), other, Wait(other)], 1: [one, Wait(one), other, Wait(other)]}
    assert replay(agreed, members, 1) == 1
    crossed: dict[int, list[Step]] = {0: [one, Wait(one), other], 1: [other, Wait(other), one]}
    with pytest.raises(Hang):
        replay(crossed, members, 4)


def test_sends_that_each_side_waits_for_hang() -> None:
    """No send ends before its receive has started, so two sends that wait for each other hang."""
    there, here = Launch("x", "send", 0), Launch("x", "receive", 0)
    back, taken = Launch("y", "send", 0), Launch("y", "receive", 0)
    members = {"x": 2, "y": 2}
    patient: dict[int, list[Step]] = {0: [there, taken, Wait(taken)], 1: [here, Wait(here), back]}
    assert replay(patient, members, 4) > 0
    eager: dict[int, list[Step]] = {0: [there, Wait(there), taken], 1: [back, Wait(back), here]}
    with pytest.raises(Hang):
        replay(eager, members, 4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_channel_of_a_plan_is_used(case: Case, tmp_path: Path) -> None:
    job = make_job(case, tmp_path)
    launches = [step for steps in record(job).steps.values() for step in steps if isinstance(step, Launch)]
    sent = {launch.stream for launch in launches if launch.side == "send"}
    assert sent == {str(name) for name in channels_of(job.plan)}
