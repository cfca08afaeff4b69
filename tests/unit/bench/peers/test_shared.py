"""`bench shared`: the case that measures a prediction trains the plan that was predicted."""

from __future__ import annotations

from stagewright.bench.peers.shared import CLUSTER, Foreseen, catalog_setting, make_case
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import parse_placement
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.planning.predict import predict


def test_a_case_trains_the_plan_that_was_predicted() -> None:
    plan = make_plan(parse_placement("0:0-6.0:7"), batch=224, microbatches=7, mode=Mode.STALE, cuts=["avgpool"])
    case = make_case(Foreseen("vgg16", 224, 375.0, plan, 2844.0))
    (pairing,) = case.pairings
    assert case.workload.placement == "0:0-6.0:7" and case.workload.cut == "avgpool"
    assert (pairing.ours.mode, pairing.theirs.microbatches) == ("stale", 8)
    assert "2,844" in pairing.ours.name and "375" in pairing.theirs.name


def test_stock_ddp_on_eight_ranks_is_predicted_as_measured() -> None:
    """369 images/s; the host's budget comes from that run."""
    setting = catalog_setting("vgg16")
    devices = shipped().cluster(CLUSTER).devices
    plan = make_plan((devices,), batch=224, microbatches=8, mode=Mode.DP)
    assert abs(predict(plan, setting).images_per_second / 369 - 1) < 0.1
