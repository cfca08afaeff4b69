"""Which parameters move alike: patterns, decay and layers of the whole model; what matches nothing is one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stagewright.config.groups import Group, read_groups
from stagewright.config.sections import OptimizerConfig
from stagewright.errors import UserError
from stagewright.model.networks import zoo
from stagewright.run.groups import layers_after, resolve_groups
from tests import models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((2, 3))
        self.mix = nn.Linear(3, 3)


class Transformer(nn.Module):
    """What a ViT or a BERT holds, with a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(2, 3))
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight


class Stage(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.down = nn.Linear(3, 3)


def options(*groups: Any, **given: Any) -> OptimizerConfig:
    return OptimizerConfig(groups=read_groups(list(groups)), **given)


def by_name(found: tuple[Group, ...], setting: str) -> dict[str, float]:
    return {name: getattr(group, setting) for group in found for name in group.names}


def test_without_an_option_there_are_no_groups() -> None:
    assert resolve_groups(Transformer(), OptimizerConfig(lr=0.5, weight_decay=0.1)) == ()


def test_the_first_pattern_that_matches_decides_and_others_keep_the_options() -> None:
    made = options("*.bias:weight_decay=0", "second.*:lr=0.1", "third.*:lr=0.2,momentum=0.5", lr=0.4, weight_decay=0.3)
    found = resolve_groups(models.plain(), made)
    assert by_name(found, "lr") == {
        "first.weight": 0.4, "first.bias": 0.4, "second.weight": 0.1, "second.bias": 0.4,
        "third.weight": 0.2, "third.bias": 0.4, "head.weight": 0.4, "head.bias": 0.4,
    }  # fmt: skip
    assert {name for name, decay in by_name(found, "weight_decay").items() if not decay} == {
        f"{name}.bias" for name in ("first", "second", "third", "head")
    }
    assert by_name(found, "momentum")["third.weight"] == 0.5
    assert len(found) == 4, "parameters that move alike are one group"


def test_groups_have_trained_parameters_by_all_their_names() -> None:
    found = resolve_groups(Transformer(), options("embed.*:lr=0.5"))
    assert by_name(found, "lr")["head.weight"] == 0.5 != by_name(found, "lr")["head.bias"]
    assert not any(
        "second" in name for name in by_name(resolve_groups(models.frozen_middle(), options("*:lr=1")), "lr")
    )


def test_no_decay_is_about_biases_norms_and_single_dimensions_in_every_group() -> None:
    model = Transformer()
    model.scale = nn.Parameter(torch.ones(()))
    found = by_name(resolve_groups(model, options("blocks.*:weight_decay=0.2", weight_decay=0.1, no_decay=True)),
                    "weight_decay")  # fmt: skip
    kept = {"position": 0.1, "embed.weight": 0.1, "head.weight": 0.1}
    kept |= {f"blocks.{index}.mix.weight": 0.2 for index in range(3)}
    assert {name: decay for name, decay in found.items() if decay} == kept
    assert {"scale", "blocks.0.norm.weight", "head.bias", "norm.weight"} <= found.keys()


def test_layers_count_from_the_head_as_fine_tuning_scripts_do() -> None:
    """With L blocks the embedding has d ** (L + 1), block i d ** (L - i), and the head with its norm 1."""
    after = layers_after(Transformer())
    assert after["position"] == after["embed.weight"] == 4
    assert [after[f"blocks.{index}.mix.weight"] for index in range(3)] == [3, 2, 1]
    assert after["norm.weight"] == after["head.bias"] == 0
    found = by_name(resolve_groups(Transformer(), options("head.*:lr=0.8", lr=0.4, layer_decay=0.5)), "lr")
    assert found["embed.weight"] == found["head.weight"] == 0.4 * 0.5**4  # tied: by its first name
    assert (found["blocks.2.norm.bias"], found["head.bias"]) == (0.2, 0.8)


def test_blocks_of_stages_count_one_by_one_and_what_is_between_belongs_to_the_block_before() -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(3, 3))
    model.add_module("stages", nn.ModuleList([Stage(2), Stage(3)]))
    after = layers_after(model)
    assert after["stem.weight"] == 6 and after["stages.0.blocks.0.mix.bias"] == 5
    assert after["stages.0.blocks.1.mix.bias"] == after["stages.0.down.weight"] == 4
    assert after["stages.1.blocks.2.mix.bias"] == 1 and after["stages.1.down.weight"] == 0


def test_without_stem_or_head_the_first_and_the_last_block_are_the_ends() -> None:
    assert sorted(set(layers_after(nn.Sequential(Block(), Block(), Block())).values())) == [0, 1, 2]


def test_a_vit_and_a_resnet_have_the_layers_that_people_expect() -> None:
    with torch.device("meta"):
        vit, resnet = layers_after(zoo.build("vit_tiny_16", 10)), layers_after(zoo.build("resnet18", 10))
    assert (vit["class_token"], vit["conv_proj.weight"], vit["heads.head.weight"]) == (13, 13, 0)
    assert vit["encoder.layers.encoder_layer_11.ln_1.weight"] == 1
    assert (resnet["conv1.weight"], resnet["layer1.0.conv1.weight"], resnet["layer4.1.conv2.weight"]) == (9, 8, 1)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (models.plain, options("head:lr=1"), r"^--group head:lr=1: .*did you mean 'head\.\*'\?"),
        (models.plain, options("haed.weight:lr=1"), r"^--group haed.*did you mean 'head\.weight'\?"),
        (models.plain, options("*:lr=1", "head.*:lr=2"), r"^--group head\.\*:lr=2: .*in an earlier group"),
        (models.frozen_first, options("first.*:lr=2"), r"'first\.\*' matches frozen parameters only"),
        (Transformer, options("head.weight:lr=2"), r"'head\.weight' is tied to 'embed\.weight'"),
        (models.plain, options(layer_decay=0.75), r"^--layer-decay needs like blocks .*_Plain has none"),
    ],
)
def test_what_matches_nothing_is_refused_in_one_line(model: Any, given: OptimizerConfig, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve_groups(model(), given)
    assert "\n" not in str(caught.value)
