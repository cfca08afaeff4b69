"""What ends a command early: unexpected arguments, a signal, a file that can't be written."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from stagewright.cli.main import main
from tests.commands import fails
from tests.made_runs import make_run


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
def test_several_runs_where_one_is_expected_are_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, older = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    os.utime(older / "plan.json", (1, 1))
    places = {"A": str(newer), "B": str(older)}
    error = fails(capsys, *(places.get(word, word) for word in command))
    assert error == f"stagewright: 2 runs match; give one, such as {newer}\n"


def test_unexpected_arguments_and_unknown_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(make_run(tmp_path / "a"))
    assert f"unexpected argument {run}" in fails(capsys, "compare", run, run, run)
    assert "unknown option --onec" in fails(capsys, "watch", "x" * 5000, "--onec")


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "vgg-small", "--cluster", "titan-v-8", "--devices", "2", "--batch", "8", "-o", str(tmp_path)])
    line = capsys.readouterr().err
    assert caught.value.code == 2 and line.count("\n") == 1 and f"{tmp_path}: Is a directory" in line


def test_sigterm_ends_a_command_like_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run(parsed: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("stagewright.cli.plan.run", run)
    with pytest.raises(SystemExit) as caught:
        main(["plan", "vgg-small", "--batch", "8"])
    assert caught.value.code == 2 and "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
