"""The command line's options: written out in full, and the nearest one is named where one is misspelt."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from stagewright.cli.main import main


@pytest.mark.parametrize(
    ("words", "given", "meant"),
    [
        (["train", "--epoch", "3"], "--epoch", "--epochs"),
        (["train", "--step=3"], "--step", "--steps"),
        (["train", "--learn"], "--learn", "--learnable"),
        (["data", "inspect", "pictures", "--see", "3"], "--see", "--seed"),
        (["data", "inspect", "pictures", "--cut", "3"], "--cut", "--cutout"),
        (["bench", "quick", "--repeat", "3"], "--repeat", "--repeats"),
        (["bench", "quick", "--anonym"], "--anonym", "--anonymise"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_abbreviated_option_is_an_error_that_names_the_whole_one(
    words: list[str], given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and line.endswith(f"unknown option {given}, did you mean {meant}?")


def test_only_options_of_the_command_itself_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "inspect", "pictures", "--epoch", "3"])
    error = capsys.readouterr().err
    assert "unknown option --epoch" in error and "did you mean" not in error


def test_help_of_every_command_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def helps(*command: str) -> Iterator[tuple[str, str]]:
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        text = capsys.readouterr().out
        yield " ".join(command), text
        for name in re.findall(r"^    ([a-z]+)", text, re.MULTILINE):
            yield from helps(*command, name)

    found = dict(helps())
    assert {"train", "bench", "data convert", "cluster import"} <= found.keys()
    for command, text in found.items():
        usage, description, *_ = text.split("\n\n")
        assert usage.startswith(f"usage: stagewright {command}".rstrip()) and description.endswith("."), command
        assert max(map(len, text.splitlines())) <= 80, command
