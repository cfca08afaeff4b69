"""First weights from safetensors files: what is read, what starts anew and what is refused; and what is frozen."""

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stagewright.errors import UserError
from stagewright.model.load import build_model, start_model
from stagewright.model.networks.weights import digest_of, freeze, load_weights, require_same, weight_files

Tensors = dict[str, Tensor]


class Net(nn.Module):
    """A trunk with statistics, and a head for some classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.aside = nn.Linear(5, classes)
        self.head = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        return self.head(x) + self.aside(x)


class Tied(nn.Module):
    def __init__(self, words: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, words, bias=False)
        self.head.weight = self.embedding.weight


def saved(folder: Path, tensors: Tensors, name: str = "w.safetensors") -> str:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / name)
    return str(folder / name)


def state(classes: int = 3) -> Tensors:
    torch.manual_seed(1)
    model = Net(classes)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    return dict(model.state_dict())


def is_loaded(model: nn.Module, tensors: Tensors, names: list[str] | None = None) -> bool:
    own = model.state_dict()
    return all(torch.equal(own[name], tensors[name]) for name in names or tensors)


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_parameters_and_buffers_get_the_values_of_a_file_by_name(tmp_path: Path) -> None:
    tensors, model = state(), Net()
    start = load_weights(model, saved(tmp_path, tensors))
    assert is_loaded(model, tensors)
    assert (start.tensors, start.anew, start.remarks) == (11, (), ())
    assert start.digest == digest_of(weight_files(start.source))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_converted(kind: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in state().items()}
    model = Net()
    load_weights(model, saved(tmp_path, tensors))
    assert is_loaded(model, {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()})


def test_shards_of_an_index_are_read(tmp_path: Path) -> None:
    tensors, model = state(), Net()
    halves = {"a.safetensors": list(tensors)[:4], "b.safetensors": list(tensors)[4:]}
    for file, names in halves.items():
        saved(tmp_path, {name: tensors[name] for name in names}, file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_weights(model, str(tmp_path)).tensors == 11 and is_loaded(model, tensors)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_a_prefix_of_all_names_is_left_out_and_said(prefix: str, tmp_path: Path) -> None:
    tensors, model = state(), Net()
    start = load_weights(model, saved(tmp_path, {prefix + name: tensor for name, tensor in tensors.items()}))
    assert is_loaded(model, tensors) and len(start.remarks) == 1 and f"'{prefix}'" in start.remarks[0]


def test_a_prefix_of_the_model_is_left_out_too(tmp_path: Path) -> None:
    wrapped = nn.ModuleDict({"model": Net()})
    load_weights(wrapped, saved(tmp_path, state()))
    assert is_loaded(wrapped, {f"model.{name}": tensor for name, tensor in state().items()})


def test_a_tied_tensor_may_have_one_of_its_names(tmp_path: Path) -> None:
    model, values = Tied(), torch.randn(6, 4)
    middle = {name: tensor for name, tensor in Tied().state_dict().items() if name.startswith("middle")}
    load_weights(model, saved(tmp_path, {"head.weight": values, **middle}))
    assert torch.equal(model.embedding.weight, values) and model.head.weight is model.embedding.weight
    other = {"head.weight": values, "embedding.weight": values + 1, **middle}
    with pytest.raises(UserError, match=r"'head.weight' and 'embedding.weight' have different values.*one tensor"):
        load_weights(model, saved(tmp_path, other))


def test_counts_of_batches_may_be_missing(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in state().items() if not name.endswith("tracked")}
    assert load_weights(Net(), saved(tmp_path, tensors)).tensors == 10


# --- The head ---------------------------------------------------------------------------------------------------------


def test_a_head_of_another_size_starts_anew_and_is_named(tmp_path: Path) -> None:
    tensors = state(classes=3)
    torch.manual_seed(7)
    model = Net(classes=2)
    first = copy.deepcopy(model.state_dict())
    start = load_weights(model, file := saved(tmp_path, tensors))
    heads = [f"{name}.{kind}" for name in ("aside", "head") for kind in ("weight", "bias")]
    assert sorted(start.anew) == sorted(heads) and is_loaded(model, first, heads)
    assert is_loaded(model, tensors, [name for name in tensors if name not in heads])
    assert f"head.weight [3, 5] in {file}, [2, 5] in the model: starts anew" in start.remarks


def test_a_head_that_the_file_lacks_starts_anew(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in state().items() if not name.startswith("head")}
    start = load_weights(Net(), saved(tmp_path, tensors))
    assert start.anew == ("head.weight", "head.bias") and all("not in" in remark for remark in start.remarks)


def test_a_new_head_that_is_frozen_is_pointed_out(tmp_path: Path) -> None:
    file = saved(tmp_path, dict(build_model("resnet8", 0).state_dict()))
    start, other = (start_model("resnet8", 0, 7, init=file, frozen=frozen)[1] for frozen in ("layer1,fc", "!fc"))
    assert start is not None and "frozen at new values: fc.weight, fc.bias" in start.remarks[-1]
    assert other is not None and other.remarks == start.remarks[:-1]


# --- What does not fit ------------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def changed(**replaced: Tensor) -> Callable[[Tensors], Tensors]:
    named = {name.replace("__", "."): tensor for name, tensor in replaced.items()}
    return lambda tensors: tensors | named


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        (without("stem.weight", "norm.bias"), ["2 tensors missing", "stem.weight; norm.bias"]),
        (without("head.weight"), ["1 tensor missing", "head.weight"]),  # half a head is no head
        (changed(extra=torch.ones(1)), ["1 tensor not in the model", "extra"]),
        (changed(stem__weight=torch.ones(5, 3)), ["of another shape", "stem.weight [5, 3], [5, 4] in the model"]),
        (changed(norm__running_mean=torch.ones(4)), ["of another shape", "norm.running_mean [4], [5] in the model"]),
        (changed(head__weight=torch.ones(9, 4)), ["of another shape", "head.weight [9, 4]"]),  # of another width
        (changed(aside__weight=torch.ones(9, 5)), ["of another shape", "aside.weight [9, 5]"]),  # not the last module
        (changed(stem__bias=torch.ones(5, dtype=torch.int64)), ["not of a real type", "stem.bias"]),
    ],
)
def test_what_does_not_fit_is_one_line_and_changes_nothing(
    change: Callable[[Tensors], Tensors], pieces: list[str], tmp_path: Path
) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError) as error:
        load_weights(model, saved(tmp_path, change(state())))
    assert all(piece in str(error.value) for piece in pieces) and "\n" not in str(error.value)
    assert is_loaded(model, before)


def test_many_tensors_are_counted_and_the_first_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"20 tensors not in the model: x0; x1; x\d+ and 17 more"):
        load_weights(Net(), saved(tmp_path, state() | {f"x{number}": torch.ones(1) for number in range(20)}))


def test_an_embedding_of_another_size_is_no_head(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            self.words = nn.Embedding(words, 4)
            self.head = nn.Linear(4, words)

    with pytest.raises(UserError, match=r"words.weight \[6, 4\], \[7, 4\]"):
        load_weights(Words(7), saved(tmp_path, dict(Words(6).state_dict())))
    start = load_weights(Tied(7), saved(tmp_path, dict(Tied(6).state_dict())))
    assert start.anew == ("embedding.weight",)  # the head itself


# --- Files ------------------------------------------------------------------------------------------------------------


def test_pickles_are_refused_with_what_converts_them(tmp_path: Path) -> None:
    for path in (tmp_path / "w.pt", tmp_path / "pytorch_model.bin"):
        path.write_bytes(b"\x80\x04.")
    for source in (tmp_path / "w.pt", tmp_path):
        with pytest.raises(UserError, match=r"is a pickle, .* never read; convert it: python -c .*weights_only=True"):
            weight_files(str(source))


def test_the_command_that_converts_a_pickle_works(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "w.pt")
    with pytest.raises(UserError) as error:
        weight_files(str(tmp_path / "w.pt"))
    exec(str(error.value).partition('python -c "')[2].removesuffix('"'))
    model = Net()
    load_weights(model, str(tmp_path / "w.safetensors"))
    assert is_loaded(model, state())


@pytest.mark.parametrize(
    ("index", "piece"),
    [
        ('{"weight_map": {"a": "../a.safetensors"}}', "'../a.safetensors'"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd'"),
        ('{"weight_map": {"a": 3}}', "'3'"),
        ('{"weight_map": ["a"]}', "no weight_map"),
        ("{}", "no weight_map"),
        ("[", "no weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "No such file"),
    ],
)
def test_an_index_names_files_beside_it_alone(index: str, piece: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError) as error:
        load_weights(Net(), str(tmp_path))
    assert piece in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_safetensors_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    wrong = {
        "w.safetensors": "no readable safetensors",
        "gone.safetensors": "No such file",
        "empty": "the folder has no",
        "pipe.safetensors": "is a pipe",
    }
    for name, piece in wrong.items():
        with pytest.raises(UserError, match=piece):
            load_weights(Net(), str(tmp_path / name))


def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    whole = Path(saved(tmp_path, state())).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    generator, refused = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 3))):
            damaged[generator.randrange(header)] = generator.choice((0, 0xFF, *b'0123456789[]{},:"', 0x80))
        (tmp_path / "d.safetensors").write_bytes(damaged[: generator.choice((len(whole), len(whole) - 5))])
        try:
            load_weights(Net(), str(tmp_path / "d.safetensors"))
        except UserError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 200 < refused < 300


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        saved(tmp_path, state(), file)
    index = {"weight_map": {"stem.weight": "a.safetensors", "head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"is in .*a.safetensors and in .*b.safetensors"):
        load_weights(Net(), str(tmp_path))


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    start = load_weights(Net(), file := saved(tmp_path, state()))
    require_same(file, start.digest)
    saved(tmp_path, state() | {"stem.bias": torch.zeros(5)})
    with pytest.raises(UserError, match=f"has changed.*{start.digest}"):
        require_same(file, start.digest)


# --- Freezing ---------------------------------------------------------------------------------------------------------


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ("stem", ["norm", "aside", "head"]),
        ("stem.*,norm.*", ["aside", "head"]),
        ("!head", ["head"]),
        ("!head,!aside.*", ["aside", "head"]),
        ("*,!norm", ["norm"]),
        ("[sn]*", ["aside", "head"]),
        ("?t?m", ["norm", "aside", "head"]),  # a module too
    ],
)
def test_patterns_freeze_parameters_by_name_or_by_module(patterns: str, left: list[str]) -> None:
    model = Net()
    freeze(model, patterns)
    assert trained(model) == [f"{name}.{kind}" for name in left for kind in ("weight", "bias")]


def test_single_parameters_may_be_frozen() -> None:
    model = Net()
    freeze(model, "*.bias")
    assert trained(model) == ["stem.weight", "norm.weight", "aside.weight", "head.weight"]


def test_any_name_of_a_tied_parameter_freezes_it() -> None:
    model = Tied()
    freeze(model, "head")
    assert trained(model) == ["middle.weight", "middle.bias"]


@pytest.mark.parametrize(
    ("patterns", "nearest"), [("stam", "stem"), ("stem,!haed", "head"), ("head.wieght", "head.weight")]
)
def test_a_pattern_that_names_nothing_is_refused_with_the_nearest_name(patterns: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"--freeze .* names no parameter.*'{nearest}'"):
        freeze(Net(), patterns)


@pytest.mark.parametrize("patterns", ["*", "stem,norm,aside,head"])
def test_freezing_everything_is_refused(patterns: str) -> None:
    with pytest.raises(UserError, match="none of 8 parameters"):
        freeze(Net(), patterns)


@pytest.mark.parametrize(
    ("patterns", "piece"), [("*,!*", "freezes nothing"), ("", "names no parameter"), (",", "no param")]
)
def test_freezing_nothing_is_refused(patterns: str, piece: str) -> None:
    with pytest.raises(UserError, match=piece):
        freeze(Net(), patterns)


def test_a_frozen_norm_stays_in_evaluation_mode_and_keeps_its_statistics() -> None:
    model = copy.deepcopy(frozen("stem,norm")).train()
    before = copy.deepcopy(model.norm.state_dict())
    model(torch.randn(8, 4))
    assert model.training and not model.norm.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.norm.state_dict().items())
    assert model.eval().train().head.training


@pytest.mark.parametrize("patterns", ["stem", "norm.weight", "*.weight"])
def test_a_norm_with_a_trained_parameter_is_left_to_its_author(patterns: str) -> None:
    assert frozen(patterns).train().norm.training


@pytest.mark.parametrize(("patterns", "is_kept"), [("trunk", True), ("trunk.0", False), ("!head", True)])
def test_a_norm_without_parameters_is_kept_with_the_module_around_it(patterns: str, is_kept: bool) -> None:
    model = nn.Sequential()
    model.add_module("trunk", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)))
    model.add_module("head", nn.Linear(4, 2))
    freeze(model, patterns)
    assert model.train().get_submodule("trunk.1").training is not is_kept


def frozen(patterns: str) -> Net:
    model = Net()
    freeze(model, patterns)
    return model
