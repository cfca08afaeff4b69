"""The shapes of units equal arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagewright.model.chain import Chain
from stagewright.planning.traced import trace_model
from stagewright.profile.shapes import Kind, Shape
from stagewright.profile.trace import trace_shapes
from tests.models import residual


def by_name(shapes: tuple[Shape, ...]) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


def test_a_convolution_has_the_operations_and_elements_of_its_geometry() -> None:
    shape = by_name(trace_model("vgg16").shapes)["features.2"]  # 64 channels to 64, 3x3, on 224x224
    assert shape.kind is Kind.CONVOLUTION
    assert shape.operations == 2 * 224 * 224 * 64 * 64 * 9
    assert (shape.inputs, shape.outputs) == (64 * 224 * 224, 64 * 224 * 224)
    assert shape.parameters == 64 * 64 * 9 + 64
    assert shape.convolution is not None and (shape.convolution.kernel, shape.convolution.stride) == (9, 1)


@pytest.mark.parametrize(
    ("model", "billions", "parameters"),
    [
        ("alexnet", 1.428, 61_100_840),
        ("vgg16", 30.94, 138_357_544),
        ("resnet50", 8.178, 25_557_032),
        ("mobilenet_v2", 0.6015, 3_504_872),
        ("convnext_tiny", 8.911, 28_589_128),
        ("vit_b_16", 35.13, 86_567_656),
    ],
)
def test_models_have_their_known_operations_and_parameters(model: str, billions: float, parameters: int) -> None:
    shapes = trace_model(model).shapes
    assert sum(shape.operations for shape in shapes) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert sum(shape.parameters for shape in shapes) == parameters


def test_only_the_first_unit_has_no_input_gradient() -> None:
    shapes = trace_model("vgg16").shapes
    assert not shapes[0].input_gradient and all(shape.input_gradient for shape in shapes[1:])


def test_both_branches_of_a_residual_block_cross_a_cut_inside_it() -> None:
    shapes = by_name(trace_model("resnet50").shapes)
    side, inner, wide = 56 * 56, 64, 256
    assert shapes["layer1.1.conv1"].live == side * inner + side * wide
    assert shapes["layer1.0.relu"].live <= side * (inner + 64)
    block_end = next(shape for shape in trace_model("resnet50").shapes if shape.name.startswith("add"))
    assert block_end.live == side * wide


def test_an_attention_returns_and_sends_the_tensor_in_its_tuple() -> None:
    shapes = trace_model("vit_b_16").shapes
    index = next(index for index, shape in enumerate(shapes) if shape.name.endswith("encoder_layer_3.self_attention"))
    tokens, width = 197, 768
    assert shapes[index].kind is Kind.ATTENTION and shapes[index].outputs == tokens * width
    products = 4 * tokens * width**2 + 2 * tokens**2 * width  # queries, keys, values, output; scores, weighted values
    assert shapes[index].operations == 2 * products
    assert shapes[index].live == 2 * tokens * width  # beside the shortcut
    assert shapes[index + 1].live == tokens * width


def test_a_convolution_of_single_channels_has_few_operations() -> None:
    shape = by_name(trace_model("mobilenet_v2").shapes)["features.2.conv.1.0"]  # 96 channels, 3x3, 112x112 to 56x56
    assert shape.convolution is not None and shape.convolution.groups == shape.convolution.channels == 96
    assert shape.operations == 2 * 96 * 56 * 56 * 9


def test_a_norm_called_as_a_function_is_a_norm() -> None:
    shapes = by_name(trace_model("convnext_tiny").shapes)
    assert shapes["layer_norm"].kind is shapes["features.1.0.block.2"].kind is Kind.LAYER_NORM
    assert shapes["permute"].kind is Kind.VIEW


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.ReLU(inplace=True), nn.Linear(10, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_a_tensor_that_two_units_save_is_counted_once() -> None:
    with torch.device("meta"):
        shapes = trace_shapes(Chain(Inner(), torch.empty(2, 6)))
    # the first layer saves its input, ReLU its output, the second layer that same output
    assert [shape.saved for shape in shapes] == [6, 10, 0]
    assert [shape.operations for shape in shapes] == [2 * 6 * 10, 0, 2 * 10 * 4]


def test_a_model_outside_the_zoo_has_shapes() -> None:
    with torch.device("meta"):
        shapes = trace_shapes(Chain(residual(), torch.empty(2, 3, 8, 8)))
    assert len(shapes) > 3 and all(shape.live > 0 for shape in shapes)
