"""Output in a pipe is whole, whatever COLUMNS says; one factory makes the console of every command."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.cli import main
from stagewright.report.live.terminal import say
from tests.commands import prints
from tests.made_runs import make_run


def test_nothing_in_a_pipe_is_wrapped_or_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(make_run(tmp_path / "runs" / "20260101-a"))
    for command in (
        ["cluster", "list"],
        ["report", run],
        ["runs", "--runs", str(tmp_path / "runs")],
    ):
        shown = []
        for columns in ("20", "500"):
            monkeypatch.setenv("COLUMNS", columns)
            shown.append(prints(capsys, *command))
        assert shown[0] == shown[1] and "…" not in shown[0], command
        assert all(line == line.rstrip() for line in shown[0].splitlines()), command


def test_a_terminal_breaks_sentences_between_words_and_neither_paths_nor_commands() -> None:
    file, log = io.StringIO(), io.StringIO()
    path = "/a/path/longer-than-a-line"
    lines = (f"  kept in {path} of runs", "next: stagewright plan resnet50 --try 3")
    say(Console(file=file, width=20, force_terminal=True), *lines)
    say(Console(file=log, width=20), *lines)
    assert log.getvalue().splitlines() == list(lines), "what is no terminal gets whole lines"
    assert file.getvalue().splitlines() == [
        "  kept in",
        f"  {path}",
        "  of runs",
        "next: stagewright plan resnet50 --try 3",
    ]


def test_one_factory_makes_every_console() -> None:
    for path in Path(main.__file__).parent.rglob("*.py"):
        assert " Console(" not in path.read_text().replace("(Console(", " Console("), path
