"""Small models of transformers as they are, from configurations, and samples for them: nothing is downloaded.

Each is the author's own class with its own signature: it takes several fields by name, returns an object with several
tensors and, with the default configuration of a decoder, its cache, and may compute its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from stagewright.model.networks.libraries import import_library

VOCABULARY = 50
CLASSES = 10
_LENGTH = 12
_SHORTEST = 3
_IGNORED = -100
_FIRST_WORD = 3  # below are the tokens for padding, the beginning and the end
_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}

Samples = Callable[[int, Generator], dict[str, Tensor]]


def model(name: str, task: str, options: Mapping[str, Any]) -> nn.Module:
    """The class `{name}{task}` by its configuration `{name}Config`."""
    transformers = import_library("transformers")
    made: nn.Module = getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**options))
    return made


def adapted() -> nn.Module:
    """BERT, frozen but for low-rank adapters and the head, as PEFT makes it."""
    peft = import_library("peft")
    whole = model("Bert", "ForSequenceClassification", bert_options(num_labels=CLASSES))
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    made: nn.Module = peft.get_peft_model(whole, config)
    return made


# Samples.


def _words(samples: int, generator: Generator) -> Tensor:
    return torch.randint(_FIRST_WORD, VOCABULARY, (samples, _LENGTH), generator=generator)


def _mask(samples: int, generator: Generator) -> Tensor:
    """Texts of unequal lengths, padded at the end."""
    lengths = torch.randint(_SHORTEST, _LENGTH + 1, (samples, 1), generator=generator)
    return (torch.arange(_LENGTH) < lengths).long()


def _labels(samples: int, generator: Generator, *shape: int) -> Tensor:
    return torch.randint(CLASSES, (samples, *shape), generator=generator)


def padded(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts, and a class for each."""
    mask = _mask(samples, generator)
    ids = _words(samples, generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": _labels(samples, generator)}


def tagged(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts, and a class for each word."""
    given = padded(samples, generator)
    labels = _labels(samples, generator, _LENGTH).masked_fill(given["attention_mask"] == 0, _IGNORED)
    return given | {"labels": labels}


def texts(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Texts without padding."""
    return {"input_ids": _words(samples, generator)}


def continued(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts whose next words are learned."""
    given = padded(samples, generator)
    return given | {"labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, _IGNORED)}


def translated(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts, and others of other lengths as their translations."""
    given, other = padded(samples, generator), padded(samples, generator)
    labels = other["input_ids"].masked_fill(other["attention_mask"] == 0, _IGNORED)
    return given | {"labels": labels}


def shifted(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts, the translations so far, and their next words."""
    given = translated(samples, generator)
    targets = given.pop("labels")
    so_far = torch.cat([torch.full((samples, 1), 2), targets[:, :-1].clamp(min=0)], 1)
    return given | {"decoder_input_ids": so_far, "targets": targets}


def pictures(samples: int, generator: Generator, side: int = 32) -> dict[str, Tensor]:
    images = torch.randn(samples, 3, side, side, generator=generator)
    return {"pixel_values": images, "labels": _labels(samples, generator)}


def segmented(samples: int, generator: Generator, side: int = 32) -> dict[str, Tensor]:
    """Images, and a class for each pixel; 255 does not count."""
    images = torch.randn(samples, 3, side, side, generator=generator)
    labels = _labels(samples, generator, side, side)
    return {"pixel_values": images, "labels": labels.masked_fill(images[:, 0] > 1, 255)}


def captioned(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Images with texts."""
    given = padded(samples, generator)
    return {name: given[name] for name in ("input_ids", "attention_mask")} | {
        "pixel_values": pictures(samples, generator)["pixel_values"]
    }


def sounds(samples: int, generator: Generator) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(samples, 1600, generator=generator),
        "labels": _labels(samples, generator),
    }


# Configurations.


def bert_options(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **_SIZES, **more}


def gpt2_options() -> dict[str, Any]:
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {**ids, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}


def causal_options(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, **_SIZES, **more}


def vision_options(**more: Any) -> dict[str, Any]:
    return {"image_size": 32, "patch_size": 8, "num_labels": CLASSES, **_SIZES, **more}


def clip_options() -> dict[str, Any]:
    ids = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
    text = _SIZES | ids | {"num_hidden_layers": 2, "pad_token_id": 0}
    vision = _SIZES | {"image_size": 32, "patch_size": 8, "num_hidden_layers": 2}
    return {"text_config": text, "vision_config": vision, "projection_dim": 16, "num_labels": CLASSES}


DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "hidden_dim": 64,
    "num_labels": CLASSES,
}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _BART_SIDE.items()},
}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 24,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "num_labels": CLASSES,
}
CONVNEXT = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1], "num_labels": CLASSES}
SEGFORMER = {
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
    "num_labels": CLASSES,
}
WAV2VEC2 = {
    **_SIZES,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 4, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_labels": CLASSES,
}
_sequence = partial(model, task="ForSequenceClassification")
_tokens = partial(model, task="ForTokenClassification")
_causal = partial(model, task="ForCausalLM")
_image = partial(model, task="ForImageClassification")
_BERT = bert_options(num_labels=CLASSES)
_GROUPED = causal_options(num_key_value_heads=2)
_MASKED = "input_ids,attention_mask"
_IMAGE = "pixel_values"

# Each family's variants: its factory, its samples, what it takes as --inputs says it, and --loss.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Samples, str, str]] = {
    "bert": (partial(_sequence, "Bert", options=_BERT), padded, f"{_MASKED},labels", "model"),
    "bert_mlm": (partial(model, "Bert", "ForMaskedLM", bert_options()), continued, f"{_MASKED},labels", "model"),
    "roberta": (partial(_tokens, "Roberta", options=_BERT), tagged, f"{_MASKED},labels", "model"),
    "distilbert": (partial(_tokens, "DistilBert", options=DISTILBERT), tagged, f"{_MASKED},labels", "model"),
    "albert": (partial(_sequence, "Albert", options=_BERT), padded, _MASKED, "auto"),
    "electra": (partial(_sequence, "Electra", options=_BERT), padded, _MASKED, "auto"),
    "deberta_v2": (partial(_sequence, "DebertaV2", options=_BERT), padded, _MASKED, "auto"),
    "gpt2": (partial(model, "GPT2", "LMHeadModel", gpt2_options()), continued, _MASKED, "next-token"),
    "gpt2_loss": (
        partial(model, "GPT2", "LMHeadModel", gpt2_options()),
        texts,
        "input_ids,labels=input_ids",
        "model",
    ),
    "gpt2_classifier": (
        partial(_sequence, "GPT2", options=gpt2_options() | {"num_labels": CLASSES}),
        padded,
        _MASKED,
        "auto",
    ),
    "llama": (partial(_causal, "Llama", options=causal_options()), continued, f"{_MASKED},labels", "model"),
    "mistral": (partial(_causal, "Mistral", options=_GROUPED), continued, _MASKED, "next-token"),
    "qwen3": (
        partial(_causal, "Qwen3", options=_GROUPED | {"head_dim": 8}),
        texts,
        "input_ids,labels=input_ids",
        "model",
    ),
    "gpt_neox": (partial(_causal, "GPTNeoX", options=causal_options()), continued, _MASKED, "next-token"),
    "opt": (partial(_causal, "OPT", options=causal_options(**OPT)), continued, f"{_MASKED},labels", "model"),
    "t5": (partial(model, "T5", "ForConditionalGeneration", T5), translated, f"{_MASKED},labels", "model"),
    "bart": (
        partial(model, "Bart", "ForConditionalGeneration", BART),
        shifted,
        f"{_MASKED},decoder_input_ids",
        "next-token",
    ),
    "vit": (partial(_image, "ViT", options=vision_options()), pictures, _IMAGE, "auto"),
    "dinov2": (partial(_image, "Dinov2", options=vision_options(mlp_ratio=2)), pictures, _IMAGE, "auto"),
    "beit": (partial(_image, "Beit", options=vision_options()), pictures, _IMAGE, "auto"),
    "swin": (partial(_image, "Swin", options=SWIN), pictures, f"{_IMAGE},labels", "model"),
    "convnext": (partial(_image, "ConvNext", options=CONVNEXT), pictures, _IMAGE, "auto"),
    "segformer": (
        partial(model, "Segformer", "ForSemanticSegmentation", SEGFORMER),
        segmented,
        f"{_IMAGE},labels",
        "model",
    ),
    "clip_vision": (partial(_image, "CLIP", options=clip_options()), pictures, _IMAGE, "auto"),
    "clip": (
        partial(model, "CLIP", "Model", clip_options()),
        captioned,
        f"{_MASKED},{_IMAGE}",
        "benchmarks.models.objectives:contrastive",
    ),
    "wav2vec2": (partial(_sequence, "Wav2Vec2", options=WAV2VEC2), sounds, "input_values,labels", "model"),
}
