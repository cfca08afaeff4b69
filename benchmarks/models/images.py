"""Small variants of torchvision's and timm's image models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from stagewright.model.networks.libraries import import_library


def torchvision_model(name: str, options: Mapping[str, Any], classes: int = 10) -> nn.Module:
    """A model by the name of its function in torchvision.models."""
    model: nn.Module = getattr(import_library("torchvision.models"), name)(num_classes=classes, **options)
    return model


def timm_model(name: str, options: Mapping[str, Any], classes: int = 10) -> nn.Module:
    """A model by its name in timm."""
    model: nn.Module = import_library("timm").create_model(name, num_classes=classes, **options)
    return model


def resnext(classes: int = 10) -> nn.Module:
    resnet = import_library("torchvision.models.resnet")
    model: nn.Module = resnet.ResNet(
        resnet.Bottleneck, [1, 1, 1, 1], num_classes=classes, groups=8, width_per_group=8, zero_init_residual=True
    )
    return model


def convnext(classes: int = 10) -> nn.Module:
    convnext = import_library("torchvision.models.convnext")
    widths = (16, 32, 48, 64)
    blocks = [convnext.CNBlockConfig(width, wider, 2) for width, wider in zip(widths, (*widths[1:], None), strict=True)]
    model: nn.Module = convnext.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=classes)
    return model


def vision_transformer(classes: int = 10) -> nn.Module:
    model: nn.Module = import_library("torchvision.models").VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=4,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=96,
        dropout=0.1,
        num_classes=classes,
    )
    return model


def swin(version: int, classes: int = 10) -> nn.Module:
    module = import_library("torchvision.models.swin_transformer")
    second = {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    model: nn.Module = module.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.1,
        num_classes=classes,
        **(second if version == 2 else {}),
    )
    return model


def maxvit(classes: int = 10) -> nn.Module:
    model: nn.Module = import_library("torchvision.models").MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.1,
        num_classes=classes,
    )
    return model


def densenet(classes: int = 10) -> nn.Module:
    model: nn.Module = import_library("torchvision.models").DenseNet(8, (2, 2, 2, 2), 16, num_classes=classes)
    return model


def video_resnet(classes: int = 10) -> nn.Module:
    resnet = import_library("torchvision.models.video.resnet")
    model: nn.Module = resnet.VideoResNet(
        resnet.BasicBlock, [resnet.Conv3DSimple] * 4, [1, 1, 1, 1], resnet.BasicStem, num_classes=classes
    )
    return model


def vgg(classes: int = 10) -> nn.Module:
    cfg = [8, "M", 16, "M", 32, 32, "M", 48, 48, "M"]
    model: nn.Module = import_library("timm.models.vgg").VGG(cfg, num_classes=classes, mlp_ratio=0.02)
    return model


def mixer(block: str, classes: int = 10) -> nn.Module:
    module = import_library("timm.models.mlp_mixer")
    model: nn.Module = module.MlpMixer(
        img_size=32,
        patch_size=8,
        num_blocks=4,
        embed_dim=48,
        mlp_ratio=(0.5, 2.0) if block == "MixerBlock" else 2.0,
        block_layer=getattr(module, block),
        mlp_layer=module.GatedMlp if block == "SpatialGatingBlock" else module.Mlp,
        num_classes=classes,
    )
    return model


def convmixer(classes: int = 10) -> nn.Module:
    model: nn.Module = import_library("timm.models.convmixer").ConvMixer(32, 4, patch_size=4, num_classes=classes)
    return model
