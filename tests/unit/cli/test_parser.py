"""The command line's options: written out in full, and the nearest one is named where one is misspelt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagewright.cli.command.layers import read_layers
from stagewright.cli.main import main
from stagewright.cli.parser import AREAS, COMMANDS, make_parser
from stagewright.config.commands import REMOVED
from tests.commands import fails

COMMANDS_BY_NAME = {command.name: command for command in COMMANDS}


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
        for flag in ("--help-all", "--help"):
            with pytest.raises(SystemExit) as ended:
                main([*command, flag])
            text = capsys.readouterr().out
            assert ended.value.code == 0
            yield " ".join((*command, flag)), text
        for name in re.findall(r"^    ([a-z]+)", text, re.MULTILINE):
            yield from helps(*command, name)

    found = dict(helps())
    assert {"train --help", "bench --help", "data convert --help", "cluster import --help"} <= found.keys()
    for command, text in found.items():
        name, _, flag = command.rpartition("--help")
        usage, description, *_ = text.split("\n\n")
        assert usage.startswith(f"usage: stagewright {name}".rstrip()), command
        assert description.rstrip().endswith("."), command
        assert max(map(len, text.splitlines())) <= 80, command
        assert flag or len(text.splitlines()) <= 48, f"the first screen of {command} is long"
    monkeypatch.setenv("COLUMNS", "200")
    for words in (("train", "--help"), ("bench", "--help-all")):
        with pytest.raises(SystemExit):
            main(words)
        assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 98, "wider lines are hard to read"


def test_help_is_short_and_says_how_to_see_all(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(words)
        return capsys.readouterr().out

    first, whole = shown("train", "--help"), shown("train", "--help-all")
    flags = {flag for option in COMMANDS_BY_NAME["train"].takes for flag in option.flags[:1]}
    assert f"--help-all shows all {len(flags)} options" in first and "--nesterov" not in first
    assert flags == {flag for flag in flags if re.search(rf"{flag}\b", whole)}
    assert sorted(name for names in AREAS.values() for name in names.split()) == sorted(
        {name.partition(" ")[0] for name in COMMANDS_BY_NAME}
    )
    for command in COMMANDS:
        assert not set(command.first.split()) - {option.flag for option in command.takes} - {"--explain"}, command.name
        for example in command.examples:
            assert example.startswith(command.name.removesuffix(" list")), example


@pytest.mark.parametrize("removed", REMOVED)
def test_a_removed_option_says_what_takes_its_place(removed: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, *removed.split(), "x")
    assert REMOVED[removed] in said and f"no option {removed.split()[1]} any more" in said


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--hlep"], "unknown option --hlep, did you mean --help?"),
        (["trian"], "unknown command 'trian', did you mean 'train'?"),
        (["data", "inspct", "x"], "unknown action 'inspct', did you mean 'inspect'?"),
        (["plan", "--clustr", "x"], "unknown option --clustr, did you mean --cluster?"),
        (["train", "--mode", "stall"], "argument --mode: 'stall' is unknown, did you mean 'stale'?"),
        (["runs", "--sort", "sizes"], "argument --sort: 'sizes' is unknown, did you mean 'size'?"),
        (["completion", "bsh"], "'bsh' is unknown, did you mean 'bash'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_near_names_are_suggested(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, *words).endswith(f"{meant}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "vgg16", "--batch", "8", "--momentum", "0.9"], "--momentum 0.9 changes nothing without --lr"),
        (
            ["value", "vgg16", "--data", "synthetic", "--profile", "f"],
            "--data synthetic changes nothing with --profile",
        ),
        (["watch", "--serve", "--once"], "--once changes nothing with --serve 0"),
        (["data", "inspect", "pictures", "--seed", str(2**63)], f"--seed is {2**63}; give at least"),
        (["data", "convert", "a", "tar:b", "--per-part", "0"], "--per-part is 0; give at least 1"),
        (["data", "bench", "--images", "8"], "--images is 8; give at least 16"),
        (["bench", "quick", "--repeats", "9" * 10], "give at least 1 and at most 1000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bounds_and_rules_hold_for_every_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, *words)


def test_defaults_are_filled_in_and_do_not_count_as_given() -> None:
    parsed = make_parser().parse_args(["plan", "vgg16", "--batch", "8", "--mode", "sync", "--mode", "stale"])
    parsed.command.complete(parsed)
    assert (parsed.momentum, parsed.nesterov, parsed.software, parsed.output) == (0.9, False, "stagewright", None)
    assert (parsed.modes, parsed.batch, parsed.json) == (["sync", "stale"], 8, False)


def test_a_file_gives_what_it_changes_and_a_flag_whatever_it_is(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[optimizer]\nmomentum = 0.9\nlr = 0.5\n")
    words = ["train", "--config", str(file), "--set", "run.seed=0", "--loss-scale", "65536"]
    layers, given = read_layers(make_parser().parse_args(words))
    assert given == {"optimizer.lr", "run.seed", "run.loss_scale"}
    assert layers[0] == {"optimizer": {"momentum": 0.9, "lr": 0.5}}


def test_options_of_run_come_before_those_of_the_script() -> None:
    """What follows -- belongs to the script."""
    usage = COMMANDS_BY_NAME["run"].screen().partition("\n")[0]
    assert usage == "usage: stagewright run SCRIPT [options] [-- ARGUMENT ...]"
