"""The zoo's models are torchvision's by name, shape, count, structure and first weights."""

import math
import re

import pytest
import torch
from torch import Tensor, fx, nn

from stagewright.model.chain import Chain, Way
from stagewright.model.networks import zoo
from stagewright.model.networks.convnext import StochasticDepth
from stagewright.model.networks.language import BERT, GPT
from stagewright.model.networks.libraries import import_library, is_installed
from stagewright.planning.traced import chain_of
from tests.marks import daily

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
    "mobilenet_v2": 3_504_872,
    "convnext_tiny": 28_589_128,
    "vit_b_16": 86_567_656,
    "vit_tiny_16": 5_717_416,
    "resnet8": 78_042,
    "resnet20": 272_474,
    "resnet18-small": 11_173_962,
    "vgg16-small": 15_253_578,
    "vgg-small": 8_506_442,
    "vit-tiny": 5_362_762,
    "gpt2": 124_439_808,
    "gpt-mini": 2_767_872,
    "gpt-micro": 366_432,
    "bert-base": 109_482_242,
    "bert-mini": 875_650,
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
    "mobilenet_v2": {
        "features.0.0.weight": (32, 3, 3, 3),
        "features.1.conv.0.0.weight": (32, 1, 3, 3),
        "features.1.conv.1.weight": (16, 32, 1, 1),
        "features.2.conv.1.1.running_var": (96,),
        "features.17.conv.3.bias": (320,),
        "features.18.0.weight": (1280, 320, 1, 1),
        "classifier.1.weight": (1000, 1280),
    },
    "convnext_tiny": {
        "features.0.1.weight": (96,),
        "features.1.0.layer_scale": (96, 1, 1),
        "features.1.2.block.0.weight": (96, 1, 7, 7),
        "features.5.8.block.3.weight": (1536, 384),
        "features.6.0.bias": (384,),
        "features.6.1.weight": (768, 384, 2, 2),
        "classifier.0.weight": (768,),
        "classifier.2.bias": (1000,),
    },
    "vit_b_16": {
        "class_token": (1, 1, 768),
        "conv_proj.weight": (768, 3, 16, 16),
        "encoder.pos_embedding": (1, 197, 768),
        "encoder.layers.encoder_layer_0.ln_1.weight": (768,),
        "encoder.layers.encoder_layer_11.self_attention.in_proj_weight": (2304, 768),
        "encoder.layers.encoder_layer_11.self_attention.out_proj.bias": (768,),
        "encoder.layers.encoder_layer_11.mlp.3.weight": (768, 3072),
        "encoder.ln.bias": (768,),
        "heads.head.weight": (1000, 768),
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
        "mobilenet_v2": 52 + 52 * 5 + 2,
        # A LayerNorm holds 2, a block of ConvNeXt 9, one of the vision transformer 12.
        "convnext_tiny": 4 + 18 * 9 + 3 * 4 + 4,
        "vit_b_16": 2 + 1 + 1 + 12 * 12 + 2 + 2,
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
    {
        "alexnet": 22,
        "vgg16": 40,
        "vgg16_bn": 53,
        "vgg19": 46,
        "resnet18": 69,
        "resnet50": 175,
        "vgg-small": 18,
        "mobilenet_v2": 3 + (17 * 3 + 16 * 3 + 17 * 2 + 10) + 3 + 4,
        "vit_b_16": 8 + 12 * 12 + 3,
    }.items(),
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


@pytest.mark.parametrize("name", [name for name in PARAMETERS if zoo.ZOO[name].tokens is not None])
def test_a_model_of_text_takes_as_many_tokens_as_it_says_and_no_more(name: str) -> None:
    entry, model = zoo.ZOO[name], on_meta(name)
    assert entry.tokens is not None
    tokens = torch.zeros(2, entry.tokens, dtype=torch.int64, device="meta")
    shape = (2, entry.tokens, entry.classes) if name.startswith("gpt") else (2, entry.classes)
    assert model(tokens).shape == shape
    with pytest.raises(ValueError, match=f"a sample has {entry.tokens + 1} tokens but the model takes at most"):
        model(torch.zeros(2, entry.tokens + 1, dtype=torch.int64, device="meta"))


def test_equals_transformers_gpt2() -> None:
    """With its weights, ours computes what it does; its linear layers are stored transposed."""
    if not is_installed("transformers"):
        pytest.skip("transformers is not installed")
    transformers = import_library("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=3, n_head=4, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    theirs, ours = transformers.GPT2LMHeadModel(config).double().eval(), GPT(16, 3, 4, 32, 50).double()
    linear = re.compile(r"c_(attn|proj|fc)\.weight$")
    state = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict({name: tensor.T if linear.search(name) else tensor for name, tensor in state.items()})
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-12)


def test_bert_does_not_read_what_its_mask_hides() -> None:
    torch.manual_seed(0)
    model = BERT(20, 8, 2, 2, 8, 3).double()
    tokens = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    other = tokens.clone()
    other[0, 4:] = 0
    assert torch.allclose(model(tokens, mask), model(other, mask), rtol=0, atol=1e-12)
    assert not torch.allclose(model(tokens), model(other))
    assert torch.allclose(model(tokens[:1, :4]), model(tokens, mask)[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if zoo.ZOO[name].tokens is None])
def test_the_default_image_gives_the_default_number_of_classes(name: str) -> None:
    side, classes = (32, 10) if "small" in name or name in ("resnet8", "resnet20", "vit-tiny") else (224, 1000)
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
        ("mobilenet_v2", 32),
        ("convnext_tiny", 70),
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


def test_vit_and_convnext_weights_have_the_published_initial_values() -> None:
    vit = drawn("vit_tiny_16", 10)
    assert not any(
        vit[name].any() for name in ("class_token", "conv_proj.bias", "heads.head.weight", "heads.head.bias")
    )
    assert vit["encoder.pos_embedding"].std().item() == pytest.approx(0.02, rel=0.02)
    assert vit["conv_proj.weight"].std().item() == pytest.approx(math.sqrt(1 / (3 * 16 * 16)), rel=0.02)
    mlp = "encoder.layers.encoder_layer_5.mlp.0"
    assert vit[f"{mlp}.weight"].abs().max().item() == pytest.approx(math.sqrt(6 / (192 + 768)), rel=0.01)
    assert 0 < vit[f"{mlp}.bias"].abs().max() < 1e-5
    convnext = drawn("convnext_tiny", 10)
    assert convnext["features.5.0.block.3.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert convnext["features.5.0.layer_scale"].unique().tolist() == pytest.approx([1e-6])
    assert not convnext["features.5.0.block.0.bias"].any()


def test_a_vision_transformer_loads_the_names_of_published_files() -> None:
    model = zoo.build("vit-tiny")
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    renamed = {name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): state[name] for name in state}
    assert renamed.keys() != state.keys()
    model.load_state_dict(renamed)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_stochastic_depth_drops_whole_samples_in_training_alone() -> None:
    layer = StochasticDepth(0.25)
    images = torch.ones(400, 2, 3, 3)
    torch.manual_seed(0)
    scales = layer(images)[:, 0, 0, 0]
    assert torch.equal(layer.eval()(images), images)
    assert scales.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert scales.eq(0).double().mean().item() == pytest.approx(0.25, abs=0.06)
    torch.manual_seed(0)
    assert torch.equal(layer.train()(images), scales.reshape(-1, 1, 1, 1).expand_as(images))


def test_stochastic_depth_rises_from_nothing_to_a_tenth() -> None:
    drops = [layer.probability for layer in on_meta("convnext_tiny").modules() if isinstance(layer, StochasticDepth)]
    assert drops == pytest.approx([0.1 * index / 17 for index in range(18)])


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
    [
        ("vgg61", "did you mean 'vgg16'?"),
        ("ResNet-50", "did you mean 'resnet50'?"),
        ("llama", ", ".join(list(zoo.ZOO)[:15])),
    ],
)
def test_an_unknown_name_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown model '{name}'") as caught:
        zoo.build(name)
    assert hint in str(caught.value) and "package.module:factory" in str(caught.value)


SHAPE = {"image_size": 32, "patch_size": 4, "num_layers": 12, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
THEIRS = {"resnet18": {}, "mobilenet_v2": {}, "convnext_tiny": {}, "vit-tiny": SHAPE}


@pytest.mark.parametrize("name", THEIRS)
def test_equals_torchvisions_model(name: str) -> None:
    if not is_installed("torchvision"):
        pytest.skip("torchvision is not installed")
    their_models = import_library("torchvision.models")
    factory = their_models.VisionTransformer if name == "vit-tiny" else getattr(their_models, name)
    torch.manual_seed(3)
    ours = zoo.build(name, 10)
    torch.manual_seed(3)
    theirs = factory(num_classes=10, **THEIRS[name])
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items())
    moved = {key: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t for key, t in state.items()}
    for model in (ours, theirs):
        model.load_state_dict(moved)
    images = torch.randn(2, 3, 32, 32)
    for training in (True, False):
        torch.manual_seed(4)
        expected = theirs.train(training)(images)
        torch.manual_seed(4)
        assert torch.equal(ours.train(training)(images), expected) and expected.any()


@pytest.mark.parametrize("name", daily(zoo.ZOO, 8))
def test_our_models_run_the_same_for_every_batch(name: str) -> None:
    """What `Chain` takes for granted where one of them stays whole."""
    traced = chain_of(name)
    assert not traced.is_conditional and not traced.draws and not traced.leaks
    whole = Chain(traced.model, traced.example, way=Way.WHOLE, is_plain=True)
    assert (whole.is_conditional, whole.draws, whole.way) == (False, frozenset(), Way.WHOLE) and whole.trace is None
