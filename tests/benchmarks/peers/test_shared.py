"""`bench shared`: the case that measures a prediction trains the plan that was predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import shared
from benchmarks.peers.shared import CLUSTER, ModelPrediction, make_case
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import parse_placement
from stagewright.errors import RunFailed, UserError
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.planning.predict import predict
from stagewright.planning.setting import make_setting
from stagewright.planning.traced import trace_model


def test_a_case_trains_the_plan_that_was_predicted() -> None:
    plan = make_plan(parse_placement("0:0-6.0:7"), batch=224, microbatches=7, mode=Mode.STALE, cuts=["avgpool"])
    case = make_case(ModelPrediction("vgg16", 224, 375.0, plan, 2844.0))
    (pairing,) = case.pairings
    assert case.workload.placement == "0:0-6.0:7" and case.workload.cut == "avgpool"
    assert (pairing.ours.mode, pairing.theirs.microbatches) == ("stale", 8)
    assert (case.workload.versions, case.workload.depths) == ("2,1", "3,1")
    assert "2,844" in pairing.ours.name and "375" in pairing.theirs.name


def test_stock_ddp_on_eight_ranks_is_predicted_as_measured() -> None:
    """369 images/s; the host's budget comes from that run."""
    setting = make_setting(trace_model("vgg16").shapes, shipped().cluster(CLUSTER), shared.PRECISION)
    devices = shipped().cluster(CLUSTER).devices
    plan = make_plan((devices,), batch=224, microbatches=8, mode=Mode.DP)
    assert abs(predict(plan, setting).images_per_second / 369 - 1) < 0.1


def test_predictions_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    plan = make_plan(
        parse_placement("0:0-6.0:7"), batch=224, microbatches=7, mode=Mode.STALE, depths=[2, 1], cuts=["avgpool"]
    )
    predicted = [ModelPrediction("vgg16", 224, 375.0, plan, 2844.0)]
    shared.write_predictions(predicted, tmp_path)
    assert shared.read_predictions(tmp_path / shared.PREDICTIONS) == predicted


def test_a_folder_without_predictions_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--reuse"):
        shared.read_predictions(tmp_path / shared.PREDICTIONS)


def test_a_profile_that_dies_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of CUDA poisons the process it happens in, so the profile has one of its own."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RunFailed, match="profile ended with 1"):
        shared.take_profile("vgg16", tmp_path / "vgg16.json")


def test_models_are_chosen_by_a_part_of_their_name() -> None:
    assert shared.models("ResNet") == ["resnet152"] and len(shared.models()) == len(shared.BATCHES)
    with pytest.raises(UserError, match="--only 'bert' matches none of 3 models"):
        shared.models("bert")
