"""`stagewright runs`, and runs by name, id, beginning or `last` in every command that takes one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from stagewright.cli.main import main
from stagewright.errors import RunFailed
from stagewright.run.folder import failure_recorded, find_in_run, find_run, run_lock
from tests.commands import fails, prints, prints_in_terminal
from tests.made_runs import make_run
from tests.models import CLASSES, SIDE


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs in runs/, the newest first in this list: c finished, b stopped, a failed."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    for age, (name, model) in enumerate((("20260303-c", "vgg16"), ("20260202-b", "vgg16"), ("20260101-a", "alexnet"))):
        run = make_run(folder / name, model=model, is_finished=name.endswith("c"))
        when = time.time() - 7200 * age
        os.utime(run / "plan.json", (when, when))
    with pytest.raises(RunFailed), failure_recorded(folder / "20260101-a"):
        raise RunFailed("rank 1 was killed\nand more")
    return folder


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    return [run["id"][-1] for run in json.loads(prints(capsys, "runs", *options, "--json"))["runs"]]


def test_lists_sorts_and_filters(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(prints(capsys, "runs", "--json"))
    newest, _, oldest = found["runs"]
    assert (newest["state"], newest["model"], newest["plan"]) == ("finished", "vgg16", "stale 2-1")
    assert (newest["images_per_second"], newest["unit"]) == (320.0, "images")
    assert (oldest["state"], oldest["fault"]) == ("failed", "rank 1 was killed")
    assert (found["runs"][1]["metric"], found["runs"][1]["value"]) == ("top1", 0.75)
    assert found["bytes"] == sum(run["bytes"] for run in found["runs"]) > 0
    assert listed(capsys, "--sort", "model") == ["a", "c", "b"]
    assert listed(capsys, "--filter", "model=vgg*", "--filter", "state=stopped") == ["b"]
    assert listed(capsys, "--filter", "model=vgg16 state=finished") == ["c"]
    assert "unknown state 'finishd'; did you mean 'finished'?" in fails(capsys, "runs", "--filter", "state=finishd")
    assert "unknown key 'modell'; did you mean 'model'?" in fails(capsys, "runs", "--filter", "modell=x")
    with run_lock(runs / "20260202-b"):
        assert listed(capsys, "--filter", "state=running") == ["b"]


def test_a_run_that_fails_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"train --model tests.models:plain --classes {CLASSES} --image {SIDE} --batch 8 --emulate --steps 4"
    with pytest.raises(SystemExit):
        main([*words.split(), "--placement", "0:0", "--mode", "dp", "--lr", "1e30"])
    error = capsys.readouterr().err
    (run,) = json.loads(prints(capsys, "runs", "--json"))["runs"]
    assert run["state"] == "failed" and run["fault"] and run["fault"] in error


def test_a_terminal_gets_the_columns_that_fit_and_a_pipe_all(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["runs", "name", "last", "a-name-of-many-letters"])
    main(["runs", "tag", "last", "+paper", "+wide"])
    capsys.readouterr()
    narrow = prints_in_terminal(capsys, monkeypatch, 60, "runs").splitlines()
    assert max(len(line.rstrip()) for line in narrow) <= 60 and "images/s" in narrow[0] and "paper" not in narrow[1]
    assert "…" not in "".join(narrow)
    monkeypatch.setenv("COLUMNS", "20")
    first = prints(capsys, "runs").splitlines()[1]
    assert "a-name-of-many-letters" in first and "paper wide" in first and first.rstrip().endswith("20260303-c")


def test_names_and_tags(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "named base" in prints(capsys, "runs", "name", "last", "base")
    assert "tags one two hot" in prints(capsys, "runs", "tag", "base", "+one", "+two", "+hot")
    label = json.loads(prints(capsys, "runs", "tag", "base", "-one", "-hot", "--json"))
    assert label == {"id": "20260303-c", "name": "base", "tags": ["two"]}
    assert listed(capsys, "--filter", "tag=two") == ["c"]
    assert "has no tag 'tow'; did you mean 'two'?" in fails(capsys, "runs", "tag", "base", "-tow")
    assert "already has the name 'base'" in fails(capsys, "runs", "name", "20260101-a", "base")
    assert "already has the name '20260303-c'" in fails(capsys, "runs", "name", "20260101-a", "20260303-c")
    for name in ("last", "a/b", "x" * 65, "a b", "-", "\u00e9"):
        assert "can't be named" in fails(capsys, "runs", "name", "--", "base", name) or name == "-"
    (runs / "20260202-b" / "label.json").write_text('{"name": "../../etc", "tags": ["ok", 3, "a b", "ok"]}')
    assert json.loads(prints(capsys, "runs", "tag", "20260202-b", "--json")) == {
        "id": "20260202-b", "name": None, "tags": ["ok"],
    }  # fmt: skip


def test_a_word_means_a_run(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["runs", "name", "20260303", "base"])
    for word in ("base", "bas", "20260303-c", "20260303", "last", str(runs / "20260303-c"), "runs/20260303-c"):
        assert find_run(word).absolute() == runs / "20260303-c", word
    assert find_in_run("base/best").absolute() == runs / "20260303-c" / "best"
    assert find_in_run("nothing/best") == Path("nothing/best")
    capsys.readouterr()
    assert "did you mean 'base'?" in fails(capsys, "watch", "basse", "--once")
    assert "did you mean 'last'?" in fails(capsys, "watch", "lsat", "--once")
    assert "'2026' begins 3 runs: 20260101-a, 20260202-b, base; give more" in fails(capsys, "report", "2026")
    assert json.loads(prints(capsys, "watch", "base", "--json"))["run"] == "20260303-c"
    assert "320" in prints(capsys, "report", "20260303")
    assert "has no checkpoints" in prints(capsys, "checkpoint", "list", "base")
    assert "no intact checkpoint" in fails(capsys, "train", "--resume", "base")
    assert "did you mean 'base'?" in fails(capsys, "train", "--resume", "bse")
    assert "x" * 5000 not in fails(capsys, "compare", "x" * 5000, "base")
    (tmp_path / "base").mkdir()  # a folder here comes before a name
    assert "base is not a run folder" in fails(capsys, "watch", "base", "--once")


def test_delete_asks_and_refuses_a_run_in_training(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "use --yes" in fails(capsys, "runs", "delete", "last")
    with run_lock(runs / "20260202-b"):
        assert "is being trained, so nothing is deleted" in fails(
            capsys, "runs", "delete", "20260101-a", "20260202-b", "--yes"
        )
    assert "not a run folder" in fails(capsys, "runs", "delete", ".", "--yes")
    assert len(listed(capsys)) == 3

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stagewright.run.folder.shutil.rmtree", killed)
        assert "interrupted" in fails(capsys, "runs", "delete", "20260101-a", "--yes")
    assert listed(capsys) == ["c", "b"] and len(list(runs.iterdir())) == 3
    assert "deleted 1 run" in prints(capsys, "runs", "delete", "20260202-b", "--yes")
    assert [folder.name for folder in runs.iterdir()] == ["20260303-c"]
