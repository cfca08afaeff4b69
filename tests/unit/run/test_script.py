"""Scripts with a loop of their own: what their launcher says at the end."""

from __future__ import annotations

import pytest

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
