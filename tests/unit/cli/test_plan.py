"""`stagewright plan` and `stagewright value`: plans, prices, profiles, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import fails, prints


def test_plan_writes_a_file_for_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    out = prints(capsys, "plan", "vgg16", "--cluster", "rtx-2080ti-4", "--batch", "64", "-o", str(file))
    assert "x dp" in out and "dp 4" in out and "train --model vgg16 --plan" in out
    assert json.loads(file.read_text())["batch"] == 64


def test_value_shows_prices_and_their_dates(capsys: pytest.CaptureFixture[str]) -> None:
    clusters = ["--cluster", "rtx-2080ti-4", "--cluster", "rtx-4090-1", "--precision", "fp16"]
    first, second = json.loads(prints(capsys, "value", "resnet50", *clusters, "--json"))["clusters"]
    assert (first["usd"], second["usd"]) == (1360, 1770)
    assert first["per_dollar"] == pytest.approx(first["images_per_second"] / 1360)
    assert "2023-07" in first["prices"][0]
    dearer = json.loads(prints(capsys, "value", "resnet50", *clusters, "--price", "rtx-2080ti-22=1000", "--json"))
    assert dearer["clusters"][0]["usd"] == 4000


def test_value_and_plan_warn_about_uncalibrated_devices(
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "vgg16", "--cluster", "titan-v", "--batch", "8"], ["unknown cluster", "titan-v-8"]),
        (["simulate", "vgg16", "--batch", "8"], ["no cluster", "--profile"]),
        (
            ["simulate", "vgg16", "--batch", "8", "--profile", "f", "--devices", "4"],
            ["--devices 4", "without --cluster"],
        ),
        (
            ["plan", "vgg16", "--batch", "8", "--profile", "f", "--software", "oneflow"],
            ["--software oneflow", "--profile f"],
        ),
        (["plan", "vgg16", "--batch", "8", "--profile", "f", "--data", "imagenet"], ["--data imagenet", "--profile f"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8"], ["--batch", "--microbatch"]),
        (["simulate", "vgg17", "--cluster", "titan-v-8", "--batch", "8"], ["vgg17", "vgg19"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--devices", "9"], ["9 devices", "has 8"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--placement", "0:8"], ["0:8", "0:7"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--software", "torch"], ["torch", "pytorch"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--plan", "/no/file"], ["/no/file"]),
        (["simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--profile", "/no/file"], ["/no/file"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "0"], ["--batch is 0"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--microbatches", "0"], ["--microbatches is 0"]),
        (["plan", "vgg16", "--cluster", "titan-v-8", "--batch", "8", "--microbatches", "16"], ["16", "2, 4, 8"]),
        (["value", "vgg16"], ["--cluster"]),
        (["value", "vgg16", "--cluster", "titan-v-8", "--price", "titan-v"], ["DEVICE=USD"]),
        (["value", "vgg16", "--cluster", "titan-v-8", "--price", "titan-x=9"], ["'titan-x'", "have titan-v"]),
        (["profile", "vgg-small", "--samples", "a"], ["'a'", "8,16"]),
        (["profile", "vgg-small", "--together", "0"], ["--together is 0"]),
        (["profile", "vgg-small", "--pipedream", "/no/file", "--samples", "8"], ["/no/file"]),
    ],
)
def test_wrong_options_of_planning_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = fails(capsys, *arguments)
    assert all(word in line for word in words), line


def test_plans_with_an_imported_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_refuses_the_profile_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "p.json")
    prints(capsys, "profile", "tests.models:plain", "--image", "8", "--samples", "2,4", "-o", file)
    line = fails(capsys, "simulate", "vgg-small", "--profile", file, "--cluster", "titan-v-8", "--batch", "8")
    assert "the model is vgg-small" in line
    run = ["train", "--model", "vgg-small", "--batch", "64", "--microbatches", "1"]
    prints(capsys, "profile", "vgg-small", "--samples", "2,4", "-o", file)
    runs = tmp_path / "runs"
    assert "2 to 4 samples" in fails(capsys, *run, "--profile", file, "--runs", str(runs), "--steps", "1")
    assert not runs.exists()
