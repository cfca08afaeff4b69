"""Commands in this process, for tests: what they print, and the one line of their errors."""

from __future__ import annotations

import re

import pytest

from stagewright.cli.main import main


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error with which a command fails, with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def prints_in_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: str
) -> str:
    """What a command prints in a terminal of so many columns, without styles."""
    with monkeypatch.context() as patch:
        for name, value in {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": str(columns)}.items():
            patch.setenv(name, value)
        return re.sub(r"\x1b\[[0-9;]*m", "", prints(capsys, *arguments))


def prints(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints on standard output."""
    main(arguments)
    return capsys.readouterr().out
