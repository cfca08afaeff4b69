"""Suites of configurations end to end, emulated and tiny: what they leave behind, never how fast they are."""

from __future__ import annotations

import getpass
import json
import re
import shlex
import socket
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.bench.pages import show, summary
from stagewright.bench.result import Outcome, PublishedRow, read_outcome
from stagewright.bench.run import Measurements
from stagewright.bench.statistics import Interval
from stagewright.cli.bench import Request, run_bench
from stagewright.cli.main import main
from stagewright.report.html import as_html
from stagewright.report.page import Page

SUITE = """
title = "Tiny"
repeats = 3
steps = 6
[options]
model = { name = "resnet8" }
data = { samples = 64 }
plan = { batch = 8, microbatches = 2 }
run = { emulate = true }
[[group]]
name = "ResNet-8"
trial = [
  { name = "dp", options = { plan = { mode = "dp", placement = "0:0-1" } } },
  { name = "stale", options = { plan = { mode = "stale", staleness = 1, placement = "0:0.0:1", cut = "layer3" } } },
]
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suite") / "tiny.toml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def folder(suite: Path) -> Path:
    """What a whole anonymised bench leaves."""
    main(["bench", str(suite), "--anonymise", "--runs", str(suite.parent / "runs"), "--json"])
    (found,) = (suite.parent / "runs").iterdir()
    return found


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Outcome:
    return read_outcome(folder)


def test_a_bench_leaves_its_files_and_nothing_else(folder: Path) -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-bench-tiny", folder.name)
    assert {path.name for path in folder.iterdir()} == {"bench.json", "report.md", "report.html", "logs.zip"}


def test_every_repeat_of_every_configuration_is_there(outcome: Outcome) -> None:
    assert [row.name for row in outcome.rows] == ["dp", "stale"] and outcome.is_whole
    for row in outcome.rows:
        assert row.kind == "measured" and len(row.repeats) == 3 and row.rate is not None
        assert row.rate.low <= row.rate.value <= row.rate.high
        assert all(len(repeat.times) == 6 and repeat.rate > 0 for repeat in row.repeats)
        assert len({repeat.loss for repeat in row.repeats}) == 1, "the same work has the same loss"
    base, stale = outcome.rows
    assert base.speedup is not None and base.speedup.value == 1.0 and stale.speedup is not None
    assert (
        stale.cuts == ("layer3.0.conv1",)
        and stale.versions == (2, 1)
        and stale.step_lines[0].startswith("epoch 1  step 1/6")
    )


def test_the_logs_hold_what_each_run_left(folder: Path) -> None:
    with zipfile.ZipFile(folder / "logs.zip") as file:
        names = {name.partition("/")[2] for name in file.namelist()}
        assert file.testzip() is None and not names & {".lock", "report.html", "ranks/0.at"}
    assert {"config.toml", "metrics.jsonl", "summary.json", "log.txt", "output.txt", "env.json"} <= names


def test_the_report_has_what_the_published_ones_have(folder: Path, outcome: Outcome) -> None:
    text = (folder / "report.md").read_text()
    for heading in ("## ResNet-8: configuration", "## Every repeat", "## Environment", "## Commands"):
        assert heading in text
    assert "memory by stage, MiB" in text and "ImageNet epoch, s" in text
    assert "stagewright train --model resnet8 --samples 64 --placement 0:0.0:1 --cut layer3 --mode stale" in text
    for row in outcome.rows:
        assert all(f"{repeat.rate:,.1f}" in text for repeat in row.repeats)
    page = (folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>") and "stale" in page


def secrets() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "home": str(Path.home()),
        "folder": str(Path.cwd()),
        "source": str(Path(__file__).parents[3]),
    }


def test_an_anonymised_bench_tells_of_nobody(folder: Path, outcome: Outcome) -> None:
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".zip"}
    for asset in re.findall(r"<(style|script)>(.*?)</\1>", as_html(Page("", ())), re.DOTALL):
        texts["report.html"] = texts["report.html"].replace(asset[1], "")  # the same in every page
    with zipfile.ZipFile(folder / "logs.zip") as file:
        texts |= {f"logs.zip/{name}": name + "\n" + file.read(name).decode() for name in file.namelist()}
    for name, text in texts.items():
        for what, secret in secrets().items():
            assert not re.search(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", text), f"{what} in {name}"
        assert str(folder.parent) not in text, f"a path in {name}"
        assert not re.search(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", text), f"a UUID in {name}"
    assert outcome.is_anonymised and "--anonymise" in outcome.command


def test_without_it_the_logs_are_as_they_were(suite: Path, tmp_path: Path) -> None:
    run_bench(Request(str(suite), repeats=1, steps=1, only="dp", runs=str(tmp_path), as_json=True))
    (folder,) = tmp_path.iterdir()
    with zipfile.ZipFile(folder / "logs.zip") as file:
        (summary,) = [name for name in file.namelist() if name.endswith("summary.json")]
        assert json.loads(file.read(summary))["folder"].startswith(str(tmp_path))


def test_a_configuration_that_fails_does_not_take_the_others_with_it(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text(SUITE.replace('cut = "layer3"', 'cut = "nowhere"'))
    with pytest.raises(SystemExit) as caught:
        main(["bench", str(broken), "--repeats", "1", "--steps", "2", "--runs", str(tmp_path / "runs")])
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert caught.value.code == 2 and "1 of 2 configurations failed" in last and "nowhere" in last
    (folder,) = (tmp_path / "runs").iterdir()
    rows = read_outcome(folder).rows
    assert [row.kind for row in rows] == ["measured", "failed"] and "dp" in printed.out


def test_an_interrupted_bench_keeps_what_it_has(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stagewright.bench import run as rounds

    take, taken = rounds.run_once, []

    def interrupted(turn: Measurements, number: int, folder: Path) -> None:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(number)
        take(turn, number, folder)

    monkeypatch.setattr(rounds, "run_once", interrupted)
    with pytest.raises(SystemExit):
        main(["bench", str(suite), "--steps", "2", "--runs", str(tmp_path)])
    (folder,) = tmp_path.iterdir()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"stagewright: interrupted after 2 runs; nothing is left running; what was measured is in {folder}"
    outcome = read_outcome(folder)
    assert not outcome.is_whole and [len(row.repeats) for row in outcome.rows] == [1, 1]
    assert "interrupted" in (folder / "report.md").read_text() and (folder / "logs.zip").is_file()
    assert not (folder / "runs").exists()


def test_a_busy_machine_and_rounds_that_were_not_run_are_told(outcome: Outcome) -> None:
    repeats = tuple(replace(repeat, others=1.5) for repeat in outcome.rows[0].repeats)
    busy = replace(outcome, rows=(replace(outcome.rows[0], repeats=repeats),), cores=2, repeats=5)
    lines = list(summary(busy))
    assert "Only 3 of 5 repeats fit the time limit of the suite." in lines
    assert "Warning: other processes kept 1.5 of 2 cores busy; repeat the bench on an idle machine." in lines
    assert not [line for line in summary(replace(busy, cores=16, repeats=3)) if "repeats" in line or "cores" in line]


def test_a_command_in_a_report_is_what_a_shell_takes() -> None:
    request = Request(
        "learning",
        data="tar:/data/a b/*.tar",
        overrides=({"run": {"device": "cuda"}},),
        only="lag 1",
        seeds=2,
        target=91.5,
        reuse=("runs/x",),
        real=True,
    )
    asked = ["--only", "lag 1", "--data", "tar:/data/a b/*.tar", "--set", 'run.device="cuda"', "--seeds", "2"]
    more = ["--target", "91.5", "--reuse", "runs/x", "--real"]
    assert shlex.split(request.command) == ["stagewright", "bench", "learning", *asked, *more]


def test_what_is_shown_fits_80_columns(outcome: Outcome, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    rows = tuple(replace(row, outliers=(0,)) for row in outcome.rows)
    show(Console(width=80), replace(outcome, rows=rows), Path("runs/x"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80 and "*: a repeat is an outlier" in printed


def test_published_runs_are_shown_beside_what_is_predicted_of_them(
    outcome: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    run = PublishedRow(
        "OneFlow dev_ssp", "vgg16", "titan-v-8", "dp", "synthetic", "fp32", "224", 708.4, 727.8, 0.01, False, (), (), ()
    )
    point = Interval(100.0, 100.0, 100.0)
    rows = tuple(replace(row, kind="predicted", rate=point, speedup=point) for row in outcome.rows)
    show(Console(width=80), replace(outcome, rows=rows, published=(run, replace(run, published=None))), Path("runs/x"))
    printed = capsys.readouterr().out
    told = [" ".join(line.split()) for line in printed.splitlines() if line.startswith("OneFlow")]
    assert told == ["OneFlow dev_ssp, vgg16, dp 224, synthetic 728 708p -2.7%"]
    assert "interval" not in printed, "a prediction is a point"
