"""`stagewright train`: bad input is one line and exit code 2, and a run writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stagewright.cli.main import main
from stagewright.model.networks.zoo import build
from stagewright.runtime.process.emulate import Emulation
from tests.commands import fails


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--placement", "0:0-1.x"], ["'x'", "0:0-6"]),
        (["--placement", "0:0,0"], ["0:0", "a second time"]),
        (["--placement", "0:0..0:1"], ["stage 1 empty"]),
        (["--placement", "1:0"], ["machine 1", "has 1"]),
        (["--placement", "0:0.0:1", "--shares", "1:2:3"], ["1:2:3", "3 stages", "has 2"]),
        (["--placement", "0:0", "--shares", "3:1"], ["3:1", "2 stages", "has 1"]),
        (["--placement", "0:0.0:1", "--shares", "1:a"], ["1:a", "3:1"]),
        (["--placement", "0:0.0:1", "--shares", "1:1000"], ["without units", "units; raise"]),
        (["--placement", "0:0.0:1", "--cut", "clasifier"], ["clasifier", "did you mean 'classifier"]),
        (["--placement", "0:0.0:1.0:2", "--cut", "classifier.3,classifier.1"], ["without units"]),
        (["--placement", "0:0.0:1", "--cut", "classifier,avgpool"], ["3 stages", "has 2"]),
        (["--batch", "10", "--microbatches", "3"], ["10", "3", "1, 2, 5"]),
        (["--batch", "64", "--samples", "10"], ["10 samples", "64", "--batch 10"]),
        (["--versions", "2", "--mode", "sync"], ["versions 2", "mode sync"]),
        (["--versions", "2,1", "--placement", "0:0"], ["2 stages", "has 1"]),
        (["--versions", "2,1"], ["--versions 2,1", "--placement is auto"]),
        (["--staleness", "-1"], ["staleness is -1"]),
        (["--model", "vgg61"], ["vgg61", "vgg16", "package.module:factory"]),
        (["--model", "no.such:thing"], ["no.such", "PYTHONPATH"]),
        (["--model", "json:nothing"], ["json", "'nothing'"]),
        (["--model", "tests.unit.cli.test_train:broken_factory"], ["factory raised KeyError", "why"]),
        (["--model", "tests.unit.cli.test_train:no_output"], ["str", "without a tensor"]),
        (["--model", "tests.unit.cli.test_train:too_small"], ["[64, 3, 32, 32]", "3072"]),
        (["--model", "tests.unit.cli.test_train:too_small", "--placement", "0:0.0:1"], ["can't run on input", "3072"]),
        (
            ["--model", "tests.unit.cli.test_train:branching", "--placement", "0:0.0:1"],
            ["reads values", "can't be cut into 2 stages", "nn.Sequential"],
        ),
        (["--data", "tensors:/no/such/file"], ["/no/such/file"]),
        (["--data", "pictures"], ["pictures", "tensors:FILE"]),
        (["--precision", "fp16"], ["fp16", "--device cuda"]),
        (["--precision", "fp99"], ["fp99", "fp32"]),
        (["--device", "cuda"], ["cuda", "cpu"]),
        (["--mode", "fast"], ["fast", "stale"]),
        (["--bach", "3"], ["--bach", "--batch"]),
        (["--set", "run.sede=1"], ["run.sede", "seed"]),
        (["--set", "seed"], ["section.key=value"]),
        (["--set", "run.seed=x"], ["run.seed", "integer"]),
        (["--config", "/no/such.toml"], ["/no/such.toml"]),
        (["--steps", "0"], ["0 batches"]),
        (["--steps", "3", "--epochs", "3"], ["--steps 3", "--epochs 3"]),
        (["--runs", "/proc/nothing"], ["/proc/nothing", "--runs"]),
        (["--lr-schedule", "step"], ["--lr-schedule step", "without --lr-steps"]),
        (["--lr-steps", "2,4"], ["--lr-steps 2,4", "--lr-schedule constant"]),
        (["--nesterov", "--momentum", "0"], ["--nesterov", "--momentum 0", "above 0"]),
        (["--nesterov", "--optimizer", "adamw"], ["--nesterov", "adamw", "sgd"]),
        (["--placement", "0:0.0:1", "--policy", "gpipe", "--depths", "2,1"], ["--depths 2,1", "gpipe"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "train", "--steps", "1", *arguments)
    assert all(word in message for word in words), message


def broken_factory() -> torch.nn.Module:
    raise KeyError("why")


class NoOutput(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> str:  # type: ignore[override]
        return str(super().forward(x.flatten(1)).shape)


def no_output() -> torch.nn.Module:
    return NoOutput(3 * 32 * 32, 10)


class Branching(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


def branching() -> torch.nn.Module:
    return Branching(3 * 32 * 32, 10)


def too_small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(7, 10))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"images": torch.zeros(8, 3, 32, 32), "extra": torch.zeros(8)}, ["'extra'", "takes images", "--inputs"]),
        ({"images": torch.zeros(8, 3, 32, 32)}, ["no label", "--loss"]),
        ({"images": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(7).long()}, ["[8, 3, 32, 32]", "[7]"]),
        ({"images": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8)}, ["[8, 10]", "[8]", "mse"]),
        ({"images": torch.zeros(8, 3, 32, 32), "labels": torch.full((8,), 10)}, ["up to 10", "10 outputs"]),
        ({"images": torch.zeros(8, 3, 32, 32), "labels": torch.full((8,), -1)}, ["-1", "from 0"]),
        ({"images": torch.zeros(8, 1, 32, 32), "labels": torch.zeros(8).long()}, ["[8, 1, 32, 32]", "channels"]),
    ],
)
def test_a_wrong_tensors_file_is_one_line(
    tensors: dict[str, torch.Tensor], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.safetensors"
    save_file(tensors, path)
    message = fails(capsys, "train", "--classes", "10", "--steps", "1", "--batch", "8", "--data", f"tensors:{path}")
    assert all(word in message for word in words), message


def test_a_truncated_tensors_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.safetensors"
    save_file({"images": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8).long()}, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in fails(capsys, "train", "--steps", "1", "--data", f"tensors:{path}")


def test_a_loss_that_is_not_finite_names_stage_batch_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--placement", "0:0.0:1", "--lr", "1e20", "--steps", "9", "--emulate", "--runs", str(tmp_path))
    message = fails(capsys, "train", *arguments)
    assert "batch" in message and "stage 1" in message and "--lr" in message


class Raising(torch.nn.Module):
    """Raises at its second call once training has begun; what it looks at keeps it whole."""

    is_training = False
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Raising.calls += bool(x.isfinite().all()) and Raising.is_training
        if Raising.calls > 1:
            raise RuntimeError("the layer gave up")
        return x


def raising() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10), Raising())


def test_an_exception_in_a_layer_names_stage_and_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Emulation.run

    def run_raising(emulation: Emulation) -> None:
        monkeypatch.setattr(Raising, "is_training", True)
        run(emulation)

    monkeypatch.setattr(Emulation, "run", run_raising)
    model = ("--model", "tests.unit.cli.test_train:raising", "--placement", "0:0.0:1", "--cut", "1", "--batch", "8")
    message = fails(capsys, "train", *model, "--steps", "9", "--emulate", "--runs", str(tmp_path))
    assert "stage 1 replica 0 (rank 1, machine 0) failed at 1F" in message and "the layer gave up" in message
    (log,) = tmp_path.glob("*/log.txt")
    assert str(log) in message
    assert "rank 1:\nTraceback" in log.read_text() and 'raise RuntimeError("the layer gave up")' in log.read_text()


def test_an_exception_of_our_own_keeps_its_traceback_on_the_screen_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Emulation) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Emulation, "run", run)
    with pytest.raises(KeyError, match="a bug"):
        main(["train", "--steps", "2", "--samples", "64", "--emulate", "--runs", str(tmp_path)])
    (log,) = tmp_path.glob("*/log.txt")
    assert "Traceback" in log.read_text() and "KeyError: 'a bug'" in log.read_text()


def test_a_run_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "out" / "trained.safetensors"
    common = ("--placement", "0:0-1.0:2", "--samples", "64", "--batch", "16", "--steps", "3", "--eval-every", "2")
    main(["train", *common, "--emulate", "--runs", str(tmp_path), "--export", str(weights), "--json"])
    summary = json.loads(capsys.readouterr().out)
    folder = Path(summary["folder"])
    names = {"config.toml", "env.json", "plan.json", "metrics.jsonl", "summary.json", "trace.json", "log.txt"}
    names.add("monitor.jsonl")
    assert names <= {path.name for path in folder.iterdir()}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["step", "step", "evaluated", "step", "evaluated"]
    build("vgg-small").load_state_dict(load_file(weights))


def test_refuses_options_that_the_plan_would_ignore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--batch", "8", "--samples", "16", "--steps", "1", "--emulate", "--runs", str(tmp_path)]
    two = [*train, "--placement", "0:0.0:1"]
    assert "--cut flatten changes nothing with --mode dp" in fails(capsys, *two, "--mode", "dp", "--cut", "flatten")
    assert "--shares 1:1 changes nothing with --mode dp" in fails(capsys, *two, "--mode", "dp", "--shares", "1:1")
    assert "--shares 1:2 names 2 stages but the placement has 1" in fails(
        capsys, *train, "--placement", "0:0", "--shares", "1:2"
    )
    depths = ["--mode", "sync", "--policy", "gpipe", "--depths", "1,1"]
    assert "--depths 1,1 changes nothing with --policy gpipe" in fails(capsys, *two, *depths)
    assert not list(tmp_path.iterdir())


OWN_MODELS = """
import sys
from torch import nn

class Own(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.head, self.what = nn.Linear(3 * 32 * 32, 10), what

    def forward(self, x):
        return self.what(self.head(x.flatten(1)))

def empty(): return nn.Sequential()
def without_parameters(): return nn.Flatten()
def argmax(): return Own(lambda x: x.argmax(1))
def text(): return Own(str)
def narrow(): return nn.Linear(7, 10)
def leaves(): sys.exit(3)
"""


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("own_models:empty", "gets a gradient"),
        ("own_models:without_parameters", "gets a gradient"),
        ("own_models:argmax", "gets a gradient"),
        ("own_models:text", "returns str without a tensor"),
        ("own_models:narrow", "can't run on input"),
        ("own_models:leaves", "the factory raised SystemExit: 3"),
        ("own_leaving:any", "importing own_leaving raised SystemExit: 4"),
        ("own_broken:any", "importing own_broken raised NameError"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(
    factory: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("models", OWN_MODELS), ("leaving", "raise SystemExit(4)"), ("broken", "nowhere")):
        (tmp_path / f"own_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in (
        ["plan", factory, "--cluster", "titan-v-8", "--devices", "2", "--batch", "8"],
        ["profile", factory, "--samples", "2"],
        ["train", "--model", factory, "--steps", "1", "--batch", "8"],
    ):
        line = fails(capsys, *command)
        assert words in line and (factory in line or command[0] == "train"), line


REST = '"placement": "0:0", "cuts": [], "microbatches": 1, "versions": [1], "depths": [1]'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["not JSON"]),
        ("{}", ["PlanFile lacks 'batch'"]),
        ('{"mode": "fast"}', ["PlanFile lacks 'batch'"]),
        (f'{{"mode": "x", "batch": 8, {REST}}}', ["unknown mode 'x'"]),
        (f'{{"mode": "dp", "batch": "8", {REST}}}', ["batch", "is not int"]),
        (f'{{"mode": "dp", "batch": -8, {REST}}}', ["-8"]),
    ],
)
def test_refuses_a_broken_plan_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: list[str]
) -> None:
    (tmp_path / "plan.json").write_text(content)
    line = fails(capsys, "train", "--plan", str(tmp_path / "plan.json"))
    assert all(word in line for word in words), line


def test_refuses_options_that_the_plan_file_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert "--mode sync changes nothing with --plan" in fails(
        capsys, "train", "--plan", str(tmp_path / "plan.json"), "--mode", "sync"
    )
