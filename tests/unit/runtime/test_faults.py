"""A fault names the rank that caused it, not those that noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.data.formats.records import DataError
from stagewright.errors import RunFailed, UserError
from stagewright.events import Failure
from stagewright.plan.make import make_plan
from stagewright.runtime.checkpoint.format import CheckpointError
from stagewright.runtime.faults import HungRank, RankExit, describe_fault, failure_of, log_fault, traceback_in_log
from stagewright.schedule.action import Action, Op

PLAN = make_plan(parse_placement("0:0-1.1:0", Cluster((Machine(), Machine()))), batch=8)


def failure(rank: int, cause: str, **about: Any) -> Failure:
    return Failure(rank, cause.partition(":")[0], cause, **{"action": "0F3@2", "stage": 0, **about})


def test_names_the_rank_that_raised_before_its_peers() -> None:
    lost = failure(0, "LostPeer: gone", is_secondary=True)
    raised = failure(2, "RuntimeError: gave up", action="1F3@2", stage=1)
    fault = describe_fault(PLAN, [lost, raised], [RankExit(2, 1, "1F3@2", 1), RankExit(0, 1, None, None)])
    assert fault.text == "stage 1 replica 0 (rank 2, machine 1) failed at 1F3@2: RuntimeError: gave up"
    assert not fault.is_final


def test_errors_of_the_user_are_final() -> None:
    assert describe_fault(PLAN, [failure(1, "NonFiniteLoss: nan", is_users=True)], []).is_final
    early = describe_fault(PLAN, [failure(2, "UserError: no such file", is_users=True, action=None)], [])
    assert early.is_final and early.text == "no such file"


def test_names_a_killed_rank_before_its_peers() -> None:
    lost = failure(0, "LostPeer: gone", is_secondary=True)
    fault = describe_fault(PLAN, [lost], [RankExit(1, -9, "0B2@1", 0), RankExit(0, 1, None, None)])
    assert fault.text == "stage 0 replica 1 (rank 1, machine 0) was killed by SIGKILL at 0B2@1"
    noticed = failure(0, "RuntimeError: Connection closed by peer")
    assert describe_fault(PLAN, [noticed], [RankExit(1, -9, "0B2@1", 0), RankExit(0, 1, None, None)]) == fault
    assert describe_fault(
        PLAN, [failure(0, "NonFiniteLoss: nan", is_users=True)], [RankExit(1, -9, None, None)]
    ).is_final
    assert describe_fault(PLAN, [], [RankExit(1, -77, None, None)]).text.endswith("was killed by signal 77 at start")


def test_names_the_action_of_a_hung_rank() -> None:
    hung = HungRank.at(2, Action(Op.FORWARD, 2, 1, 3, 0, None), "its process has been stopped for 10 s")
    fault = describe_fault(PLAN, [], [], [hung])
    assert fault.text == ("stage 1 replica 0 (rank 2, machine 1) hangs at 1F3@0: its process has been stopped for 10 s")


def test_names_a_rank_that_exits_silently() -> None:
    assert (
        "rank 1, machine 0) exited with code 3 at start without"
        in describe_fault(PLAN, [], [RankExit(1, 3, None, None)]).text
    )
    assert (
        "rank 0, machine 0) failed: LostPeer"
        in describe_fault(PLAN, [failure(0, "LostPeer: x", is_secondary=True)], []).text
    )


def raised(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return failure_of(2, Action(Op.FORWARD, 2, 1, 3, 0, None), caught, 4)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x"), OSError()]
)
def test_every_exception_but_a_users_may_be_restarted_and_keeps_its_traceback(error: Exception, tmp_path: Path) -> None:
    failure = raised(error)
    assert (failure.error, failure.action, failure.stage) == (type(error).__name__, "1F3@0", 1)
    fault = describe_fault(PLAN, [failure], [])
    assert not fault.is_final and f"failed at 1F3@0: {type(error).__name__}: " in fault.text
    log_fault(tmp_path, fault, [failure])
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith(fault.text) and "rank 2:\nTraceback" in log and "raise error" in log


@pytest.mark.parametrize("error", [UserError("x"), DataError("x"), CheckpointError("x")])
def test_a_users_error_is_final(error: UserError) -> None:
    assert describe_fault(PLAN, [raised(error)], []).is_final


def test_a_gpu_that_others_have_filled_is_said_so() -> None:
    fault = describe_fault(PLAN, [raised(RuntimeError("CUDA error: out of memory\nSearch for `cudaError'"))], [])
    assert fault.is_final and "\n" not in fault.text
    assert "the GPU of rank 2 is already full" in fault.text and "nvidia-smi" in fault.text


@pytest.mark.parametrize(
    ("error", "is_logged"), [(KeyError("x"), True), (UserError("x"), False), (RunFailed("x"), False)]
)
def test_only_a_bug_leaves_its_traceback_in_the_log(error: Exception, is_logged: bool, tmp_path: Path) -> None:
    with pytest.raises(type(error)), traceback_in_log(tmp_path):
        raise error
    log = tmp_path / "log.txt"
    assert log.exists() == is_logged
    assert not is_logged or ("Traceback" in log.read_text() and "raise error" in log.read_text())


def test_the_last_line_of_a_rank_that_exits_by_itself_is_named(tmp_path: Path) -> None:
    """A script's sys.exit("no data here") says why on standard error alone."""
    errors = tmp_path / "stderr.log"
    errors.write_bytes(b"first\n" * 2000 + b"no data \x1b[31mhere\n\n")
    ended = RankExit.of(tmp_path, 1, 1, errors)
    (line,) = describe_fault(PLAN, [], [ended]).text.splitlines()
    assert "exited with code 1 at start; its last line: no data" in line and "\x1b" not in line and "first" not in line
    noticed = failure(0, "LostPeer: rank 1 is gone", is_secondary=True)
    both = describe_fault(PLAN, [noticed], [RankExit(0, 1, None, None), ended])
    assert both.text == line, "the rank that noticed is not the one that ended"
    errors.write_text("x" * 5000)
    assert len(RankExit.of(tmp_path, 1, 1, errors).last_line) == 200
    assert RankExit.of(tmp_path, 1, 1, tmp_path / "nothing").last_line == ""
