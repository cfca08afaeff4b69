"""Small variants of torchvision's and timm's image models."""

from __future__ import annotations

from typing import Any

from stagewright.model.networks.libraries import import_library


def library_model(module: str, name: str, classes: int = 10, **options: Any) -> Any:
    """What a function or a class of a library's module makes."""
    return getattr(import_library(module), name)(num_classes=classes, **options)


def timm_model(name: str, classes: int = 10, **options: Any) -> Any:
    """A model by its name in timm."""
    return import_library("timm").create_model(name, num_classes=classes, **options)


def resnext(classes: int = 10) -> Any:
    block = import_library("torchvision.models.resnet").Bottleneck
    options = {"groups": 8, "width_per_group": 8, "zero_init_residual": True}
    return library_model("torchvision.models", "ResNet", classes, block=block, layers=[1, 1, 1, 1], **options)


def convnext(classes: int = 10) -> Any:
    convnext = import_library("torchvision.models.convnext")
    widths = (16, 32, 48, 64)
    blocks = [convnext.CNBlockConfig(width, wider, 2) for width, wider in zip(widths, (*widths[1:], None), strict=True)]
    return convnext.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=classes)


def swin(version: int, classes: int = 10) -> Any:
    module = import_library("torchvision.models.swin_transformer")
    second = {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    return module.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.1,
        num_classes=classes,
        **(second if version == 2 else {}),
    )


def video_resnet(classes: int = 10) -> Any:
    resnet = import_library("torchvision.models.video.resnet")
    blocks = [resnet.Conv3DSimple] * 4
    return resnet.VideoResNet(resnet.BasicBlock, blocks, [1, 1, 1, 1], resnet.BasicStem, num_classes=classes)


def mixer(block: str, classes: int = 10) -> Any:
    module = import_library("timm.models.mlp_mixer")
    return module.MlpMixer(
        img_size=32,
        patch_size=8,
        num_blocks=4,
        embed_dim=48,
        mlp_ratio=(0.5, 2.0) if block == "MixerBlock" else 2.0,
        block_layer=getattr(module, block),
        mlp_layer=module.GatedMlp if block == "SpatialGatingBlock" else module.Mlp,
        num_classes=classes,
    )
