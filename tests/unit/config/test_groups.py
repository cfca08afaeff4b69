"""Groups as options: texts and tables say the same, and what is wrong with one is one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.command.layers import read_layers
from stagewright.cli.parser import make_parser
from stagewright.config.sections import GroupConfig
from stagewright.config.toml import as_tables, as_toml, changed_keys, make_config, read_toml
from stagewright.errors import UserError

HEAD = GroupConfig("head.*", lr=0.1, weight_decay=0.0)


def groups(*given: Any, **optimizer: Any) -> tuple[GroupConfig, ...]:
    return make_config({"optimizer": {"groups": list(given), **optimizer}}).optimizer.groups


def parsed(*words: str) -> tuple[GroupConfig, ...]:
    command_line = make_parser().parse_args(["train", *words])
    command_line.command.complete(command_line)
    layers, given = read_layers(command_line)
    return make_config(*layers, given=given).optimizer.groups


def test_a_text_and_a_table_are_the_same_group() -> None:
    text, table = "head.*: lr=0.1, weight_decay=0", {"pattern": "head.*", "lr": 0.1, "weight_decay": 0}
    assert groups(text) == groups(table) == groups(HEAD) == (HEAD,)
    assert make_config({"optimizer": {"groups": text}}).optimizer.groups == (HEAD,)  # one may stand alone
    assert str(HEAD) == "head.*:lr=0.1,weight_decay=0"
    (adamw,) = groups("a:b:beta1=0.8,beta2=0.9", name="adamw")
    assert (adamw.pattern, adamw.settings) == ("a:b", {"beta1": 0.8, "beta2": 0.9})


def test_a_command_line_repeats_the_option_and_a_file_has_tables(tmp_path: Path) -> None:
    words = ("--group", "head.*:lr=0.1,weight_decay=0", "--group", "*.bias:momentum=0.5")
    both = (HEAD, GroupConfig("*.bias", momentum=0.5))
    assert parsed(*words) == parsed(*words, "--no-decay", "--weight-decay", "0.1") == both
    file = tmp_path / "run.toml"
    file.write_text('[optimizer]\nlr = 0.5\n[[optimizer.groups]]\npattern = "head.*"\nlr = 0.1\nweight_decay = 0\n')
    tables = read_toml(str(file))
    assert make_config(tables).optimizer.groups == (HEAD,)
    assert changed_keys(tables) == {"optimizer.lr", "optimizer.groups"}
    assert parsed("--config", str(file), "--group", "a:lr=1") == (GroupConfig("a", lr=1.0),)  # the line wins
    assert parsed("--config", str(file), "--set", "optimizer.groups=[]") == ()


def test_a_run_folder_reads_back_to_the_same_groups() -> None:
    config = make_config({"optimizer": {"groups": ['a"b.*:lr=0.25', HEAD], "layer_decay": 0.75}})
    assert make_config(tomllib.loads(as_toml(config)), given=()) == config
    assert make_config(as_tables(config), given=()) == config
    assert changed_keys(as_tables(make_config({}))) == set()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("head.*", "no pattern|not KEY=VALUE"),
        (":lr=1", "no pattern"),
        ("head.*:", "not KEY=VALUE"),
        ("head.*:lr", "'lr' is not KEY=VALUE"),
        ("head.*:lr=1,lr=2", "'lr=2' is given twice"),
        ("head.*:lr=x", "lr is 'x', which is not a number"),
        ("head.*:rate=1", r"head\.\*: unknown setting 'rate'"),
        ("head.*:weight-decay=1", "did you mean 'weight_decay'"),
        ("head.*:lr=-1", r"head\.\*: lr is -1; give at least 0"),
        ("head.*:lr=nan", "lr is nan; give a finite number"),
        ("head.*:momentum=1", "momentum is 1; give at least 0 and below 1"),
        ("head.*:beta1=0.5", "beta1 changes nothing with --optimizer sgd; it needs --optimizer adamw"),
        ("a\0:lr=1", "no parameter's name can match"),
        ({"pattern": "a"}, "a changes nothing; give lr, weight_decay, momentum, beta1 or beta2"),
        ({"pattern": "a", "lr": True}, "lr is True, which is not a number"),
        ({"pattern": 3, "lr": 1}, "no pattern"),
        ({"lr": 1}, "no pattern"),
        (7, "7 has no pattern"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_group_is_one_line(given: Any, why: str) -> None:
    with pytest.raises(UserError, match=rf"^--group .*({why})") as caught:
        groups(given)
    assert "\n" not in str(caught.value)


def test_a_setting_of_the_other_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"with --optimizer adamw; it needs --optimizer sgd, rmsprop or lars"):
        groups("a:lr=1,momentum=0.5", name="adamw")
