"""`stagewright report`, and the report that every run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stagewright
from stagewright.cli.main import main
from stagewright.metrics import Timeline, steady_rate
from stagewright.report.live.watch import Watch
from stagewright.run.report import open_run
from tests.made_runs import make_run


def test_writes_html_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    main(["report", str(folder)])
    out = capsys.readouterr().out
    assert out.startswith("vgg-small, stale 2-1: 20 steps") and f"report: {folder}/report.html" in out
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert (folder / "report.md").read_text().startswith("# vgg-small")
    assert not list(folder.glob(".report*"))


def test_compares_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(make_run(tmp_path / name)) for name in "ab"]
    main(["report", *folders, folders[0], "-o", str(tmp_path / "new" / "both.html"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["title"] == "2 runs: a; b" and answer["html"].endswith("new/both.html")
    assert Path(answer["markdown"]).read_text().startswith("# 2 runs")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], "nowhere is not a run folder: plan.json: No such file or directory"),
        (["nowhere"], "no run is named 'nowhere', and no folder; there are no runs in runs/"),
        (["run", "-o", "page.pdf"], "page.pdf ends in .pdf; give a name that ends in .html"),
        (["run", "-o", "run/plan.json/page.html"], "can't write run/plan.json/page.html"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1


EMULATED = ("train", "--placement", "0:0-1.0:2", "--samples", "32", "--batch", "16", "--emulate", "--json")


def test_a_run_leaves_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*EMULATED, "--steps", "2", "--runs", str(tmp_path)])
    folder = Path(json.loads(capsys.readouterr().out)["folder"])
    assert "2 steps of 16 images" in (folder / "report.md").read_text()
    assert "Memory by part" in (folder / "report.html").read_text()


def test_a_failing_report_does_not_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> Timeline:
        raise RuntimeError("the pen broke\nin many lines")

    monkeypatch.setattr("stagewright.run.train.open_run", fail)
    main([*EMULATED, "--steps", "1", "--runs", str(tmp_path)])
    printed = capsys.readouterr()
    folder = json.loads(printed.out)["folder"]
    assert f"warning: no report: the pen broke; make it later with stagewright report {folder}" in printed.err
    assert not list(Path(folder).glob("report*"))


def test_a_failed_run_leaves_a_report_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*EMULATED, "--steps", "30", "--runs", str(tmp_path), "--lr", "1e12"])
    report = next(tmp_path.glob("*/report.md")).read_text()
    assert "not finished" in report


def test_simulate_writes_a_page_of_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["--mode", "stale", "--placement", "0:0-6.0:7", "--shares", "11:7", "--batch", "224", "--json"]
    main(["simulate", "vgg16", "--cluster", "titan-v-8", *plan, "--report", str(tmp_path / "plan.html")])
    found = json.loads(capsys.readouterr().out)
    text = (tmp_path / "plan.md").read_text()
    assert f"Predicted: {found['images_per_second']:,.0f} images/s" in text
    row = next(line for line in text.splitlines() if line.startswith("| rank 7 (stage 1) |") and "12,066" in line)
    assert f"| {found['memory_mib'][7]:,.0f} |" in row
    assert "8 ranks over" in (tmp_path / "plan.html").read_text()


def test_the_page_of_a_prediction_says_which_rank_lacks_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["--mode", "sync", "--placement", "0:0.0:1", "--shares", "11:7", "--batch", "1024", "--microbatches", "1"]
    main(["simulate", "vgg16", "--cluster", "titan-v-8", *plan, "--json", "--report", str(tmp_path / "plan.html")])
    found = json.loads(capsys.readouterr().out)
    needed, limit = found["memory_mib"][0], found["memory_limit_mib"][0]
    assert needed > limit
    expected = f"It does not fit: rank 0 (stage 0) needs {needed:,.0f} MiB of {limit:,.0f}."
    assert expected in (tmp_path / "plan.md").read_text()


def test_train_report_and_watch_read_the_same_speed(tmp_path: Path) -> None:
    """A run with evaluations, resumed once: the summary's speed is the one that its records give."""
    common = {"model": "tests.models:plain", "classes": 7, "image": 8, "samples": 64, "batch": 16, "microbatches": 2}
    common |= {"placement": "0:0", "mode": "sync", "eval_every": 3, "emulate": True, "runs": str(tmp_path)}
    half = stagewright.train(**common, steps=6, checkpoint_every=6)
    result = stagewright.train(resume=str(half.folder), steps=24)
    run = open_run(result.folder)
    assert run.start == 6 and run.speed is not None
    assert run.speed.rate == pytest.approx(result.summary["images_per_second"])
    interrupted = {6, 9, 12, 15, 18, 21}
    own = [step for step in result.steps if step.batch >= 6]
    assert run.speed == steady_rate(own, 16, interrupted) and len(run.speed.times) == 12
    snapshot = Watch(result.folder, run.rank_map).snapshot(True)
    recent = steady_rate(result.steps[-21:], 16, interrupted)
    assert recent is not None and snapshot.images_per_second == pytest.approx(recent.rate)


def test_what_is_no_text_is_an_escape_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "env.json").write_text('{"python": "\\ud800"}')
    main(["report", str(run)])
    assert "\\ud800" in (run / "report.html").read_text() and "\\ud800" in (run / "report.md").read_text()
