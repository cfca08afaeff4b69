"""What a model and a loss take of samples: what does not fit is one line, before a run folder exists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import stagewright
from stagewright.config.toml import make_config
from stagewright.data.own import DatasetSource
from stagewright.run.opening import Binding, bind
from tests.commands import fails
from tests.tasks import Perceptron

HERE = "tests.unit.run.test_opening"
_SAMPLES = 24
_NUMBERS = torch.randn(_SAMPLES, 6, generator=torch.Generator().manual_seed(0))
_LABELS = torch.randint(3, (_SAMPLES,), generator=torch.Generator().manual_seed(1))


class Tokens(nn.Module):
    """Two positions, a vocabulary of five."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"features": input_ids.float(), "logits": logits}


class Sum(Perceptron):
    """Takes two inputs."""

    def forward(self, numbers: Tensor, other: Tensor) -> Tensor:
        return super().forward(numbers + other)


def classifier() -> nn.Module:
    return Perceptron(3)


def number() -> nn.Module:
    return Perceptron(1)


def tokens() -> nn.Module:
    return Tokens()


def two_inputs() -> nn.Module:
    return Sum(3)


def _total(outputs: Tensor, sample: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(outputs, sample["label"], reduction="sum")


def negative(outputs: Tensor, sample: Mapping[str, Tensor]) -> Any:
    return _total(outputs, sample), -3


def infinite(outputs: Tensor, sample: Mapping[str, Tensor]) -> Any:
    return _total(outputs, sample), torch.tensor(torch.inf)


def nothing(outputs: Tensor, sample: Mapping[str, Tensor]) -> Any:
    return _total(outputs, sample), None


def imaginary(outputs: Tensor, sample: Mapping[str, Tensor]) -> Any:
    return _total(outputs, sample) * 1j


def _data(folder: Path, name: str = "data", **fields: Tensor) -> str:
    path = folder / f"{name}.safetensors"
    save_file({field: tensor.contiguous() for field, tensor in fields.items()}, path)
    return f"tensors:{path}"


def _options(folder: Path, data: str, model: str = "classifier") -> tuple[str, ...]:
    common = ("--emulate", "--batch", "8", "--microbatches", "2", "--steps", "2", "--monitor-every", "0")
    return ("--model", f"{HERE}:{model}", "--data", data, *common, "--no-shuffle", "--runs", str(folder / "runs"))


def _fails(capsys: pytest.CaptureFixture[str], folder: Path, data: str, model: str, *given: str) -> str:
    said = fails(capsys, "train", *_options(folder, data, model), *given)
    assert not (folder / "runs").exists()
    return said


_IDS = torch.randint(5, (_SAMPLES, 2), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("fields", "model", "given", "said"),
    [
        ({"label": _LABELS}, "classifier", f"--loss {HERE}:nothing", "NoneType as its count"),
        ({"label": _LABELS}, "classifier", f"--loss {HERE}:imaginary", "complex loss"),
        ({"label": _LABELS > 0}, "classifier", "", "boolean; use --loss binary"),
        ({"label": torch.full_like(_LABELS, -100)}, "classifier", "", "no label that counts"),
        (
            {"label": _LABELS[:, None].repeat(1, 3)},
            "classifier",
            "--loss binary",
            "up to 2 but --loss binary",
        ),
        ({"label": _LABELS.float()}, "number", "--class-weights 1,2,3", "changes nothing with --loss mse"),
        ({"label": _LABELS.float()}, "number", "--ignore-index 2", "changes nothing with --loss mse"),
        ({"label": _LABELS.float()}, "number", "--label-smoothing 0.1", "changes nothing with --loss mse"),
        ({"label": _LABELS}, "two_inputs", "--inputs numbers=numbers,numbers=label", "'numbers' twice"),
    ],
)
def test_what_does_not_fit_is_one_line(
    fields: dict[str, Tensor], model: str, given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _data(tmp_path, numbers=_NUMBERS, **fields)
    assert said in _fails(capsys, tmp_path, data, model, *given.split())


def test_tokens_and_targets_beyond_the_model_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beyond = _IDS.clone()
    beyond[-1, -1] = 7
    common = ("tokens", "--loss", "next-token", "--eval-every", "0")
    data = _data(tmp_path, input_ids=beyond, targets=_IDS)
    assert "tokens up to 7 but the model's largest embedding has 5" in _fails(capsys, tmp_path, data, *common)
    data = _data(tmp_path, input_ids=_IDS, targets=beyond)
    assert "labels up to 7 but the model has 5 outputs" in _fails(capsys, tmp_path, data, *common)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"others": _NUMBERS, "label": _LABELS}, "has no field 'numbers'"),
        ({"numbers": _NUMBERS.long(), "label": _LABELS}, "int64 in --val"),
        ({"numbers": _NUMBERS[:, :5], "label": _LABELS}, "can't run on input [4, 5]"),
        ({"numbers": _NUMBERS}, "no label"),
    ],
)
def test_other_fields_of_the_validation_data_are_one_line(
    fields: dict[str, Tensor], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, val = _data(tmp_path, numbers=_NUMBERS, label=_LABELS), _data(tmp_path, "val", **fields)
    assert said in _fails(capsys, tmp_path, data, "classifier", "--val", val)


def test_the_validation_data_may_name_its_target_in_another_way(tmp_path: Path) -> None:
    data = _data(tmp_path, numbers=_NUMBERS, label=_LABELS)
    val = _data(tmp_path, "val", numbers=_NUMBERS[:7], labels=_LABELS[:7])
    run = _train(tmp_path, data, placement="0:0.0:1", val=val)
    assert run.evaluations[0].samples == 7


@pytest.mark.parametrize("loss", ["negative", "infinite"])
def test_a_count_that_is_none_is_one_line(loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _data(tmp_path, numbers=_NUMBERS, label=_LABELS)
    said = fails(capsys, "train", *_options(tmp_path, data), "--loss", f"{HERE}:{loss}")
    assert "as its count (batch 0, microbatch 0)" in said and "at least 0" in said


def _train(folder: Path, data: str, **options: Any) -> stagewright.Result:
    common = {"batch": 8, "microbatches": 2, "steps": 3, "shuffle": False, "emulate": True, "precision": "fp64"}
    return stagewright.train(
        model=f"{HERE}:classifier", data=data, runs=str(folder / "runs"), monitor_every=0, **common | options
    )


@pytest.mark.parametrize("ignored", [-100, 255, -1])
def test_labels_that_do_not_count_leave_the_mean_of_the_others(ignored: int, tmp_path: Path) -> None:
    """Where samples have one label each, microbatches count unequally many; the first of all counts none."""
    labels = torch.where(_LABELS == 1, ignored, _LABELS)
    labels[:4] = ignored
    data = _data(tmp_path, numbers=_NUMBERS, label=labels)
    given = {} if ignored == -100 else {"ignore_index": ignored}
    run = _train(tmp_path, data, eval_every=0, metrics="top1,iou,perplexity", **given)

    torch.manual_seed(0)
    model = classifier().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0)
    losses = []
    for batch in range(3):
        part = slice(batch * 8, batch * 8 + 8)
        loss = functional.cross_entropy(model(_NUMBERS[part].double()), labels[part], ignore_index=ignored)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    torch.testing.assert_close([step.loss for step in run.steps], losses, rtol=1e-9, atol=0)
    outputs = model(_NUMBERS.double()).detach()
    kept = labels != ignored
    expected = functional.cross_entropy(outputs[kept], labels[kept])
    (evaluated,) = run.evaluations
    assert evaluated.loss == pytest.approx(float(expected), rel=1e-9)
    assert evaluated.metrics["top1"] == pytest.approx(float((outputs.argmax(1) == labels)[kept].double().mean()))
    assert evaluated.metrics["perplexity"] == pytest.approx(float(expected.exp()))


def test_tuples_are_taken_by_position_and_named_fields_by_name() -> None:
    config, one = make_config({}), torch.ones(2)
    triples = DatasetSource([(one, one, 1)], "triples")
    named = DatasetSource([{"numbers": one, "other": one, "target": 1}], "named")
    assert bind(two_inputs(), ("input0", "input1", "target"), triples, config) == Binding(("input0", "input1"))
    names = ("numbers", "other")
    assert bind(two_inputs(), (*names, "target"), named, config) == Binding(names, names)


def test_a_single_field_goes_to_the_parameter_of_its_name() -> None:
    """As `pixel_values` of a model whose first parameter is a text."""
    for field, names in (("other", ("other",)), ("numbers", ()), ("images", ())):
        source = DatasetSource([{field: torch.ones(2), "target": 1}], "one")
        assert bind(two_inputs(), (field, "target"), source, make_config({})) == Binding((field,), names)
