"""The command line without processes: bad input is one line and exit code 2, options reach the configuration."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stagewright.cli import main
from stagewright.config import Config, as_toml, make_config, options


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--placement", "0:0-1.x"], ["'x'", "0:0-6"]),
        (["--placement", "0:0,0"], ["0:0", "a second time"]),
        (["--placement", "0:0..0:1"], ["stage 1 empty"]),
        (["--placement", "1:0"], ["machine 1", "has 1"]),
        (["--placement", "0:0.0:1", "--weights", "1:2:3"], ["1:2:3", "3 stages", "has 2"]),
        (["--placement", "0:0.0:1", "--weights", "1:a"], ["1:a", "3:1"]),
        (["--placement", "0:0.0:1", "--weights", "1:1000"], ["without units", "operations"]),
        (["--placement", "0:0.0:1", "--cut", "clasifier"], ["clasifier", "near names"]),
        (["--placement", "0:0.0:1.0:2", "--cut", "classifier.3,classifier.1"], ["without units"]),
        (["--placement", "0:0.0:1", "--cut", "classifier,avgpool"], ["3 stages", "has 2"]),
        (["--batch", "10", "--microbatches", "3"], ["10", "3", "1, 2, 5"]),
        (["--batch", "64", "--samples", "10"], ["10 samples", "64", "--batch 10"]),
        (["--versions", "2", "--mode", "sync"], ["versions 2", "mode sync"]),
        (["--versions", "2,1"], ["2 stages", "has 1"]),
        (["--staleness", "-1"], ["staleness is -1"]),
        (["--model", "vgg61"], ["vgg61", "vgg16", "package.module:factory"]),
        (["--model", "no.such:thing"], ["no.such", "PYTHONPATH"]),
        (["--model", "json:nothing"], ["json", "'nothing'"]),
        (["--model", "tests.unit.test_cli:broken_factory"], ["factory raised KeyError", "why"]),
        (["--model", "tests.unit.test_cli:two_outputs"], ["tuple", "one tensor"]),
        (["--model", "tests.unit.test_cli:too_small"], ["[64, 3, 32, 32]", "3072"]),
        (["--data", "tensors:/no/such/file"], ["/no/such/file"]),
        (["--data", "pictures"], ["pictures", "tensors:FILE"]),
        (["--precision", "fp16"], ["fp16", "GPU"]),
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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = fails(capsys, "train", "--steps", "1", *arguments)
    assert all(word in message for word in words), message


def broken_factory() -> torch.nn.Module:
    raise KeyError("why")


class TwoOutputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x.flatten(1)), x


def two_outputs() -> torch.nn.Module:
    return TwoOutputs()


def too_small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(7, 10))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"images": torch.zeros(8, 3, 32, 32), "label": torch.zeros(8).long()}, ["'images' and 'labels'", "label"]),
        ({"images": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(7).long()}, ["[8, 3, 32, 32]", "[7]"]),
        ({"images": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8)}, ["float32", "integers"]),
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
    message = fails(capsys, "train", "--steps", "1", "--batch", "8", "--data", f"tensors:{path}")
    assert all(word in message for word in words), message


def test_a_torn_tensors_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.safetensors"
    save_file({"images": torch.zeros(8, 3, 32, 32), "labels": torch.zeros(8).long()}, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a whole safetensors file" in fails(capsys, "train", "--steps", "1", "--data", f"tensors:{path}")


def test_a_loss_that_is_no_number_names_stage_batch_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--placement", "0:0.0:1", "--lr", "1e20", "--steps", "9", "--emulate", "--runs", str(tmp_path))
    message = fails(capsys, "train", *arguments)
    assert "batch" in message and "stage 1" in message and "--lr" in message


class Raising(torch.nn.Module):
    """Raises once values have come by; what it looks at keeps the tracer out."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Raising.calls += bool(x.isfinite().all())
        if Raising.calls > 3:
            raise RuntimeError("the layer gave up")
        return x


def raising() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10), Raising())


def test_a_layer_that_raises_in_an_emulated_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", "tests.unit.test_cli:raising", "--placement", "0:0.0:1", "--cut", "1", "--batch", "8")
    message = fails(capsys, "train", *model, "--steps", "9", "--emulate", "--runs", str(tmp_path))
    assert "stage 1 replica 0 (rank 1, machine 0) failed at 1F" in message and "the layer gave up" in message


def test_a_configuration_file_holds_every_option(tmp_path: Path) -> None:
    config = make_config({"run": {"seed": 7, "export": 'a "b" \\ c'}, "plan": {"mode": "sync"}})
    path = tmp_path / "run.toml"
    path.write_text(as_toml(config))
    assert make_config(tomllib.loads(path.read_text())) == config
    assert {option.key.split(".")[0] for option in options()} == {section.name for section in fields(Config)}


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[plan]\nplacement = "0:0-2"\nbatch = 6\nmicrobatches = 6\nmode = "sync"\n')
    main(["schedule", "--config", str(path), "--set", "plan.batch=12", "--microbatches", "4", "--json"])
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["placement"], plan["batch"], plan["microbatches"]) == ("0:0-2", 12, 4)


def test_the_schedule_is_printed_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("--placement", "0:0.0:1", "--mode", "sync", "--batch", "4", "--microbatches", "2")
    main(["schedule", *plan, "--batches", "1"])
    out = capsys.readouterr().out
    assert "rank 1: 1RA0<0 1F0@0 1B0@0 1SG0>0 1RA1<0 1F1@0 1B1@0 1SG1>0 1U@0" in out
    assert "rank 0 F0 F1 ···B0 ···B1" in out.replace("\n", " ")
    assert "time 6" in out


def test_an_emulated_run_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "out" / "trained.safetensors"
    common = ("--placement", "0:0-1.0:2", "--samples", "64", "--batch", "16", "--steps", "3", "--eval-every", "2")
    main(["train", *common, "--emulate", "--runs", str(tmp_path), "--export", str(weights), "--json"])
    summary = json.loads(capsys.readouterr().out)
    folder = Path(summary["folder"])
    names = {"config.toml", "env.json", "plan.json", "metrics.jsonl", "summary.json", "trace.json", "log.txt"}
    assert names <= {path.name for path in folder.iterdir()}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["step", "step", "evaluated", "step", "evaluated"]
    from stagewright.model.zoo import build

    build("vgg-small").load_state_dict(load_file(weights))
