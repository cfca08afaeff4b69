"""Commands in this process, for tests: what they print, and the one line of their errors."""

from __future__ import annotations

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


def prints(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints on standard output."""
    main(arguments)
    return capsys.readouterr().out
