"""Small models of transformers, from configurations: nothing is downloaded. Each returns the logits alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stagewright.bench.models.libraries import import_library

VOCABULARY = 50
_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}


class Logits(nn.Module):
    """A model of transformers as one from a tensor to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs).logits
        return logits


class LastToken(nn.Module):
    """A decoder's last token, classified."""

    def __init__(self, model: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.model = model
        self.score = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.score(self.model(ids, use_cache=False).last_hidden_state[:, -1])
        return logits


class Pooled(nn.Module):
    """The mean of an encoder's outputs, classified."""

    def __init__(self, model: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.model = model
        self.score = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.score(self.model(inputs).last_hidden_state.mean(1))
        return logits


def classifier(name: str, task: str, options: Mapping[str, Any], classes: int = 10) -> nn.Module:
    """The class `{name}For{task}` by its configuration, as wide and deep as `options` say."""
    transformers = import_library("transformers")
    config = getattr(transformers, f"{name}Config")(num_labels=classes, **options)
    return Logits(getattr(transformers, f"{name}For{task}")(config))


def encoder(name: str, task: str, options: Mapping[str, Any], width: int = 32, classes: int = 10) -> nn.Module:
    """The class `{name}{task}` without a head, and a linear layer on the mean of what it returns."""
    transformers = import_library("transformers")
    config = getattr(transformers, f"{name}Config")(**options)
    return Pooled(getattr(transformers, f"{name}{task}")(config), width, classes)


def decoder(name: str, options: Mapping[str, Any], width: int = 32, classes: int = 10) -> nn.Module:
    """The class `{name}Model`, and a linear layer on the last token."""
    transformers = import_library("transformers")
    config = getattr(transformers, f"{name}Config")(**options)
    return LastToken(getattr(transformers, f"{name}Model")(config), width, classes)


def adapted(classes: int = 10) -> nn.Module:
    """BERT, frozen but for low-rank adapters and the head."""
    peft = import_library("peft")
    whole = classifier("Bert", "SequenceClassification", bert_options(), classes)
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    return Logits(peft.get_peft_model(whole.model, config))


def bert_options() -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **_SIZES}


def gpt2_options() -> dict[str, Any]:
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return {**ids, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32, "use_cache": False}


def causal_options(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, **_SIZES, **more}


def vision_options(**more: Any) -> dict[str, Any]:
    return {"image_size": 32, "patch_size": 8, **_SIZES, **more}


DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
_BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 32,
    "use_cache": False,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _BART_SIDE.items()},
}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 24,
    "depths": [2, 2],
    "num_heads": [2, 4],
}
CONVNEXT = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
SEGFORMER = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
WAV2VEC2 = {
    **_SIZES,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 4, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
    "layerdrop": 0.1,
}
