"""Models of transformers by their configuration: its class, its sizes, its weights, and what is never run or read."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.api.training import train
from stagewright.errors import UserError
from stagewright.model.load import build_model, find_entry, start_model
from stagewright.model.networks.configured import Configured, Task, saved_weights, suited_model, version_of
from stagewright.model.networks.libraries import import_library, is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed"),
    pytest.mark.xdist_group("transformers"),  # which takes seconds to import
]

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
BERT = {"model_type": "bert", "vocab_size": 40, "max_position_embeddings": 12, **SIZES}
VIT = {"model_type": "vit", "image_size": 16, "patch_size": 8, "num_channels": 1, **SIZES}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}


def write(folder: Path, fields: dict[str, Any], **more: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields | more))
    return f"hf:{folder}"


def class_of(name: str) -> str:
    return Configured(name).kind.__name__


# --- The class and the sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "more", "kind"),
    [
        (BERT, {}, "BertForSequenceClassification"),
        (BERT, {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        (BERT, {"architectures": ["BertModel"]}, "BertForSequenceClassification"),  # without a head
        (GPT2, {}, "GPT2LMHeadModel"),
        (VIT, {}, "ViTForImageClassification"),
    ],
)
def test_the_class_is_the_configurations_or_the_usual_one_of_its_type(
    fields: dict[str, Any], more: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    assert class_of(write(tmp_path, fields, **more)) == kind


def test_a_class_may_be_asked_for(tmp_path: Path) -> None:
    assert class_of(f"{write(tmp_path, BERT)}@BertForTokenClassification") == "BertForTokenClassification"


@pytest.mark.parametrize(
    ("fields", "kind", "task", "suited"),
    [
        (BERT, "BertForMaskedLM", Task.CLASSES, "BertForSequenceClassification"),
        (BERT, "BertForTokenClassification", Task.CLASSES, "BertForSequenceClassification"),
        (BERT, "BertForMaskedLM", Task.NEXT_TOKEN, ""),  # an encoder sees the next token
        (GPT2, "GPT2LMHeadModel", Task.CLASSES, "GPT2ForSequenceClassification"),
        (GPT2, "GPT2ForSequenceClassification", Task.NEXT_TOKEN, "GPT2LMHeadModel"),
        (GPT2, "GPT2LMHeadModel", Task.NEXT_TOKEN, ""),
        (VIT, "ViTForImageClassification", Task.CLASSES, ""),
    ],
)
def test_data_may_ask_for_another_head(
    fields: dict[str, Any], kind: str, task: Task, suited: str, tmp_path: Path
) -> None:
    name = write(tmp_path, fields, architectures=[kind])
    assert suited_model(name, task) == (f"{name}@{suited}" if suited else name)
    assert suited_model(f"{name}@{kind}", task) == f"{name}@{kind}"  # what the user names stays


def test_other_names_have_no_class_to_choose() -> None:
    assert suited_model("resnet8", Task.CLASSES) == "resnet8" and saved_weights("timm:resnet18") is None


def test_sizes_and_classes_are_the_configurations(tmp_path: Path) -> None:
    text, image, words = (find_entry(write(tmp_path / name, f)) for name, f in (("a", BERT), ("b", VIT), ("c", GPT2)))
    assert text is not None and (text.tokens, text.classes, text.has_classes) == (12, 2, True)
    assert image is not None and (image.image, image.channels, image.tokens) == (16, 1, None)
    assert words is not None and (words.tokens, words.classes, words.has_classes) == (20, 40, False)


def test_a_model_is_built_for_classes_and_images(tmp_path: Path) -> None:
    model = build_model(write(tmp_path, VIT), 0, 5, image=24)
    assert model(torch.randn(2, 1, 24, 24)).logits.shape == (2, 5)
    file = f"hf:{tmp_path / 'config.json'}"
    assert build_model(file, 0, 4)(torch.randn(2, 1, 16, 16)).logits.shape == (2, 4)


def test_a_model_type_is_its_default_configuration() -> None:
    entry = find_entry("hf:bert")
    assert entry is not None and (entry.tokens, entry.classes) == (512, 2)


def test_normalization_is_that_of_the_preprocessor_beside_it(tmp_path: Path) -> None:
    name = write(tmp_path, VIT)
    plain = find_entry(name)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5], "image_std": [0.25]}')
    told = find_entry(name)
    assert plain is not None and told is not None
    assert (plain.normalize, told.normalize) == ("imagenet", "127.5/63.75")


def test_a_model_is_known_by_its_configuration_and_version(tmp_path: Path) -> None:
    name = write(tmp_path, BERT)
    before = version_of(name)
    write(tmp_path, BERT, hidden_size=32)
    assert version_of(name) != before and import_library("transformers").__version__ in before


def test_a_librarys_model_on_one_rank_may_leave_out_layers_at_random(tmp_path: Path) -> None:
    """Its code is not known to do the same for every batch, as that of the zoo is."""
    fields = {"model_type": "opt", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "ffn_dim": 16}
    name = write(tmp_path, fields, num_attention_heads=2, word_embed_proj_dim=16, layerdrop=0.5)
    (tmp_path / "text.u16").write_bytes(bytes(number % 40 * (number % 2 == 0) for number in range(400)))
    made = train(
        name, data=f"tokens:{tmp_path / 'text.u16'}", context=8, batch=4, steps=4, placement="0:0", emulate=True,
        device="cpu", runs=str(tmp_path),
    )  # fmt: skip
    assert len(made.steps) == 4


# --- Weights ----------------------------------------------------------------------------------------------------------


def save(folder: Path, fields: dict[str, Any], kind: str, **more: Any) -> dict[str, torch.Tensor]:
    """Write a folder as transformers does; the weights of the model in it, by its names."""
    model = build_model(f"{write(folder, fields, **more)}@{kind}", 3)
    model.save_pretrained(folder)
    return dict(model.state_dict())


def test_a_folder_starts_with_its_weights(tmp_path: Path) -> None:
    held = save(tmp_path, VIT, "ViTForImageClassification")
    name = f"hf:{tmp_path}"
    assert saved_weights(name) == str(tmp_path)
    model, start = start_model(name, 0, 2, init=saved_weights(name))
    assert all(torch.equal(tensor, held[name]) for name, tensor in model.state_dict().items())
    assert start is not None and start.remarks == () and start.tensors == len(list(model.parameters()))
    assert model.training and next(model.parameters()).dtype == torch.float32


def test_a_head_of_another_size_or_kind_starts_anew(tmp_path: Path) -> None:
    held = save(tmp_path, BERT, "BertForMaskedLM")
    name = f"hf:{tmp_path}@BertForSequenceClassification"
    model, start = start_model(name, 0, 5, init=str(tmp_path), frozen="!classifier")
    assert start is not None
    assert [text.split()[0] for text in start.anew] == [
        *("bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias")
    ]
    assert "classifier.weight [5, 16]" in start.remarks[0] and "cls.predictions" in start.remarks[1]
    assert "frozen at new values: bert.pooler.dense.weight" in start.remarks[2]
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in held.items() if name in own)
    again = start_model(name, 0, 5, init=str(tmp_path))[0].state_dict()
    assert torch.equal(again["classifier.weight"], own["classifier.weight"])  # by the seed: the same on every rank


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "vit", VIT, "ViTForImageClassification")
    with pytest.raises(UserError, match=r"\d+ tensors missing from it or of another shape: bert.embeddings"):
        start_model(write(tmp_path / "bert", BERT), 0, init=str(tmp_path / "vit"))
    save(tmp_path / "deep", VIT, "ViTForImageClassification")
    wide = write(tmp_path / "wide", VIT, intermediate_size=24)  # in the middle of the model
    with pytest.raises(UserError, match=r"tensors missing from it or of another shape: .*mlp"):
        start_model(wide, 0, init=str(tmp_path / "deep"))


def test_transformers_is_quiet_and_stays_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging = import_library("transformers").utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    save(tmp_path, VIT, "ViTForImageClassification")
    capfd.readouterr()
    start_model(f"hf:{tmp_path}", 0, 7, init=str(tmp_path))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# --- What is never run or read ----------------------------------------------------------------------------------------


def test_code_beside_a_configuration_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('run')")
    code = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    with pytest.raises(UserError, match=r"model_type 'own' is not part of transformers.* never run"):
        build_model(write(tmp_path, {"model_type": "own", "auto_map": code}), 0)
    with pytest.raises(UserError, match="no model class 'OwnForever'"):
        build_model(write(tmp_path, BERT, architectures=["OwnForever"], auto_map=code), 0)
    inner = {"auto_map": code, "hidden": {"attn_implementation": "someone/kernels"}}
    config = Configured(write(tmp_path, BERT, **inner)).config
    assert not hasattr(config, "auto_map") and config.hidden == {}


def test_a_folder_with_a_pickle_alone_is_refused(tmp_path: Path) -> None:
    name = write(tmp_path, BERT)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle.*convert it"):
        start_model(name, 0, init=saved_weights(name))


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("hf:bret", ["transformers", "no model 'bret'", "did you mean 'bert'"]),
        ("hf:google-bert/bert-base", ["nothing is downloaded", "hf download google-bert/bert-base --local-dir"]),
        ("hf:bert@BertForEverything", ["no model class 'BertForEverything'", "Bert"]),
        ("hf:bert@ViTModel", ["takes a ViTConfig", "a BertConfig"]),
        ("hf:clip_text_model", ["neither classifies nor predicts", "@CLASS"]),
    ],
)
def test_an_unknown_configuration_is_one_line(name: str, pieces: list[str]) -> None:
    with pytest.raises(UserError) as error:
        find_entry(name)
    assert all(piece in str(error.value) for piece in pieces) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("[", "is not JSON"),
        ("[1]", "holds a list"),
        ("{}", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
        ('{"model_type": "bert", "quantization_config": {}}', "is quantized"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "raised"),
        ('{"model_type": "bert", "num_labels": 99999999999}', "num_labels of"),  # transformers would list them all
        ('{"model_type": "clip", "text_config": {"num_hidden_layers": 99999999}}', "num_hidden_layers of"),
    ],
)
def test_a_broken_configuration_is_one_line(text: str, piece: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as error:
        find_entry(f"hf:{tmp_path}")
    assert piece in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_configuration_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    generator, refused = random.Random(0), 0
    values = (None, -1, 0, 1e400, 10**40, "", "x", [], [1], {}, {"a": 1}, True)
    for _ in range(120):
        fields = {**generator.choice((BERT, VIT, GPT2)), "architectures": ["BertForMaskedLM"], "num_labels": 3}
        fields[generator.choice(list(fields))] = generator.choice(values)
        try:
            entry = find_entry(write(tmp_path, fields))
            assert entry is not None and entry.image > 0 and entry.classes > 0
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 40 < refused < 120
