"""The zoo's models are torchvision's by name, shape, count, structure and first weights."""

import math

import pytest
import torch
from torch import Tensor, fx, nn

from stagewright.model import zoo

PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet8": 78_042,
    "resnet20": 272_474,
    "resnet18-small": 11_173_962,
    "vgg16-small": 15_253_578,
    "vgg-small": 8_506_442,
}

ENTRIES = {
    "alexnet": {
        "features.0.weight": (64, 3, 11, 11),
        "features.3.weight": (192, 64, 5, 5),
        "features.6.weight": (384, 192, 3, 3),
        "features.10.bias": (256,),
        "classifier.1.weight": (4096, 9216),
        "classifier.4.weight": (4096, 4096),
        "classifier.6.bias": (1000,),
    },
    "vgg16": {
        "features.0.weight": (64, 3, 3, 3),
        "features.28.weight": (512, 512, 3, 3),
        "classifier.0.weight": (4096, 25088),
        "classifier.3.bias": (4096,),
        "classifier.6.bias": (1000,),
    },
    "vgg11_bn": {
        "features.0.bias": (64,),
        "features.1.running_mean": (64,),
        "features.1.num_batches_tracked": (),
        "features.25.weight": (512, 512, 3, 3),
        "features.26.weight": (512,),
        "classifier.6.weight": (1000, 4096),
    },
    "resnet18": {
        "conv1.weight": (64, 3, 7, 7),
        "layer1.1.conv2.weight": (64, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer4.0.downsample.1.num_batches_tracked": (),
        "fc.weight": (1000, 512),
    },
    "resnet50": {
        "bn1.num_batches_tracked": (),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.bias": (256,),
        "layer3.5.conv2.weight": (256, 256, 3, 3),
        "layer3.5.bn3.running_var": (1024,),
        "fc.bias": (1000,),
    },
}

# Convolutions of ResNet-18 as (name, inputs, outputs, kernel), in the order in which their weights are drawn.
RESNET18_CONVOLUTIONS = [
    ("conv1", 3, 64, 7),
    ("layer1.0.conv1", 64, 64, 3),
    ("layer1.0.conv2", 64, 64, 3),
    ("layer1.1.conv1", 64, 64, 3),
    ("layer1.1.conv2", 64, 64, 3),
    ("layer2.0.conv1", 64, 128, 3),
    ("layer2.0.conv2", 128, 128, 3),
    ("layer2.0.downsample.0", 64, 128, 1),
    ("layer2.1.conv1", 128, 128, 3),
    ("layer2.1.conv2", 128, 128, 3),
    ("layer3.0.conv1", 128, 256, 3),
    ("layer3.0.conv2", 256, 256, 3),
    ("layer3.0.downsample.0", 128, 256, 1),
    ("layer3.1.conv1", 256, 256, 3),
    ("layer3.1.conv2", 256, 256, 3),
    ("layer4.0.conv1", 256, 512, 3),
    ("layer4.0.conv2", 512, 512, 3),
    ("layer4.0.downsample.0", 256, 512, 1),
    ("layer4.1.conv1", 512, 512, 3),
    ("layer4.1.conv2", 512, 512, 3),
]


def on_meta(name: str, classes: int | None = None) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name, classes)


def drawn(name: str, classes: int, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return zoo.build(name, classes).state_dict()


def calls(model: nn.Module) -> list[fx.Node]:
    return [node for node in fx.symbolic_trace(model).graph.nodes if node.op.startswith("call_")]


def he_normal(*shape: int) -> Tensor:
    """A convolution's weight drawn with variance 2 / (outputs * kernel area)."""
    outputs, _, height, width = shape
    return torch.empty(shape).normal_(0, math.sqrt(2) / math.sqrt(outputs * height * width))


def test_every_model_of_the_zoo_has_a_parameter_count_here() -> None:
    assert set(zoo.ZOO) == set(PARAMETERS)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_has_the_published_parameter_count(name: str, count: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(name).parameters()) == count


@pytest.mark.parametrize(("name", "entries"), ENTRIES.items())
def test_state_has_the_well_known_names_and_shapes(name: str, entries: dict[str, tuple[int, ...]]) -> None:
    state = on_meta(name).state_dict()
    assert {key: tuple(state[key].shape) for key in entries} == entries


@pytest.mark.parametrize(
    ("name", "tensors"),
    # A convolution or linear layer with bias holds 2 tensors, without bias 1, a BatchNorm 5.
    {
        "alexnet": 8 * 2,
        "vgg16": 16 * 2,
        "vgg16_bn": 16 * 2 + 13 * 5,
        "resnet18": 20 + 20 * 5 + 2,
        "resnet50": 53 + 53 * 5 + 2,
    }.items(),
)
def test_state_has_no_other_entries(name: str, tensors: int) -> None:
    assert len(on_meta(name).state_dict()) == tensors


def test_a_shortcut_is_a_projection_only_where_the_shape_changes() -> None:
    projected = {key.partition(".downsample")[0] for key in on_meta("resnet50").state_dict() if "downsample" in key}
    assert projected == {"layer1.0", "layer2.0", "layer3.0", "layer4.0"}
    assert not any(key.startswith("layer1.0.downsample") for key in on_meta("resnet18").state_dict())


def test_a_bottleneck_lists_its_layers_with_the_projection_last() -> None:
    block = on_meta("resnet50").get_submodule("layer1.0")
    layers = [name.removesuffix(".weight") for name in block.state_dict() if name.endswith(".weight")]
    assert layers == ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample.0", "downsample.1"]


@pytest.mark.parametrize(
    ("name", "count"),
    {"alexnet": 22, "vgg16": 40, "vgg16_bn": 53, "vgg19": 46, "resnet18": 69, "resnet50": 175, "vgg-small": 18}.items(),
)
def test_the_trace_has_the_known_number_of_calls(name: str, count: int) -> None:
    assert len(calls(on_meta(name))) == count


def test_vgg16_pools_where_eleven_to_seven_cuts() -> None:
    nodes = [str(node.target) for node in calls(on_meta("vgg16"))]
    assert nodes[: 40 * 11 // 18] == [f"features.{index}" for index in range(24)]
    assert isinstance(on_meta("vgg16").get_submodule("features.23"), nn.MaxPool2d)
    assert nodes[24:31] == [f"features.{index}" for index in range(24, 31)]
    assert nodes[31] == "avgpool"
    assert nodes[33:] == [f"classifier.{index}" for index in range(7)]


def test_dropout_comes_before_a_layer_in_alexnet_and_after_its_relu_in_vgg() -> None:
    kinds = {
        name: [type(layer).__name__ for layer in on_meta(name).get_submodule("classifier").children()]
        for name in ("alexnet", "vgg16")
    }
    assert kinds == {
        "alexnet": ["Dropout", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Linear"],
        "vgg16": ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"],
    }


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_relu_works_in_place(name: str) -> None:
    assert all(layer.inplace for layer in on_meta(name).modules() if isinstance(layer, nn.ReLU))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_default_image_gives_the_default_number_of_classes(name: str) -> None:
    side, classes = (32, 10) if "small" in name or name in ("resnet8", "resnet20") else (224, 1000)
    assert (zoo.ZOO[name].image, zoo.ZOO[name].classes) == (side, classes)
    assert on_meta(name)(torch.empty(2, 3, side, side, device="meta")).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("alexnet", 63),
        ("alexnet", 300),
        ("vgg11", 32),
        ("vgg16_bn", 97),
        ("resnet18", 32),
        ("resnet50", 193),
        ("vgg-small", 57),
    ],
)
def test_accepts_other_image_sizes_and_numbers_of_classes(name: str, side: int) -> None:
    assert on_meta(name, 7)(torch.empty(2, 3, side, side + 5, device="meta")).shape == (2, 7)


def test_feature_maps_have_the_known_resolutions() -> None:
    images = torch.empty(1, 3, 224, 224, device="meta")
    sides = {name: on_meta(name).get_submodule("features")(images).shape[-1] for name in ("alexnet", "vgg16")}
    assert sides == {"alexnet": 6, "vgg16": 7}
    resnet = on_meta("resnet50")
    for name, side in {"conv1": 112, "maxpool": 56, "layer1": 56, "layer2": 28, "layer3": 14, "layer4": 7}.items():
        images = resnet.get_submodule(name)(images)
        assert images.shape[-1] == side, name


def test_a_bottleneck_strides_in_its_3x3_convolution() -> None:
    strided = {
        name: layer.kernel_size
        for name, layer in on_meta("resnet50").named_modules()
        if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2)
    }
    assert strided == {
        "conv1": (7, 7),
        **{f"layer{index}.0.conv2": (3, 3) for index in (2, 3, 4)},
        **{f"layer{index}.0.downsample.0": (1, 1) for index in (2, 3, 4)},
    }


def test_a_residual_block_adds_its_input() -> None:
    block = zoo.BasicBlock(8, 8, stride=1).eval()
    nn.init.zeros_(block.bn2.weight)
    images = torch.randn(2, 8, 5, 5)
    assert torch.equal(block(images), images.relu())


def test_vgg_weights_have_the_published_initial_variance() -> None:
    state = drawn("vgg11", 10)
    for name, outputs in {"features.3.weight": 128, "features.8.weight": 256, "features.18.weight": 512}.items():
        assert state[name].std().item() == pytest.approx(math.sqrt(2 / (outputs * 9)), rel=0.02)
    for name in ("classifier.0.weight", "classifier.3.weight", "classifier.6.weight"):
        assert state[name].std().item() == pytest.approx(0.01, rel=0.02)
    assert not any(tensor.any() for name, tensor in state.items() if name.endswith("bias"))


def test_resnet_weights_have_the_published_initial_variance() -> None:
    state = drawn("resnet18", 10)
    assert state["layer3.0.downsample.0.weight"].std().item() == pytest.approx(math.sqrt(2 / 256), rel=0.02)
    assert state["layer4.1.conv2.weight"].std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.02)
    assert state["fc.weight"].std().item() == pytest.approx(1 / math.sqrt(3 * 512), rel=0.05)
    assert state["fc.bias"].any()
    norms = [name.removesuffix(".running_var") for name in state if name.endswith(".running_var")]
    assert len(norms) == 20
    assert all(state[f"{norm}.weight"].eq(1).all() and not state[f"{norm}.bias"].any() for norm in norms)


def test_resnet18_draws_default_layers_then_the_classifier_then_its_convolutions() -> None:
    state = drawn("resnet18", 10, seed=5)
    torch.manual_seed(5)
    for _, inputs, outputs, kernel in RESNET18_CONVOLUTIONS:
        nn.Conv2d(inputs, outputs, kernel, bias=False)
    classifier = nn.Linear(512, 10)
    assert torch.equal(state["fc.weight"], classifier.weight)
    assert torch.equal(state["fc.bias"], classifier.bias)
    for name, inputs, outputs, kernel in RESNET18_CONVOLUTIONS:
        assert torch.equal(state[f"{name}.weight"], he_normal(outputs, inputs, kernel, kernel))


def test_vgg_draws_default_layers_and_then_every_weight_again_in_order() -> None:
    state = drawn("vgg-small", 10, seed=5)
    torch.manual_seed(5)
    for inputs, outputs in [(3, 32), (32, 64), (64, 128)]:
        nn.Conv2d(inputs, outputs, 3)
    for inputs, outputs in [(2048, 2048), (2048, 2048), (2048, 10)]:
        nn.Linear(inputs, outputs)
    for name, shape in {"0": (32, 3, 3, 3), "3": (64, 32, 3, 3), "6": (128, 64, 3, 3)}.items():
        assert torch.equal(state[f"features.{name}.weight"], he_normal(*shape))
    for name, outputs in {"0": 2048, "3": 2048, "6": 10}.items():
        assert torch.equal(state[f"classifier.{name}.weight"], torch.empty(outputs, 2048).normal_(0, 0.01))


def test_alexnet_keeps_the_default_weights_of_its_layers() -> None:
    state = drawn("alexnet", 10, seed=5)
    torch.manual_seed(5)
    layers = {
        "features.0": nn.Conv2d(3, 64, 11),
        "features.3": nn.Conv2d(64, 192, 5),
        "features.6": nn.Conv2d(192, 384, 3),
        "features.8": nn.Conv2d(384, 256, 3),
        "features.10": nn.Conv2d(256, 256, 3),
        "classifier.1": nn.Linear(9216, 4096),
        "classifier.4": nn.Linear(4096, 4096),
        "classifier.6": nn.Linear(4096, 10),
    }
    for name, layer in layers.items():
        for kind, tensor in layer.state_dict().items():
            assert torch.equal(state[f"{name}.{kind}"], tensor)


def test_the_seed_determines_every_weight() -> None:
    first, again, other = drawn("vgg-small", 10, seed=1), drawn("vgg-small", 10, seed=1), drawn("vgg-small", 10, seed=2)
    weights = [name for name in first if name.endswith("weight")]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in weights)


def test_the_pool_of_vgg_small_is_the_identity_at_the_default_size() -> None:
    model = zoo.build("vgg-small").eval()
    features = model.get_submodule("features")(torch.randn(2, 3, 32, 32))
    assert features.shape == (2, 128, 4, 4)
    assert torch.equal(model.get_submodule("avgpool")(features), features)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("vgg61", "did you mean 'vgg19'?"), ("ResNet-50", "did you mean 'resnet50'?"), ("bert", ", ".join(zoo.ZOO))],
)
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown model '{name}'") as caught:
        zoo.build(name)
    assert hint in str(caught.value) and "package.module:factory" in str(caught.value)
