"""`stagewright simulate` and `stagewright schedule`: predictions, pictures, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagewright.cli.main import main
from tests.commands import fails, prints


def test_draws_and_prints_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("--placement", "0:0.0:1", "--mode", "sync", "--batch", "4", "--microbatches", "2")
    drawn = prints(capsys, "schedule", *plan, "--batches", "1")
    assert drawn.startswith("rank 0 F0 F1 ···B0 ···B1") and "time 6" in drawn and "rank 1:" not in drawn
    both = prints(capsys, "schedule", *plan, "--batches", "1", "--programs")
    assert both.startswith(drawn)
    assert "rank 1: 1RA0<0 1F0@0 1B0@0 1SG0>0 1RA1<0 1F1@0 1B1@0 1SG1>0 1U@0" in both


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[plan]\nplacement = "0:0-2"\nbatch = 6\nmicrobatches = 6\nmode = "sync"\n')
    main(["schedule", "--config", str(path), "--set", "plan.batch=12", "--microbatches", "4", "--json"])
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["placement"], plan["batch"], plan["microbatches"]) == ("0:0-2", 12, 4)


def test_draws_the_schedule_of_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--placement", "0:0-1.0:2", "--batch", "12", "--microbatches", "6", "--staleness", "1", "--json")
    asked = json.loads(prints(capsys, "schedule", *options))
    (tmp_path / "plan.json").write_text(json.dumps(asked["plan"]))
    drawn = ("schedule", "--plan", str(tmp_path / "plan.json"))
    assert json.loads(prints(capsys, *drawn, "--json")) == asked
    assert "--batch 24 changes nothing with --plan" in fails(capsys, *drawn, "--batch", "24")
    assert "--profile p.json" in fails(capsys, *drawn, "--profile", "p.json")


PUBLISHED = ["simulate", "vgg16", "--cluster", "titan-v-8", "--software", "oneflow", "--batch", "224"]


def test_simulate_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--mode", "stale", "--placement", "0:0-6.0:7", "--shares", "11:7", "--json"]
    found = json.loads(prints(capsys, *PUBLISHED, *plan))
    assert found["epoch_seconds"] == pytest.approx(1_281_167 / found["images_per_second"])
    assert len(found["memory_mib"]) == 8 and 0 <= found["bubble"] < 1
    assert found["plan"]["cuts"] == ["features.24"] and found["plan"]["microbatches"] == 7
    parallel = json.loads(prints(capsys, *PUBLISHED, "--mode", "dp", "--json"))
    assert found["images_per_second"] > 1.3 * parallel["images_per_second"]


def test_simulates_the_published_runs(capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--placement", "0:0-7,1:0-7.0:0-7,1:0-7", "--shares", "1:27", "--mode", "stale", "--batch", "1024"]
    resnet = ["simulate", "resnet50", "--cluster", "titan-v-16", "--software", "oneflow", "--data", "imagenet"]
    assert json.loads(prints(capsys, *resnet, *both, "--json"))["images_per_second"] > 3000
    sizes = ["--devices", "16", "--batch", "4096", "--precision", "fp16", "--json"]
    cards = json.loads(prints(capsys, "simulate", "resnet50", "--cluster", "v100-32", "--software", "oneflow", *sizes))
    assert len(cards["memory_mib"]) == 16
    alone = ["--mode", "pipedream", "--placement", "0:0-6.0:7", "--batch", "1792", "--software", "pipedream", "--json"]
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


STAGED = ["simulate", "vgg-small", "--cluster", "titan-v-8", "--batch", "64", "--placement", "0:0.0:1"]


def test_simulate_keeps_the_stages_of_a_placement(capsys: pytest.CaptureFixture[str]) -> None:
    staged = json.loads(prints(capsys, *STAGED, "--json"))["plan"]
    assert staged["mode"] == "stale" and len(staged["cuts"]) == 1
    whole = json.loads(prints(capsys, *STAGED[:-1], "0:0-1", "--json"))["plan"]
    assert whole["mode"] == "dp"
    assert "'nope'" in fails(capsys, *STAGED, "--cut", "nope")
    assert "names 3 stages" in fails(capsys, *STAGED, "--shares", "1:2:3")
    assert "--shares 1:2 changes nothing with --mode dp" in fails(capsys, *STAGED, "--mode", "dp", "--shares", "1:2")
    assert "--cut flatten changes nothing with --mode dp" in fails(capsys, *STAGED[:-1], "0:0-1", "--cut", "flatten")


def test_simulate_chooses_the_least_lag_that_fills_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [*STAGED[:-1], "0:0.0:1.0:2.0:3", "--microbatches", "64", "--json"]
    fullest = json.loads(prints(capsys, *stages, "--staleness", "3"))
    found = json.loads(prints(capsys, *stages))
    assert fullest["plan"]["versions"] == [4, 3, 2, 1] and max(found["plan"]["versions"]) < 4
    assert found["bubble"] <= fullest["bubble"] + 0.02


def test_simulate_refuses_options_that_the_plan_file_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(json.loads(prints(capsys, *STAGED, "--json"))["plan"]))
    alone = [*STAGED[:4], "--plan", str(plan)]
    assert "microbatches" in prints(capsys, *alone)
    for option in (["--batch", "8"], ["--mode", "sync"], ["--placement", "0:0"], ["--staleness", "0"]):
        line = fails(capsys, *alone, *option)
        assert f"{' '.join(option)} changes nothing with --plan {plan}" in line


def test_simulate_names_a_plan_file_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "vgg.json"
    fields = json.loads(prints(capsys, *STAGED, "--cut", "features.7", "--json"))["plan"]
    other = ["simulate", "resnet8", "--cluster", "titan-v-8", "--plan", str(plan)]
    plan.write_text(json.dumps(fields))
    line = fails(capsys, *other)
    assert str(plan) in line and "'features.7'" in line and "another model" in line
    assert "--mode sync" in fails(capsys, *other, "--mode", "sync")
    plan.write_text(json.dumps(fields | {"cuts": []}))
    assert str(plan) in fails(capsys, *other)
    plan.write_bytes(b"\xff\xfe\x00")
    assert str(plan) in fails(capsys, *other)


def test_a_plan_that_does_not_fit_names_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = prints(capsys, "simulate", "vgg16", "--cluster", "titan-v-8", "--batch", "2048")
    assert "does not fit: stage 0 replica 0 (rank 0, machine 0) needs" in " ".join(out.split())
