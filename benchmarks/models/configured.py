"""Small models of transformers as they are, from configurations, and samples for them: nothing is downloaded.

Each is the author's own class with its own signature: it takes several fields by name, returns an object with several
tensors and, with the default configuration of a decoder, its cache, and may compute its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.models.objectives import CONTRASTIVE
from stagewright.model.networks.libraries import import_library

VOCABULARY = 50
CLASSES = 10
_LENGTH = 12
_SHORTEST = 3
_IGNORED = -100
_FIRST_WORD = 3  # below are the tokens for padding, the beginning and the end

Samples = Callable[[int, Generator], dict[str, Tensor]]


def model(name: str, task: str, options: Mapping[str, Any]) -> Any:
    """The class `{name}{task}` by its configuration `{name}Config`."""
    transformers = import_library("transformers")
    return getattr(transformers, name + task)(getattr(transformers, f"{name}Config")(**options))


def adapted() -> Any:
    """BERT, frozen but for low-rank adapters and the head, as PEFT makes it."""
    peft = import_library("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    return peft.get_peft_model(model("Bert", _SEQUENCE, _BERT | _LABELS), config)


# Samples.


def _labels(samples: int, generator: Generator, *shape: int) -> Tensor:
    return torch.randint(CLASSES, (samples, *shape), generator=generator)


def _shown(fields: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """The labels of words that are no padding."""
    return labels.masked_fill(fields["attention_mask"] == 0, _IGNORED)


def texts(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Texts without padding."""
    return {"input_ids": torch.randint(_FIRST_WORD, VOCABULARY, (samples, _LENGTH), generator=generator)}


def padded(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Texts of unequal lengths, padded at the end, and a class for each."""
    lengths = torch.randint(_SHORTEST, _LENGTH + 1, (samples, 1), generator=generator)
    mask = (torch.arange(_LENGTH) < lengths).long()
    ids = texts(samples, generator)["input_ids"] * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": _labels(samples, generator)}


def tagged(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts, and a class for each word."""
    given = padded(samples, generator)
    return given | {"labels": _shown(given, _labels(samples, generator, _LENGTH))}


def continued(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts whose next words are learned."""
    given = padded(samples, generator)
    return given | {"labels": _shown(given, given["input_ids"])}


def translated(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts, and others of other lengths as their translations."""
    return padded(samples, generator) | {"labels": continued(samples, generator)["labels"]}


def shifted(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Padded texts, the translations so far, and their next words."""
    given = translated(samples, generator)
    targets = given.pop("labels")
    so_far = torch.cat([torch.full((samples, 1), 2), targets[:, :-1].clamp(min=0)], 1)
    return given | {"decoder_input_ids": so_far, "targets": targets}


def pictures(samples: int, generator: Generator) -> dict[str, Tensor]:
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    return {"pixel_values": images, "labels": _labels(samples, generator)}


def segmented(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Images, and a class for each pixel; 255 does not count."""
    images = torch.randn(samples, 3, 32, 32, generator=generator)
    labels = _labels(samples, generator, 32, 32)
    return {"pixel_values": images, "labels": labels.masked_fill(images[:, 0] > 1, 255)}


def captioned(samples: int, generator: Generator) -> dict[str, Tensor]:
    """Images with texts."""
    given = padded(samples, generator) | pictures(samples, generator)
    del given["labels"]
    return given


def sounds(samples: int, generator: Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(samples, 1600, generator=generator), "labels": _labels(samples, generator)}


# Configurations.
_LABELS = {"num_labels": CLASSES}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
_WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_BERT = _WORDS | _SIZES
_GPT2 = _ENDS | {"vocab_size": VOCABULARY, "pad_token_id": 0}
_GPT2 |= {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
_CAUSAL = _WORDS | {"pad_token_id": 0} | _SIZES
_OPT = _CAUSAL | {"ffn_dim": 64, "word_embed_proj_dim": 32}
_GROUPED = _CAUSAL | {"num_key_value_heads": 2}
_VISION = {"image_size": 32, "patch_size": 8} | _SIZES
_CLIP = {
    "text_config": _SIZES | _WORDS | _ENDS | {"num_hidden_layers": 2, "pad_token_id": 0},
    "vision_config": _VISION | {"num_hidden_layers": 2},
    "projection_dim": 16,
}
_DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0}
_BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
_BART = {
    **_WORDS,
    **_ENDS,
    "d_model": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _BART_SIDE.items()},
}
_SWIN = {"image_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4]}
_CONVNEXT = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
_SEGFORMER = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
_WAV2VEC2 = {
    **_SIZES,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 4, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_SEQUENCE, _TOKENS, _NEXT = "ForSequenceClassification", "ForTokenClassification", "ForCausalLM"
_IMAGE, _WRITER, _SEGMENTATION = "ForImageClassification", "ForConditionalGeneration", "ForSemanticSegmentation"
_MASKED, _PIXELS, _OWN_WORDS = "input_ids,attention_mask", "pixel_values", "input_ids,labels=input_ids"

# Each family: its class, task and configuration, its samples, what it takes as --inputs says it, and --loss.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], Samples, str, str]] = {
    "bert": ("Bert", _SEQUENCE, _BERT | _LABELS, padded, f"{_MASKED},labels", "model"),
    "bert_mlm": ("Bert", "ForMaskedLM", _BERT, continued, f"{_MASKED},labels", "model"),
    "roberta": ("Roberta", _TOKENS, _BERT | _LABELS, tagged, f"{_MASKED},labels", "model"),
    "distilbert": ("DistilBert", _TOKENS, _DISTILBERT | _LABELS, tagged, f"{_MASKED},labels", "model"),
    "albert": ("Albert", _SEQUENCE, _BERT | _LABELS, padded, _MASKED, "auto"),
    "electra": ("Electra", _SEQUENCE, _BERT | _LABELS, padded, _MASKED, "auto"),
    "deberta_v2": ("DebertaV2", _SEQUENCE, _BERT | _LABELS, padded, _MASKED, "auto"),
    "gpt2": ("GPT2", "LMHeadModel", _GPT2, continued, _MASKED, "next-token"),
    "gpt2_loss": ("GPT2", "LMHeadModel", _GPT2, texts, _OWN_WORDS, "model"),
    "gpt2_classifier": ("GPT2", _SEQUENCE, _GPT2 | _LABELS, padded, _MASKED, "auto"),
    "llama": ("Llama", _NEXT, _CAUSAL, continued, f"{_MASKED},labels", "model"),
    "mistral": ("Mistral", _NEXT, _GROUPED, continued, _MASKED, "next-token"),
    "qwen3": ("Qwen3", _NEXT, _GROUPED | {"head_dim": 8}, texts, _OWN_WORDS, "model"),
    "gpt_neox": ("GPTNeoX", _NEXT, _CAUSAL, continued, _MASKED, "next-token"),
    "opt": ("OPT", _NEXT, _OPT, continued, f"{_MASKED},labels", "model"),
    "t5": ("T5", _WRITER, _T5, translated, f"{_MASKED},labels", "model"),
    "bart": ("Bart", _WRITER, _BART, shifted, f"{_MASKED},decoder_input_ids", "next-token"),
    "vit": ("ViT", _IMAGE, _VISION | _LABELS, pictures, _PIXELS, "auto"),
    "dinov2": ("Dinov2", _IMAGE, _VISION | _LABELS | {"mlp_ratio": 2}, pictures, _PIXELS, "auto"),
    "beit": ("Beit", _IMAGE, _VISION | _LABELS, pictures, _PIXELS, "auto"),
    "swin": ("Swin", _IMAGE, _SWIN | _LABELS, pictures, f"{_PIXELS},labels", "model"),
    "convnext": ("ConvNext", _IMAGE, _CONVNEXT | _LABELS, pictures, _PIXELS, "auto"),
    "segformer": ("Segformer", _SEGMENTATION, _SEGFORMER | _LABELS, segmented, f"{_PIXELS},labels", "model"),
    "clip_vision": ("CLIP", _IMAGE, _CLIP | _LABELS, pictures, _PIXELS, "auto"),
    "clip": ("CLIP", "Model", _CLIP | _LABELS, captioned, f"{_MASKED},{_PIXELS}", CONTRASTIVE),
    "wav2vec2": ("Wav2Vec2", _SEQUENCE, _WAV2VEC2 | _LABELS, sounds, "input_values,labels", "model"),
}
