"""A fault names the rank that caused it, not those that noticed."""

from __future__ import annotations

from typing import Any

from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.plan.make import make_plan
from stagewright.runtime.faults import HungRank, RankExit, describe_fault
from stagewright.schedule.action import Action, Op

PLAN = make_plan(parse_placement("0:0-1.1:0", Cluster((Machine(), Machine()))), batch=8)


def failure(rank: int, cause: str, **about: Any) -> dict[str, Any]:
    return {"rank": rank, "cause": cause, "action": ["0F3@2", 0], "is_secondary": False, "is_users": False, **about}


def test_names_the_rank_that_raised_before_its_peers() -> None:
    lost = failure(0, "LostPeer: gone", is_secondary=True)
    raised = failure(2, "RuntimeError: gave up", action=["1F3@2", 1])
    fault = describe_fault(PLAN, [lost, raised], [RankExit(2, 1, "1F3@2", 1), RankExit(0, 1, None, None)])
    assert fault.text == "stage 1 replica 0 (rank 2, machine 1) failed at 1F3@2: RuntimeError: gave up"
    assert not fault.is_final


def test_errors_of_the_user_are_final() -> None:
    assert describe_fault(PLAN, [failure(1, "NonFiniteLoss: nan", is_users=True)], []).is_final
    early = describe_fault(PLAN, [failure(2, "ValueError: no such file", is_users=True, action=None)], [])
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
        "rank 1, machine 0) exited with code 3 at start" in describe_fault(PLAN, [], [RankExit(1, 3, None, None)]).text
    )
    assert (
        "rank 0, machine 0) failed: LostPeer"
        in describe_fault(PLAN, [failure(0, "LostPeer: x", is_secondary=True)], []).text
    )
