"""Which versions of Python and torch a command warns of."""

from __future__ import annotations

import platform

import pytest

from stagewright.cli.main import main
from stagewright.hardware import versions
from stagewright.hardware.versions import TESTED, untested_versions

TOO_OLD, TOO_NEW = "2.3.1", "2.99.0a0+git1234"


def use(monkeypatch: pytest.MonkeyPatch, torch: str, python: str = "3.12.1") -> None:
    monkeypatch.setattr(versions, "version", {"torch": torch}.__getitem__)
    monkeypatch.setattr(platform, "python_version", lambda: python)


@pytest.mark.parametrize("version", [f"{TESTED['torch'][0]}.0", f"{TESTED['torch'][1]}.1+cu130"])
def test_tested_versions_are_silent(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, version)
    assert untested_versions() == []


def test_older_and_newer_ones_are_named_with_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    oldest, newest = TESTED["torch"]
    use(monkeypatch, TOO_OLD, "3.99.0rc1")
    python, torch = untested_versions()
    assert torch.startswith(f"torch 2.3 is older than the tested {oldest};") and f"{oldest} to {newest}" in torch
    assert python.startswith(f"Python 3.99 is newer than the tested {TESTED['Python'][1]};")
    use(monkeypatch, TOO_NEW)
    assert untested_versions()[0].startswith(f"torch 2.99 is newer than the tested {newest};")


def test_only_the_first_of_many_ranks_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TOO_NEW)
    monkeypatch.setenv("RANK", "3")
    assert untested_versions() == []
    monkeypatch.setenv("RANK", "0")
    assert len(untested_versions()) == 1


def test_a_command_warns_once_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, TOO_NEW)
    main(["cluster", "list"])
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: torch 2.99 is newer") and printed.err.count("\n") == 1
    assert "warning" not in printed.out
    with pytest.raises(SystemExit):
        main(["cluster", "list", "--help"])
    assert not capsys.readouterr().err
