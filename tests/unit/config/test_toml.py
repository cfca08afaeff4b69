"""Configurations from TOML: renamed keys are refused from users, and read from what older versions saved."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stagewright
from stagewright.cli.main import main
from stagewright.config.sections import Config, options
from stagewright.config.toml import (
    as_tables,
    as_toml,
    changed_keys,
    make_config,
    read_toml,
    toml_value,
    with_new_names,
)
from stagewright.run.folder import newest
from stagewright.run.resume import resumed_config
from stagewright.runtime.checkpoint.folder import list_folders
from stagewright.runtime.checkpoint.format import MANIFEST, read_manifest

OPTIONS: dict[str, Any] = {
    "image": 8, "samples": 32, "batch": 8, "placement": "0:0.0:1", "mode": "stale", "emulate": True, "steps": 4,
    "checkpoint_every": 2, "keep": 0, "monitor_every": 0,
}  # fmt: skip


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """A run folder with shares of operations, as a version wrote it that called them weights."""
    run = stagewright.train(net, runs=str(tmp_path), shares="3:1", **OPTIONS).folder
    config = run / "config.toml"
    assert 'shares = "3:1"' in config.read_text()
    config.write_text(config.read_text().replace("shares =", "weights ="))
    for folder in list_folders(run):
        manifest = read_manifest(folder)
        plan = {("weights" if name == "shares" else name): value for name, value in manifest.config["plan"].items()}
        old = replace(manifest, config={**manifest.config, "plan": plan})
        (folder / MANIFEST).write_text(old.as_json())
        assert '"weights": "3:1"' in (folder / MANIFEST).read_text()
    return run


def test_resumes_a_run_that_was_saved_with_old_names(old_run: Path, tmp_path: Path) -> None:
    assert resumed_config({"run": {"resume": str(old_run)}}).plan.shares == "3:1"
    copy = shutil.copytree(old_run, tmp_path / "copy")
    resumed = stagewright.train(resume=str(old_run), steps=6, export=str(tmp_path / "resumed.safetensors"))
    whole = stagewright.train(
        net,
        runs=str(tmp_path / "whole"),
        shares="3:1",
        export=str(tmp_path / "w.safetensors"),
        **(OPTIONS | {"steps": 6}),
    )
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, resumed.weights()[name])
    main(["report", str(copy)])
    main(["checkpoint", "export", str(copy), str(tmp_path / "exported.safetensors")])


def test_trains_by_the_config_of_an_old_run_folder(old_run: Path, tmp_path: Path) -> None:
    main(["train", "--config", str(old_run / "config.toml"), "--runs", str(tmp_path / "again")])
    again = newest((tmp_path / "again").iterdir())
    assert read_toml(str(again / "config.toml"))["plan"]["shares"] == "3:1"


def test_refuses_old_names_from_users_in_one_line_with_the_new_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[plan]\nplacement = "0:0.0:1"\nweights = "1:1"\n')
    suite = tmp_path / "suite.toml"
    suite.write_text(
        'title = "t"\n[[group]]\nname = "g"\n[[group.trial]]\nname = "c"\noptions = { plan = { weights = "1:1" } }\n'
    )
    for words in (
        ["train", "--weights", "1:1"],
        ["train", "--weights=1:1"],
        ["schedule", "--weights", "1:1"],
        ["simulate", "vgg16", "--cluster", "titan-v-8", "--weights", "1:1"],
        ["train", "--config", str(file)],
        ["train", "--set", "plan.weights=1:1"],
        ["bench", str(suite), "--runs", str(tmp_path)],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert ended.value.code == 2 and "weights" in line and "shares" in line, line
    with pytest.raises(ValueError, match=r"weights.*shares"):
        stagewright.train(net, weights="1:1")


def test_new_names_replace_old_ones_in_their_section_only() -> None:
    old = {"plan": {"weights": "1:1", "batch": 8}, "run": {"weights": 3}}
    assert with_new_names({"plan": 3}) == {"plan": 3}
    assert with_new_names(old) == {"plan": {"shares": "1:1", "batch": 8}, "run": {"weights": 3}}


def test_toml_reads_back_to_an_equal_configuration(tmp_path: Path) -> None:
    config = make_config({"model": {"name": 'a"b\\c\n\U000f0000'}, "plan": {"shares": "11:7"}, "run": {"steps": 3}})
    file = tmp_path / "config.toml"
    file.write_text(as_toml(config))
    tables = as_tables(config)
    assert make_config(read_toml(str(file)), given=()) == config == make_config(tables, given=changed_keys(tables))
    assert [toml_value(value) for value in (True, 3, 0.5, 'a"')] == ["true", "3", "0.5", '"a\\""']


def test_unknown_keys_and_tables_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'run\.sede'.*'run\.seed'"):
        make_config({"run": {"sede": 1}})
    with pytest.raises(ValueError, match=r"\[rum\].*'run'"):
        make_config({"rum": {"seed": 1}})
    with pytest.raises(ValueError, match=r"'seed'.*not a table"):
        make_config({"seed": 1})


def test_a_configuration_file_holds_every_option(tmp_path: Path) -> None:
    config = make_config({"run": {"seed": 7, "export": 'a "b" \\ c'}, "plan": {"mode": "sync"}})
    path = tmp_path / "run.toml"
    path.write_text(as_toml(config))
    assert make_config(tomllib.loads(path.read_text()), given=()) == config
    assert {option.key.split(".")[0] for option in options()} == {section.name for section in fields(Config)}
