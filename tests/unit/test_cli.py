"""The command line without processes: bad input is one line and exit code 2, options reach the configuration."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stagewright.cli.main import main
from stagewright.config.sections import Config, options
from stagewright.config.toml import as_toml, make_config
from tests.made_runs import make_run


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
        (["--placement", "0:0.0:1", "--shares", "1:2:3"], ["1:2:3", "3 stages", "has 2"]),
        (["--placement", "0:0", "--shares", "3:1"], ["3:1", "2 stages", "has 1"]),
        (["--placement", "0:0.0:1", "--shares", "1:a"], ["1:a", "3:1"]),
        (["--placement", "0:0.0:1", "--shares", "1:1000"], ["without units", "operations"]),
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
        (
            ["--model", "tests.unit.test_cli:branching", "--placement", "0:0.0:1"],
            ["control flow", "can't be cut into 2 stages", "nn.Sequential"],
        ),
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
        (["--lr-schedule", "step"], ["no --lr-steps", "100,200"]),
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


class TwoOutputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x.flatten(1)), x


def two_outputs() -> torch.nn.Module:
    return TwoOutputs()


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


@pytest.mark.parametrize(
    "command",
    [
        ["watch", "A", "B", "--once"],
        ["train", "--resume", "A", "B", "--steps", "6"],
        ["checkpoint", "list", "A", "B"],
        ["checkpoint", "export", "A", "B", "weights.safetensors"],
    ],
    ids=" ".join,
)
def test_several_runs_in_the_place_of_one(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, older = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    os.utime(older / "plan.json", (1, 1))
    places = {"A": str(newer), "B": str(older)}
    error = fails(capsys, *(places.get(word, word) for word in command))
    assert error == f"stagewright: 2 runs match; give one, such as {newer}\n"


def test_an_argument_too_many_is_no_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(make_run(tmp_path / "a"))
    assert f"unexpected argument {run}" in fails(capsys, "compare", run, run, run)
    assert "unknown option --onec" in fails(capsys, "watch", "x" * 5000, "--onec")


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
    drawn = prints(capsys, "schedule", *plan, "--batches", "1")
    assert drawn.startswith("rank 0 F0 F1 ···B0 ···B1") and "time 6" in drawn and "rank 1:" not in drawn
    both = prints(capsys, "schedule", *plan, "--batches", "1", "--programs")
    assert both.startswith(drawn)
    assert "rank 1: 1RA0<0 1F0@0 1B0@0 1SG0>0 1RA1<0 1F1@0 1B1@0 1SG1>0 1U@0" in both


def test_warnings_stay_out_of_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--placement", "0:0-2.0:3", "--mode", "sync", "--batch", "8", "--microbatches", "2")
    for command in (["schedule"], ["simulate", "vgg-small", "--cluster", "titan-v-8"]):
        main([*command, *few, "--json"])
        said = capsys.readouterr()
        assert json.loads(said.out)["plan"]["microbatches"] == 2
        assert said.err.startswith("warning: 2 microbatches for 3 replicas")


def test_the_schedule_of_a_plan_file_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--placement", "0:0-1.0:2", "--batch", "12", "--microbatches", "6", "--staleness", "1", "--json")
    asked = json.loads(prints(capsys, "schedule", *options))
    (tmp_path / "plan.json").write_text(json.dumps(asked["plan"]))
    drawn = ("schedule", "--plan", str(tmp_path / "plan.json"))
    assert json.loads(prints(capsys, *drawn, "--json")) == asked
    assert "plan.batch" in fails(capsys, *drawn, "--batch", "24")
    assert "--profile p.json" in fails(capsys, *drawn, "--profile", "p.json")


def test_numbers_without_room_are_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = ("--placement", "0:0.0:1", "--mode", "stale", "--batch", "14", "--microbatches", "14")
    row = prints(capsys, "schedule", *plan, "--backward", "2,2", "--batches", "1").splitlines()[0]
    numbers = [int(number) for number in re.findall(r"F(\d+)", row)]
    assert numbers == sorted(set(numbers)) and len(numbers) < row.count("F") == 14


def test_an_emulated_run_leaves_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    from stagewright.model.zoo import build

    build("vgg-small").load_state_dict(load_file(weights))


def prints(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


PUBLISHED = ["simulate", "vgg16", "--cluster", "titan-v-8", "--software", "oneflow", "--batch", "224"]


def test_simulate_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--mode", "stale", "--placement", "0:0-6.0:7", "--shares", "11:7", "--json"]
    found = json.loads(prints(capsys, *PUBLISHED, *plan))
    assert found["epoch_seconds"] == pytest.approx(1_281_167 / found["images_per_second"])
    assert len(found["memory_mib"]) == 8 and 0 <= found["bubble"] < 1
    assert found["plan"]["cuts"] == ["features.24"] and found["plan"]["microbatches"] == 7
    parallel = json.loads(prints(capsys, *PUBLISHED, "--mode", "dp", "--json"))
    assert found["images_per_second"] > 1.3 * parallel["images_per_second"]


def test_simulate_takes_the_published_forms(capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--placement", "0:0-7,1:0-7.0:0-7,1:0-7", "--shares", "1:27", "--mode", "stale", "--batch", "1024"]
    resnet = ["simulate", "resnet50", "--cluster", "titan-v-16", "--software", "oneflow", "--data", "imagenet"]
    assert json.loads(prints(capsys, *resnet, *both, "--json"))["images_per_second"] > 3000
    sizes = ["--devices", "16", "--batch", "4096", "--precision", "fp16", "--json"]
    cards = json.loads(prints(capsys, "simulate", "resnet50", "--cluster", "v100-32", "--software", "oneflow", *sizes))
    assert len(cards["memory_mib"]) == 16
    alone = [
        "--mode",
        "pipedream",
        "--placement",
        "0:0-6.0:7",
        "--microbatch",
        "256",
        "--software",
        "pipedream",
        "--json",
    ]
    assert json.loads(prints(capsys, "simulate", "alexnet", "--cluster", "titan-v-8", *alone))["images_per_second"] > 0


def test_simulate_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prints(capsys, *PUBLISHED, "--mode", "dp", "--trace", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(8)) and {event["cat"] for event in events} >= {
        "F",
        "B",
        "R",
        "U",
    }


def test_plan_writes_what_train_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    out = prints(capsys, "plan", "vgg16", "--cluster", "rtx-2080ti-4", "--batch", "64", "-o", str(file))
    assert "x dp" in out and "dp 4" in out and "train --model vgg16 --plan" in out
    assert json.loads(file.read_text())["batch"] == 64


def test_value_answers_with_prices_and_their_dates(capsys: pytest.CaptureFixture[str]) -> None:
    clusters = ["--cluster", "rtx-2080ti-4", "--cluster", "rtx-4090-1", "--precision", "fp16"]
    first, second = json.loads(prints(capsys, "value", "resnet50", *clusters, "--json"))["clusters"]
    assert (first["usd"], second["usd"]) == (1360, 1770)
    assert first["per_dollar"] == pytest.approx(first["images_per_second"] / 1360)
    assert "2023-07" in first["prices"][0]
    dearer = json.loads(prints(capsys, "value", "resnet50", *clusters, "--price", "rtx-2080ti-22=1000", "--json"))
    assert dearer["clusters"][0]["usd"] == 4000


def test_value_and_plan_say_how_far_to_trust_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = prints(capsys, "value", "vgg-small", "--cluster", "rtx-4090-4", "--cluster", "titan-v-8", "--batch", "64")
    _, header, first, *_ = shown.splitlines()
    assert header.split()[2] == "lag" and first[: header.index("lag") + 3].split()[-1].isdigit()
    assert "…" not in shown  # a long plan wraps before a number is cut
    assert "fp32 speed of rtx-4090: not calibrated by a measurement" in shown
    planned = prints(capsys, "plan", "vgg-small", "--cluster", "rtx-4090-4", "--batch", "64")
    assert "fp32 speed of rtx-4090: not calibrated by a measurement" in planned
    titan = prints(capsys, "plan", "vgg-small", "--cluster", "titan-v-8", "--devices", "2", "--batch", "64")
    assert "calibrated" not in titan


def test_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = prints(capsys, "cluster", "list").splitlines()
    assert max(map(len, lines)) <= 80
    for words in ("titan-v-16 16 2 x 8 titan-v", "rtx-2080ti-22 22 616", "net-10g 1.1"):
        assert any(" ".join(line.split()).startswith(words) for line in lines), words
    found = json.loads(prints(capsys, "cluster", "list", "--json"))
    (server,) = (entry for entry in found["clusters"] if entry["name"] == "titan-v-16")
    assert server["number"] == 16 and server["links"] == ["pcie3-pix", "pcie3-phb", "pcie3-sys", "net-100g"]
    assert {"rtx-4090", "cpu"} <= {entry["name"] for entry in found["devices"]}
    assert "memory" in {entry["name"] for entry in found["links"]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "vgg16", "--cluster", "titan-v", "--batch", "8"], ["unknown cluster", "titan-v-8"]),
        (["simulate", "vgg16", "--batch", "8"], ["no cluster", "--profile"]),
        (["simulate", "vgg16", "--batch", "8", "--profile", "f", "--devices", "4"], ["--devices 4", "--together 4"]),
        (
            ["plan", "vgg16", "--batch", "8", "--profile", "f", "--software", "oneflow"],
            ["--software oneflow", "--profile f"],
        ),
        (["plan", "vgg16", "--batch", "8", "--profile", "f", "--data", "imagenet"], ["--data imagenet", "--profile f"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8"], ["--batch", "--microbatch"]),
        (["simulate", "vgg17", "--cluster", "titan-v-8", "--batch", "8"], ["vgg17", "vgg16"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--devices", "9"], ["9 devices", "has 8"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--placement", "0:8"], ["0:8", "0:7"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--software", "torch"], ["torch", "pytorch"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--plan", "/no/file"], ["/no/file"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--profile", "/no/file"], ["/no/file"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "0"], ["--batch is 0"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--microbatches", "0"], ["--microbatches is 0"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--microbatches", "16"], ["16", "1 to 8"]),
        (["value", "vgg16"], ["--cluster"]),
        (["value", "vgg16", "--cluster", "titan-v-8", "--price", "titan-v"], ["DEVICE=USD"]),
        (["value", "vgg16", "--cluster", "titan-v-8", "--price", "titan-x=9"], ["'titan-x'", "have titan-v"]),
        (["profile", "vgg-small", "--samples", "a"], ["'a'", "8,16"]),
        (["profile", "vgg-small", "--together", "0"], ["--together is 0"]),
        (["profile", "vgg-small", "--pipedream", "/no/file", "--samples", "8"], ["/no/file"]),
    ],
)
def test_what_planning_commands_refuse(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = fails(capsys, *arguments)
    assert all(word in line for word in words), line


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
def scalar(): return Own(lambda x: x.mean())
def several(): return Own(lambda x: (x, x))
def listed(): return Own(lambda x: [x])
def narrow(): return nn.Linear(7, 10)
def leaves(): sys.exit(3)
"""


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("own_models:empty", "gets a gradient"),
        ("own_models:without_parameters", "gets a gradient"),
        ("own_models:argmax", "gets a gradient"),
        ("own_models:scalar", "shape []"),
        ("own_models:several", "returns tuple"),
        ("own_models:listed", "returns list"),
        ("own_models:narrow", "can't run on input"),
        ("own_models:leaves", "the factory raised SystemExit: 3"),
        ("own_leaving:any", "importing own_leaving raised SystemExit: 4"),
        ("own_broken:any", "importing own_broken raised NameError"),
    ],
)
def test_a_model_that_no_one_can_train_is_one_line(
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


def test_a_terminal_without_unicode_gets_ascii() -> None:
    command = ["schedule", "--placement", "0:0.0:1"]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", *command],
        env=os.environ | ascii_only,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0 and b"F0" in done.stdout and b".." in done.stdout, done.stderr


def test_train_refuses_what_its_layout_would_ignore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--batch", "8", "--samples", "16", "--steps", "1", "--emulate", "--runs", str(tmp_path)]
    two = [*train, "--placement", "0:0.0:1"]
    assert "--cut flatten cuts the model into stages but mode dp" in fails(
        capsys, *two, "--mode", "dp", "--cut", "flatten"
    )
    assert "--shares 1:1 cuts the model into stages but mode dp" in fails(
        capsys, *two, "--mode", "dp", "--shares", "1:1"
    )
    assert "shares 1:2 name 2 stages but the placement has 1" in fails(capsys, *train, "--shares", "1:2")
    depths = ["--mode", "sync", "--policy", "gpipe", "--depths", "1,1"]
    assert "--depths 1,1 was given with --policy gpipe" in fails(capsys, *two, *depths)
    assert not list(tmp_path.iterdir())


STAGED = ["simulate", "vgg-small", "--cluster", "titan-v-8", "--batch", "64", "--placement", "0:0.0:1"]


def test_simulate_keeps_the_stages_of_a_placement(capsys: pytest.CaptureFixture[str]) -> None:
    staged = json.loads(prints(capsys, *STAGED, "--json"))["plan"]
    assert staged["mode"] == "stale" and len(staged["cuts"]) == 1
    whole = json.loads(prints(capsys, *STAGED[:-1], "0:0-1", "--json"))["plan"]
    assert whole["mode"] == "dp"
    assert "'nope'" in fails(capsys, *STAGED, "--cut", "nope")
    assert "names 3 stages" in fails(capsys, *STAGED, "--shares", "1:2:3")
    assert "--shares 1:2 cuts" in fails(capsys, *STAGED, "--mode", "dp", "--shares", "1:2")
    assert "--cut flatten cuts" in fails(capsys, *STAGED[:-1], "0:0-1", "--cut", "flatten")


def test_simulate_takes_the_least_lag_that_fills_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [*STAGED[:-1], "0:0.0:1.0:2.0:3", "--microbatches", "64", "--json"]
    fullest = json.loads(prints(capsys, *stages, "--staleness", "3"))
    found = json.loads(prints(capsys, *stages))
    assert fullest["plan"]["versions"] == [4, 3, 2, 1] and max(found["plan"]["versions"]) < 4
    assert found["bubble"] <= fullest["bubble"] + 0.02


def test_simulate_refuses_what_its_plan_file_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(json.loads(prints(capsys, *STAGED, "--json"))["plan"]))
    alone = [*STAGED[:4], "--plan", str(plan)]
    assert "microbatches" in prints(capsys, *alone)
    for option in (["--batch", "8"], ["--mode", "sync"], ["--placement", "0:0"], ["--staleness", "0"]):
        line = fails(capsys, *alone, *option)
        assert f"{plan} was given with {' '.join(option)}; the file decides that" in line


def test_simulate_names_the_plan_that_does_not_suit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "vgg.json"
    fields = json.loads(prints(capsys, *STAGED, "--cut", "features.7", "--json"))["plan"]
    other = ["simulate", "resnet8", "--cluster", "titan-v-8", "--plan", str(plan)]
    plan.write_text(json.dumps(fields))
    line = fails(capsys, *other)
    assert str(plan) in line and "'features.7'" in line and "resnet8" in line
    assert "--mode sync" in fails(capsys, *other, "--mode", "sync")
    plan.write_text(json.dumps(fields | {"cuts": []}))
    assert str(plan) in fails(capsys, *other)
    plan.write_bytes(b"\xff\xfe\x00")
    assert str(plan) in fails(capsys, *other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the error says is missing")
def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device cpu" in fails(capsys, "profile", "vgg-small", "--device", "cuda")


def test_a_plan_that_does_not_fit_says_which_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = prints(capsys, "simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "2048")
    assert "does not fit: stage 0 replica 0 (rank 0, machine 0) needs" in " ".join(out.split())


def test_an_imported_profile_is_planned_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = "forward_compute_time=2.0, backward_compute_time=4.0, activation_size=1000.0, parameter_size=4000.0"
    graph, profile = tmp_path / "graph.txt", str(tmp_path / "profile.json")
    graph.write_text(
        "".join(f"node{n} -- ReLU -- {numbers}\n" for n in (1, 2, 3)) + "\tnode1 -- node2\n\tnode2 -- node3\n"
    )
    prints(capsys, "profile", "alexnet", "--pipedream", str(graph), "--samples", "32", "-o", profile)
    rest = ["--profile", profile, "--cluster", "titan-v-8", "--devices", "2", "--batch", "64"]
    found = json.loads(prints(capsys, "plan", "alexnet", *rest, "--explain", "node2", "--json"))
    assert found["unit"]["forward"] == pytest.approx(2e-3)
    staged = json.loads(prints(capsys, "simulate", "alexnet", *rest, "--placement", "0:0.0:1", "--json"))
    assert staged["plan"]["cuts"][0] in ("node2", "node3")
    assert "imported as alexnet" in fails(capsys, "plan", "vgg16", *rest)
    run = ["train", "--model", "alexnet", "--placement", "0:0.0:1", "--batch", "2", "--steps", "1"]
    assert "was imported" in fails(capsys, *run, "--profile", profile)
    assert "--output p.json" in fails(capsys, "plan", "alexnet", *rest, "-o", "p.json")
    assert "--cut" in fails(capsys, "simulate", "alexnet", *rest, "--placement", "0:0.0:1", "--cut", "features.3")


REST = '"placement": "0:0", "cuts": [], "microbatches": 1, "versions": [1], "depths": [1]'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["not JSON"]),
        ("{}", ["lacks", "batch"]),
        ('{"mode": "fast"}', ["lacks"]),
        (f'{{"mode": "x", "batch": 8, {REST}}}', ["unknown mode 'x'"]),
        (f'{{"mode": "dp", "batch": "8", {REST}}}', ["whole numbers"]),
        (f'{{"mode": "dp", "batch": -8, {REST}}}', ["-8"]),
    ],
)
def test_a_broken_plan_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: list[str]
) -> None:
    (tmp_path / "plan.json").write_text(content)
    line = fails(capsys, "train", "--plan", str(tmp_path / "plan.json"))
    assert all(word in line for word in words), line


def test_a_plan_file_and_options_that_say_the_same_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.mode" in fails(capsys, "train", "--plan", str(tmp_path / "plan.json"), "--mode", "sync")


def test_another_models_profile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "p.json")
    prints(capsys, "profile", "tests.models:plain", "--image", "8", "--samples", "2,4", "-o", file)
    line = fails(capsys, "simulate", "vgg-small", "--profile", file, "--cluster", "titan-v-8", "--batch", "8")
    assert "the model is vgg-small" in line
    run = ["train", "--model", "vgg-small", "--batch", "64", "--microbatches", "1"]
    prints(capsys, "profile", "vgg-small", "--samples", "2,4", "-o", file)
    runs = tmp_path / "runs"
    assert "2 to 4 samples" in fails(capsys, *run, "--profile", file, "--runs", str(runs), "--steps", "1")
    assert not runs.exists()
