"""The analytic profile is close to measured layers, and follows its formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from stagewright.cluster.catalog import shipped
from stagewright.cluster.specs import DeviceSpec, Family, Software
from stagewright.planning.traced import trace_model
from stagewright.profile.analytic import analytic_table
from stagewright.profile.pipedream import read_pipedream
from stagewright.profile.profile import Unit
from stagewright.profile.shapes import Convolution, Kind, Shape
from tests.shared import shared_file

PLAIN = Software("plain", "plain", 1.0)
SYNC_SECONDS = 0.4e-3  # that the measured profiles add to each forward


@pytest.mark.parametrize(
    ("model", "samples", "bound"), [("alexnet", 256, 0.1), ("vgg16", 128, 0.1), ("resnet50", 128, 0.1)]
)
def test_a_computed_v100_is_close_to_a_measured_one(model: str, samples: int, bound: float) -> None:
    """Without the first convolution's forward, which includes the library's start-up in all three files."""
    measured = read_pipedream(shared_file(f"profiles/pipedream/{model}.txt"), model, samples).tables[0].units
    seconds = sum(max(0.0, unit.forward - SYNC_SECONDS) + unit.backward for unit in measured) - measured[0].forward
    table = analytic_table(trace_model(model).shapes, shipped().device("v100-sxm2-16"), "fp32", samples, PLAIN)
    assert table.seconds - table.units[0].forward == pytest.approx(seconds, rel=bound)


def device(bandwidth: float = 1e15) -> DeviceSpec:
    """By default, with so much memory bandwidth that only arithmetic counts."""
    peaks = {
        "fp32": 1e12,
        "fp16": 1e12,
        "bf16": 1e12,
    }  # with bf16 it has matrix units, which have a layout of their own
    return DeviceSpec("made", "made", 1 << 30, bandwidth, peaks, {"fp32": 1.0, "fp16": 1.0})


def convolution(kernel: int, stride: int = 1, channels: int = 1 << 20, side: int = 32) -> Shape:
    geometry = Convolution(kernel**2, stride, 1, channels, channels)
    operations = 2.0 * side**2 * channels**2 * kernel**2
    elements = side**2 * channels
    return Shape("c", Kind.CONVOLUTION, operations, elements, elements, 0, 0, 0, 0, True, convolution=geometry)


def seconds(shape: Shape, precision: str = "fp32", software: Software | None = None, **changes: float) -> float:
    used = software or Software("plain", "plain", 1.0, channels_last=True)
    return analytic_table([shape], device(**changes), precision, 1, used).units[0].forward


def direct(shape: Shape) -> float:
    return shape.operations / 1e12


@pytest.mark.parametrize(("kernel", "stride", "gain"), [(3, 1, 4.0), (1, 1, 1.0), (3, 2, 1.0), (1, 2, 1.0)])
def test_only_3x3_kernels_of_stride_one_save_products(kernel: int, stride: int, gain: float) -> None:
    shape = convolution(kernel, stride)
    assert seconds(shape) == pytest.approx(direct(shape) / gain, rel=0.01)


def test_large_kernels_run_as_fft_tiles() -> None:
    tiles = convolution(5, side=28)  # one tile of 28x28 outputs: 32x17 complex products of 4 for 28x28x25
    assert seconds(tiles) == pytest.approx(direct(tiles) * 32 * 17 * 4 / (28 * 28 * 25), rel=0.01)


def test_half_precision_does_not_use_winograd() -> None:
    assert seconds(convolution(3), "fp16") == pytest.approx(direct(convolution(3)), rel=0.01)


def test_winograd_does_not_pay_where_memory_is_slow() -> None:
    narrow = convolution(3, channels=64)
    slow = seconds(narrow, bandwidth=1e8)
    traffic = 2 * narrow.inputs * 4 / (1e8 * 0.8)
    assert slow == pytest.approx(traffic, rel=0.05)


def test_channels_first_costs_a_memory_layout_change_in_half_precision() -> None:
    shape = convolution(1, channels=64)
    plain = seconds(shape, "fp16", bandwidth=1e9)
    turned = seconds(shape, "fp16", Software("old", "old", 1.0), bandwidth=1e9)
    assert turned - plain == pytest.approx(2 * 2 * shape.inputs * 2 / 0.8e9, rel=0.05)


def test_relu_is_free_in_fused_software() -> None:
    norm = Shape("n", Kind.NORM, 0, 100, 100, 0, 0, 0, 0, True)
    relu = Shape("r", Kind.POINTWISE, 0, 100, 100, 0, 0, 0, 0, True)
    fused = Software("fused", "fused", 1.0, fused=True)
    units = analytic_table([norm, relu, relu, norm], device(1e3), "fp32", 1, fused).units
    assert [unit.forward > 0 for unit in units] == [True, False, False, True]


def test_the_time_of_units_without_products_is_their_memory_traffic() -> None:
    both, rate = 200 * 4, 0.8e3
    times = {
        kind: analytic_table([Shape("n", kind, 0, 100, 100, 0, 0, 0, 0, True)], device(1e3), "fp32", 1, PLAIN).units[0]
        for kind in (Kind.NORM, Kind.POINTWISE, Kind.POOL, Kind.VIEW)
    }
    # normalisation reads twice and writes once; backward reads two tensors twice and writes one
    assert times[Kind.NORM].forward == pytest.approx(1.5 * both / rate, rel=1e-3)
    assert times[Kind.NORM].backward == pytest.approx(2.5 * both / rate, rel=1e-3)
    assert times[Kind.POINTWISE].forward == pytest.approx(both / rate, rel=1e-3)
    assert times[Kind.POOL].forward == pytest.approx((both + 100 * 8) / rate, rel=1e-3)
    assert times[Kind.VIEW].forward == 0.0


def unit_of(shape: Shape, precision: str = "fp32", software: Software = PLAIN) -> Unit:
    return analytic_table([shape], device(1e3), precision, 1, software).units[0]


def test_a_sum_passes_its_gradient_on_and_a_factor_needs_a_product_of_its_own() -> None:
    moved = 4 / 0.8e3  # seconds of an element
    total = unit_of(Shape("s", Kind.POINTWISE, 0, 200, 100, 0, 0, 0, 0, True))
    assert total.forward == pytest.approx(300 * moved, rel=1e-3)
    assert total.backward == pytest.approx(300 * moved, rel=1e-3)  # two gradients are read and their sum written
    factor = unit_of(Shape("f", Kind.SCALE, 0, 100, 100, 0, 0, 0, 0, True))
    # the activation's gradient 2, the product with it 3, its sum 1; where the branch began 3
    assert factor.backward == pytest.approx(900 * moved, rel=1e-3)


def test_a_bias_of_a_convolution_is_a_kernel_of_its_own() -> None:
    plain = replace(convolution(1, channels=64), parameters=64 * 64)
    biased = replace(plain, parameters=64 * 64 + 64)
    moved = plain.outputs * 4 / 0.8e3
    assert unit_of(biased).forward - unit_of(plain).forward == pytest.approx(2 * moved, rel=1e-3)
    assert unit_of(biased).backward - unit_of(plain).backward == pytest.approx(moved, rel=1e-3)


def test_autocast_costs_what_pure_half_precision_does_not() -> None:
    norm = Shape("n", Kind.LAYER_NORM, 0, 100, 100, 0, 0, 0, 0, True)
    pure = Software("pure", "pure", 1.0, pure_half=True)
    assert unit_of(norm, "fp16").forward == pytest.approx(3 * unit_of(norm, "fp16", pure).forward, rel=1e-3)
    assert unit_of(norm, "fp16", pure).forward == pytest.approx(unit_of(norm).forward / 2, rel=1e-3)
    attention = Shape("a", Kind.ATTENTION, 1.0, 300, 100, 0, 0, 0, 0, True, scores=100)
    halves = unit_of(attention, "fp16", pure).forward
    assert (
        halves == pytest.approx(unit_of(attention).forward / 2, rel=1e-3)
        and halves < unit_of(attention, "fp16").forward
    )


def test_written_scores_mean_copied_heads() -> None:
    whole = Shape("a", Kind.ATTENTION, 1.0, 300, 100, 0, 0, 0, 0, True, scores=100)
    moved = 4 / 0.8e3
    # heads are copied apart and together; scores are written, scaled, normalised and read
    assert unit_of(whole).forward == pytest.approx((3 * 400 + 6 * 100) * moved, rel=1e-3)
    assert unit_of(replace(whole, scores=0)).forward == pytest.approx(400 * moved, rel=1e-3)


def test_grouped_convolutions_have_a_share_of_their_own_without_matrix_units() -> None:
    geometry = Convolution(9, 1, 32, 128, 128)
    shape = Shape("g", Kind.CONVOLUTION, 1e9, 128, 128, 0, 0, 0, 0, True, convolution=geometry)
    slow = replace(device(), family=Family(grouped=0.1))
    plain, halves = (analytic_table([shape], slow, precision, 1, PLAIN).units[0] for precision in ("fp32", "fp16"))
    assert plain.forward == pytest.approx(2 * halves.forward, rel=0.01)


def test_half_the_efficiency_takes_twice_as_long() -> None:
    fast = analytic_table(
        trace_model("resnet50").shapes, shipped().device("titan-v"), "fp32", 8, Software("a", "a", 1.0)
    )
    slow = analytic_table(
        trace_model("resnet50").shapes, shipped().device("titan-v"), "fp32", 8, Software("b", "b", 0.5)
    )
    assert math.isclose(slow.seconds, 2 * fast.seconds)


def test_a_frozen_trunk_has_no_backward() -> None:
    whole, frozen = (trace_model("resnet8", frozen=patterns).shapes for patterns in (None, "!fc"))
    assert sum(shape.frozen for shape in frozen) + sum(shape.parameters for shape in frozen) == sum(
        shape.parameters for shape in whole
    )
    device, software = shipped().devices["rtx-3090"], shipped().software["stagewright"]
    before, after = (analytic_table(shapes, device, "fp32", 8, software) for shapes in (whole, frozen))
    assert [unit.forward for unit in after.units[:-1]] == [unit.forward for unit in before.units[:-1]]
    *trunk, head = after.units
    assert {unit.backward for unit in trunk} == {0.0} and head.backward > 0
    middle = analytic_table(trace_model("resnet8", frozen="layer2").shapes, device, "fp32", 8, software).units
    unit, plain = (next(u for u in units if u.name == "layer2.0.conv2") for units in (middle, before.units))
    assert 0 < unit.backward < plain.backward  # what the units before it need is computed still
