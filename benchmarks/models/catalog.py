"""Every model by which cutting is tried, each in a variant small enough for a CPU.

A name here is a factory for `--model benchmarks.models.catalog:NAME` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.models import configured, images, own
from benchmarks.models.configured import CLASSES
from benchmarks.models.objectives import OBJECTIVES
from benchmarks.models.plain import Objective, classified
from stagewright.model.networks.libraries import is_installed

# torch.distributed.pipelining is tried on these as well.
_COMPARED = (
    *("torchvision_resnet18", "torchvision_densenet", "torchvision_vit", "torchvision_swin"),
    *("timm_test_efficientnet", "torch_transformer_encoder", "torch_unet", "torch_vq"),
    *("transformers_bert", "transformers_gpt2"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One model: the library it comes from, how it is made, the samples it takes, and its loss."""

    name: str
    family: str
    library: str  # empty: torch alone
    factory: Callable[..., nn.Module]
    sample: tuple[int, ...] = ()  # the shape of its only input
    tokens: int = 0  # samples are whole numbers below this one; 0: they are real numbers
    is_quick: bool = False  # one of the dozen that every test run tries
    samples: configured.Samples | None = None  # makes samples of several fields
    inputs: str = ""  # which of them the model takes, as --inputs says it
    loss: str = "auto"

    @property
    def is_compared(self) -> bool:
        """Whether torch.distributed.pipelining is tried on it as well."""
        return self.name in _COMPARED

    @property
    def is_installed(self) -> bool:
        return is_installed(self.library)

    @property
    def takes(self) -> dict[str, str]:
        """The field of each of forward's parameters that gets one; empty: the only input."""
        pairs = [part.partition("=") for part in self.inputs.split(",") if part]
        return {parameter: field or parameter for parameter, _, field in pairs}

    @property
    def objective(self) -> Objective:
        """The loss in plain PyTorch."""
        return OBJECTIVES[self.loss] if self.samples else classified

    def fields(self, samples: int, generator: Generator) -> dict[str, Tensor]:
        """Random samples: each field [samples, ...]."""
        if self.samples is not None:
            return self.samples(samples, generator)
        shape = (samples, *self.sample)
        if self.tokens:
            inputs = torch.randint(1, self.tokens, shape, generator=generator)
        else:
            inputs = torch.randn(shape, generator=generator)
        return {"images": inputs, "labels": torch.randint(CLASSES, (samples,), generator=generator)}


def _image(
    library: str,
    name: str,
    side: int = 32,
    factory: Callable[..., nn.Module] | None = None,
    *,
    made_by: str = "",
    is_quick: bool = False,
    **options: Any,
) -> Entry:
    """A model of images by its name in a library, by the class of torchvision that makes it, or by another factory."""
    by_name = partial(images.library_model, "torchvision.models", made_by or name)
    if library == "timm":
        by_name = partial(images.timm_model, name)
    factory = factory or partial(by_name, **options)
    return Entry(f"{library}_{name}", name, library, factory, (3, side, side), is_quick=is_quick)


_torchvision, _timm = (partial(_image, library) for library in ("torchvision", "timm"))


def _text(family: str, factory: Callable[..., nn.Module], *, is_quick: bool = False) -> Entry:
    return Entry(f"torch_{family}", family, "", factory, (12,), tokens=configured.VOCABULARY, is_quick=is_quick)


def _hugging_face(family: str) -> Entry:
    """A model of transformers as it is."""
    made, task, options, samples, inputs, loss = configured.FAMILIES[family]
    name, is_quick = f"transformers_{family}", family in _QUICK
    factory = partial(configured.model, made, task, options)
    return Entry(name, family, "transformers", factory, is_quick=is_quick, samples=samples, inputs=inputs, loss=loss)


_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
_TV_VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_layers": 4, "num_heads": 3, "hidden_dim": 48}
_TV_VIT |= {"mlp_dim": 96, "dropout": 0.1}
_MAXVIT: dict[str, Any] = {"input_size": (64, 64), "stem_channels": 16, "partition_size": 4, "head_dim": 8}
_MAXVIT |= {"block_channels": [16, 32], "block_layers": [1, 1], "stochastic_depth_prob": 0.1}
_DENSENET: dict[str, Any] = {"growth_rate": 8, "block_config": (2, 2, 2, 2), "num_init_features": 16}
_SWIN: dict[str, Any] = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
_SEQUENCER: dict[str, Any] = {"img_size": 32, "layers": (1, 1, 1, 1)}
_SEQUENCER |= {"embed_dims": (16, 32, 32, 32), "hidden_sizes": (4, 8, 8, 8)}
_VGG: dict[str, Any] = {"cfg": [8, "M", 16, "M", 32, 32, "M", 48, 48, "M"], "mlp_ratio": 0.02}
_CONVMIXER: dict[str, Any] = {"dim": 32, "depth": 4, "patch_size": 4}
_MIXERS = {"mixer": "MixerBlock", "resmlp": "ResBlock", "gmlp": "SpatialGatingBlock"}
_QUICK = ("bert", "gpt2", "vit")  # of transformers
_SIDE_64 = (
    *("test_byobnet", "test_convnext2", "test_efficientnet_evos", "test_mambaout", "test_nfnet"),
    *("test_resnet", "efficientvit_b0", "edgenext_xx_small", "fastvit_t8", "mobilevit_xxs"),
    *("mobilevitv2_050", "inception_next_atto", "repvit_m0_9", "repghostnet_050", "ghostnet_050"),
    *("resnest14d", "rexnet_100", "skresnet18", "hrnet_w18_small", "dpn48b", "dla34", "regnetx_002"),
    *("tiny_vit_5m_224", "starnet_s1", "fasternet_t0", "mobilenetv4_conv_small_035", "lambda_resnet26t"),
    "hgnetv2_b0",
)

ENTRIES: tuple[Entry, ...] = (
    _torchvision("resnet18", is_quick=True),
    _torchvision("resnext", 32, images.resnext),
    _torchvision("densenet", made_by="DenseNet", is_quick=True, **_DENSENET),
    _torchvision("googlenet", aux_logits=False, init_weights=False),
    _torchvision("inception_v3", 75, aux_logits=False, init_weights=False),
    _torchvision("mnasnet0_5", 64),
    _torchvision("mobilenet_v2", 64, width_mult=0.25),
    _torchvision("mobilenet_v3_small", width_mult=0.5),
    _torchvision("shufflenet_v2_x0_5", 64, is_quick=True),
    _torchvision("squeezenet1_1"),
    _torchvision("efficientnet_b0", 64),
    _torchvision("regnet_y_400mf", 64),
    _torchvision("convnext", 32, images.convnext),
    _torchvision("vit", made_by="VisionTransformer", is_quick=True, **_TV_VIT),
    _torchvision("swin", 32, partial(images.swin, 1), is_quick=True),
    _torchvision("swin_v2", 32, partial(images.swin, 2)),
    _torchvision("maxvit", 64, made_by="MaxVit", **_MAXVIT),
    Entry("torchvision_video_resnet", "video_resnet", "torchvision", images.video_resnet, (3, 4, 16, 16)),
    _timm("vgg", 32, partial(images.library_model, "timm.models.vgg", "VGG", **_VGG)),
    *(_timm(name, 64) for name in _SIDE_64),
    _timm("test_efficientnet", 64, is_quick=True, drop_path_rate=0.1),
    _timm("test_vit3", 32, img_size=32, patch_size=8),
    _timm("vit_tiny_patch16_224", 32, **_VIT, drop_path_rate=0.1),
    _timm("beit_base_patch16_224", 32, is_quick=True, **_VIT),
    _timm("deit_tiny_distilled_patch16_224", 32, **_VIT),
    _timm("cait_xxs24_224", 32, **_VIT),
    _timm("eva02_tiny_patch14_224", 32, **_VIT),
    _timm("vit_relpos_base_patch16_224", 32, **_VIT),
    _timm("convit_tiny", 32, **(_VIT | {"embed_dim": 16, "local_up_to_layer": 2})),
    *(_timm(name, 32, partial(images.mixer, block)) for name, block in _MIXERS.items()),
    _timm("convmixer", 32, partial(images.library_model, "timm.models.convmixer", "ConvMixer", **_CONVMIXER)),
    _timm("swin_tiny_patch4_window7_224", 32, **_SWIN),
    _timm("swinv2_tiny_window8_256", 32, **_SWIN),
    _timm("pvt_v2_b0", 32),
    _timm("poolformer_s12", 32),
    _timm("xcit_nano_12_p16_224", 32, **(_VIT | {"num_heads": 4})),
    _timm("sequencer2d_s", 32, **_SEQUENCER),
    _text("transformer_encoder", own.TextTransformer, is_quick=True),
    _text("lstm", partial(own.Recurrent, nn.LSTM)),
    _text("gru", partial(own.Recurrent, nn.GRU)),
    _text("stacked_lstm", partial(own.StackedRecurrent, nn.LSTM), is_quick=True),
    _text("stacked_gru", partial(own.StackedRecurrent, nn.GRU)),
    Entry("torch_unet", "unet", "", own.UNet, (3, 32, 32), is_quick=True),
    Entry("torch_vq", "vq", "", own.VectorQuantized, (3, 32, 32), is_quick=True),
    *map(_hugging_face, configured.FAMILIES),
    Entry(
        "peft_bert_lora",
        "bert_lora",
        "peft",
        configured.adapted,
        samples=configured.padded,
        inputs="input_ids,attention_mask,labels",
        loss="model",
    ),
)


def __getattr__(name: str) -> Callable[..., nn.Module]:
    """The factory of an entry, so that `--model` can name it."""
    for entry in ENTRIES:
        if entry.name == name:
            return entry.factory
    raise AttributeError(f"module '{__name__}' has no model '{name}'")
