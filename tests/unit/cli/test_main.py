"""What ends a command early: unexpected arguments, a signal, a file that can't be written."""

from __future__ import annotations

import gc
import os
import platform
import signal
import time
from pathlib import Path

import pytest

from stagewright.cli import schedule
from stagewright.cli.main import main
from stagewright.errors import Interrupted, RunFailed, UserError
from tests.commands import fails, prints
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


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
@pytest.mark.parametrize(
    "command", [["report"], ["train", "--config"], ["plan", "vgg-small", "--batch", "8", "--profile"]]
)
def test_an_argument_that_can_be_no_path_is_one_line(
    name: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ascii(name) in fails(capsys, *command, name)


def test_an_option_whose_value_is_the_separator_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["plan", "vgg-small", "--batch=--"], ["bench", "quick", "--only=--"], ["report", "x", "-o--"]):
        assert words[-1] in fails(capsys, *words)


def test_an_error_about_a_long_value_has_a_readable_length(capsys: pytest.CaptureFixture[str]) -> None:
    shown = fails(capsys, "train", "--steps", "x" * 100_000)
    assert "--steps" in shown and len(shown) < 1000
    assert "\x1b" not in fails(capsys, "train", "--mode", "\x1b[2J")


def test_a_name_that_is_no_text_is_printed_as_an_escape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.html")
    main(["report", str(make_run(tmp_path / "run")), "-o", path])
    assert "\\udcff.html" in capsys.readouterr().out and Path(path).exists()


@pytest.mark.parametrize(
    ("command", "content"),
    [
        (["train", "--config"], "[run]\nseed = {number}"),
        (["train", "--config"], '[run]\nruns = "a\\u0000b"'),
        (["train", "--plan"], '{{"batch": {number}}}'),
        (["simulate", "vgg-small", "--cluster", "rtx-4090-4", "--plan"], '{{"batch": {number}}}'),
        (["simulate", "vgg-small", "--profile"], '{{"batch": {number}}}'),
        (["plan", "vgg-small", "--batch", "8", "--cluster"], "a = {number}"),
    ],
    ids=lambda part: part[:9] if isinstance(part, str) else " ".join(part),
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_file_with_a_huge_number_or_in_another_encoding_is_one_line(
    command: list[str], content: str, encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.toml"
    path.write_bytes(content.format(number="9" * 5000).encode(encoding))
    assert str(path) in fails(capsys, *command, str(path)) or "u0000" in content


def test_a_command_collects_garbage_again_once_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(schedule, "run", lambda parsed: seen.append(gc.isenabled()))
    gc.unfreeze()
    main(["schedule", "--placement", "0:0"])
    assert seen == [True] and gc.get_freeze_count() > 0


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("a bug"), KeyError("a bug")])
def test_any_other_exception_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(parsed: object) -> None:
        raise error

    monkeypatch.setattr(schedule, "run", run)
    with pytest.raises(type(error), match="a bug"):
        main(["schedule", "--placement", "0:0"])


@pytest.mark.parametrize("error", [UserError("wrong"), RunFailed("wrong"), Interrupted("wrong")])
def test_what_a_user_can_fix_is_one_line(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(parsed: object) -> None:
        raise error

    monkeypatch.setattr(schedule, "run", run)
    assert "wrong" in fails(capsys, "schedule", "--placement", "0:0")


@pytest.mark.parametrize(
    ("system", "shown", "instead"), [("Windows", "Windows", "WSL2"), ("Darwin", "macOS", "Linux machine or container")]
)
def test_another_system_than_linux_is_one_line(
    system: str, shown: str, instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    for command in (["train"], ["plan", "vgg-small"], ["selftest"]):
        line = fails(capsys, *command)
        assert f"stagewright {command[0]} needs Linux and this is {shown}" in line and instead in line


def test_macos_computes_plans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert "images/s" in prints(capsys, "simulate", "vgg-small", "--cluster", "titan-v-8", "--batch", "32")
    assert "dp 2" in prints(capsys, "plan", "vgg-small", "--cluster", "titan-v-8", "--devices", "2", "--batch", "8")
