"""Scripts with a loop of their own: what their launcher says at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stagewright.api.engine import Engine
from stagewright.cli.main import main
from stagewright.config.toml import make_config
from stagewright.errors import Interrupted, RunFailed, UserError
from stagewright.run import script


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Interrupted("after step 3", "resume it"), "interrupted after step 3; nothing is left running; resume it"),
        (UserError("two ranks"), "two ranks"),
        (RunFailed("rank 1 failed"), "rank 1 failed"),
    ],
)
def test_a_launcher_ends_with_one_line(
    error: BaseException, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ending(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(script, "run", ending)
    monkeypatch.setattr(script, "script_command", lambda: ("python", "train.py"))
    with pytest.raises(SystemExit) as ended:
        script.launch_script(make_config({}))
    assert ended.value.code == 2 and capsys.readouterr().err == f"stagewright: {line}\n"


def keep_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script that runs in this process changes is taken back."""
    monkeypatch.setenv(script.OPTIONS, "{}")
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, [*value] if isinstance(value, list) else value)


def test_a_script_without_an_engine_is_told_that_its_options_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "made", 0)
    keep_process(monkeypatch)
    file = tmp_path / "plain.py"
    file.write_text("from stagewright import Engine; print('hello')")
    main(["run", str(file), "--placement", "0:0.0:1"])
    shown = capsys.readouterr()
    assert shown.out == "hello\n" and "made no stagewright.Engine" in shown.err


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("import stagewright, torch; stagewright.Engine(torch.nn.Linear(2, 2))", 2, ("no --epochs", "own after --")),
        ("raise KeyError('mine')", 1, ("Traceback", "mine")),
    ],
    ids=["of use", "of the script"],
)
def test_an_error_of_use_is_one_line_and_one_of_the_script_has_its_traceback(
    source: str,
    code: int,
    said: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keep_process(monkeypatch)
    file = tmp_path / "own.py"
    file.write_text(source)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--set", "run.epochs=1"])
    error = capsys.readouterr().err
    assert ended.value.code == code and all(part in error for part in said)
    assert (error.count("\n") == 1) is (code == 2)
