"""Rows as people write them: cards, software, models and links; and one law for a row and for a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.calibration.architectures import known_shapes
from benchmarks.calibration.reading import Reading, Unknown, find_device, model_shapes, read_row, row_cluster, row_rate
from benchmarks.calibration.rows import Row
from stagewright.cluster.catalog import shipped
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.planning.predict import predict
from stagewright.planning.setting import make_setting

ROW = Row("rtx-3090", 8, "PyTorch 2.1 AMP channels_last", "resnet50", "fp16", 64, 4000.0, "somebody", link="PCIe 4")


def read(**changes: object) -> Reading:
    reading = read_row(replace(ROW, **changes), shipped())  # type: ignore[arg-type]
    assert isinstance(reading, Reading), reading
    return reading


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80"),
        ("A100 80GB PCIe", "a100-pcie-80"),
        ("GeForce RTX 2080 Ti", "rtx-2080ti"),
        ("RTX 3080 Ti 12GB", "rtx-3080ti"),
        ("Tesla V100", "v100-sxm2-16"),
        ("GTX 1080 Ti", "gtx-1080ti"),
        ("Titan Xp", "titan-xp"),
        ("H100 SXM", "h100-sxm5"),
        ("tesla k80", "k80"),
        ("a home-made card", None),
    ],
)
def test_cards_are_found_as_people_write_them(text: str, name: str | None) -> None:
    assert find_device(text, shipped()) == name


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hardware": "abacus"}, "hardware 'abacus'"),
        ({"model": "my own"}, "model 'my own'"),
        ({"software": "assembler"}, "software 'assembler'"),
        ({"precision": "int8"}, "precision 'int8'"),
    ],
)
def test_what_is_unknown_is_named(changes: dict[str, str], why: str) -> None:
    found = read_row(replace(ROW, **changes), shipped())  # type: ignore[arg-type]
    assert isinstance(found, Unknown) and why in found.why


def test_words_decide_software_layout_and_links() -> None:
    assert read(software="NGC MXNet 20.12").software == "mxnet"
    assert read(software="NGC TensorFlow 20.06 + XLA").software == "tensorflow-xla"
    assert read().channels_last and read(software="PyTorch nchw").channels_last is False
    assert read(software="NGC PyTorch 21.03").channels_last and read(software="NGC PyTorch 20.03").channels_last is None
    assert read().is_staged and not read(hardware="a100-sxm4-80", link="NVSwitch").is_staged
    assert not read(hardware="rtx-3090", gpus=2, link="NVLink bridge").is_staged
    assert read(software="NGC PyTorch 21.11", model="bert-large").pure_half and not read(model="bert-large").pure_half
    assert read(software="tf_cnn_benchmarks").is_fused and not read(software="TensorFlow 2.3").is_fused
    assert not read(software="tf_cnn_benchmarks", precision="fp32").is_fused
    two = read(hardware="v100-sxm2-16", gpus=16, nodes=2, link="NVLink + 25 Gb/s Ethernet")
    network = row_cluster(two, shipped()).network
    assert network is not None and network.name == "net-25g"


def test_cards_of_several_kinds_go_at_the_pace_of_the_slowest() -> None:
    mixed = read(hardware="4x rtx-3090 + 4x rtx-2080ti")
    assert mixed.devices == ((4, "rtx-3090"), (4, "rtx-2080ti"))
    assert row_rate(mixed, shipped()) < row_rate(read(), shipped())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hardware": "v100-sxm2-16", "gpus": 16, "nodes": 2, "link": "NVLink"},
        {"software": "TensorFlow 2.3", "model": "vgg16"},  # which sums tensors whole
    ],
)
def test_a_row_and_a_plan_are_predicted_by_one_law(changes: dict[str, object]) -> None:
    reading, catalog = read(**changes), shipped()
    cluster, row = row_cluster(reading, catalog), reading.row
    shapes = model_shapes(row.model)
    assert shapes is not None
    software = replace(catalog.system(reading.software), channels_last=True)
    catalog = replace(catalog, software={reading.software: software})
    where = make_setting(shapes, cluster, "fp16", catalog=catalog, software=reading.software)
    plan = make_plan((cluster.devices,), batch=64 * row.gpus, microbatches=row.gpus, mode=Mode.DP)
    assert predict(plan, where).images_per_second == pytest.approx(row_rate(reading, catalog), rel=1e-6)


def test_eight_cards_that_copy_through_one_host_share_its_budget() -> None:
    """Measured: VGG-16 on eight such cards is hardly faster than on two."""
    rates = [row_rate(read(model="vgg16", gpus=gpus), shipped()) for gpus in (1, 2, 4, 8)]
    assert rates[3] < 2.2 * rates[0] and rates[3] < 1.5 * rates[2]


@pytest.mark.parametrize(
    ("name", "operations"),
    [("ResNet-50 v1.5", 8.2e9), ("vit_base_patch16_224", 35.1e9), ("ViT-B/16", 35.1e9), ("Inception v3", 11.5e9)],
)
def test_models_are_found_as_people_write_them(name: str, operations: float) -> None:
    shapes = known_shapes(name)
    assert shapes is not None and sum(shape.operations for shape in shapes) == pytest.approx(operations, rel=0.05)
