"""Runs that start from a file and freeze a trunk: through checkpoints, resumes, other plans and exports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stagewright
from stagewright.cli.main import main
from stagewright.config.sections import Config
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.model.networks.libraries import is_installed
from stagewright.run.defaults import resolve_model
from stagewright.run.prepare import prepare
from stagewright.runtime.checkpoint.folder import checkpoints_folder
from stagewright.runtime.job import Job
from stagewright.runtime.process.emulate import Emulation
from tests.commands import fails
from tests.keeping import same_bits
from tests.pictures import jpeg, make_folder

OPTIONS: dict[str, Any] = {
    "image": 8, "classes": 7, "samples": 64, "batch": 16, "placement": "0:0-1.0:2", "cut": "head", "mode": "stale",
    "emulate": True, "lr": 0.05, "weight_decay": 0.1, "checkpoint_every": 2, "keep": 0,
}  # fmt: skip
MODEL = "tests.models:normed_residual"
FROZEN = {"freeze": "!head"}


def train(folder: Path, export: str, **settings: Any) -> dict[str, torch.Tensor]:
    model = {} if "resume" in settings else {"model": MODEL}
    options = {} if "resume" in settings else OPTIONS | {"runs": str(folder)}
    stagewright.train(**model, **(options | {"export": str(folder / export)} | settings))
    return load_file(folder / export)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of trained weights, and a run that starts from it with a frozen trunk, four batches long."""
    folder = tmp_path_factory.mktemp("first")
    train(folder, "init.safetensors", steps=2, seed=3, checkpoint_every=0)
    train(folder, "whole.safetensors", steps=4, init=str(folder / "init.safetensors"), **FROZEN)
    return folder


def run_of(folder: Path) -> Path:
    """The newest run in a folder."""
    return max((path.parent for path in folder.glob("*/plan.json")), key=lambda path: path.stat().st_mtime)


@pytest.fixture
def half(first: Path, tmp_path: Path) -> Path:
    """That run as it stood after two batches."""
    run = Path(shutil.copytree(run_of(first), tmp_path / "half"))
    shutil.rmtree(checkpoints_folder(run) / "4")
    return run


def trunk(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("head")}


def test_a_frozen_trunk_is_the_files_bit_for_bit_and_the_head_moves(first: Path) -> None:
    given, whole = load_file(first / "init.safetensors"), load_file(first / "whole.safetensors")
    assert same_bits(trunk(whole), trunk(given)) and not torch.equal(whole["head.weight"], given["head.weight"])


def test_the_run_says_where_its_weights_came_from_and_what_is_frozen(first: Path) -> None:
    job, log = Job.load(run_of(first) / "job.json"), (run_of(first) / "log.txt").read_text()
    assert job.weights is not None and job.weights.source == str(first / "init.safetensors")
    assert job.frozen == sum(tensor.numel() for name, tensor in trunk(load_file(first / "whole.safetensors")).items()
                             if "running" not in name and "tracked" not in name)  # fmt: skip
    assert f"starts from weights of {first / 'init.safetensors'}" in log and f"frozen: {job.frozen:,}" in log


def test_a_resumed_run_has_the_same_bits_without_the_file(first: Path, half: Path, tmp_path: Path) -> None:
    hidden = (first / "init.safetensors").rename(tmp_path / "elsewhere.safetensors")
    try:
        resumed = train(tmp_path, "resumed.safetensors", resume=str(half))
        main(["checkpoint", "export", str(half), str(tmp_path / "exported.safetensors")])
    finally:
        hidden.rename(first / "init.safetensors")
    whole = load_file(first / "whole.safetensors")
    assert same_bits(resumed, whole) and same_bits(load_file(tmp_path / "exported.safetensors"), whole)


def test_another_plan_resumes_with_the_same_trunk(first: Path, half: Path, tmp_path: Path) -> None:
    resumed = train(tmp_path, "resumed.safetensors", resume=str(half), mode="dp", placement="0:0-1", emulate=True)
    assert same_bits(trunk(resumed), trunk(load_file(first / "init.safetensors")))


def test_freezing_more_on_resume_keeps_what_was_trained(half: Path, tmp_path: Path) -> None:
    main(["checkpoint", "export", str(half), str(tmp_path / "before.safetensors")])
    resumed = train(tmp_path, "resumed.safetensors", resume=str(half), freeze="!head.bias")
    before = load_file(tmp_path / "before.safetensors")
    moved = {name for name, tensor in resumed.items() if not torch.equal(tensor, before[name])}
    assert moved == {"head.bias"}


def test_training_what_was_frozen_is_refused(half: Path) -> None:
    with pytest.raises(UserError, match=r"has parameter 'block.*' frozen, .*--freeze"):
        stagewright.train(resume=str(half), freeze="stem")


def test_a_rank_refuses_a_file_that_has_changed(first: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(first / "init.safetensors", tmp_path))
    tables = {
        "model": {"name": MODEL, "init": str(file), "classes": 7},
        "data": {"image": 8, "samples": 16},
        "plan": {"batch": 8},
        "run": {"steps": 1, "runs": str(tmp_path)},
    }
    job = prepare(make_config(tables, given=())).job
    shutil.copy(first / "whole.safetensors", file)
    with pytest.raises(UserError, match=r"has changed since the run was prepared"):
        Emulation(job, lambda event: None)


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--freeze", "hed"], ["--freeze hed names no parameter", "'head"]),
        (["--freeze", "*"], ["--freeze * leaves none of 11 parameters"]),
        (["--init", "gone.safetensors"], ["gone.safetensors", "No such file"]),
    ],
)
def test_wrong_options_are_one_line(options: list[str], pieces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "train", "--model", MODEL, "--image", "8", "--classes", "7", *options)
    assert all(piece in line for piece in pieces)


def test_names_of_packages_resolve_size_classes_and_normalization(tmp_path: Path) -> None:
    if not is_installed("timm"):
        pytest.skip("timm is not installed")
    assert (resolve("timm:test_vit").data.image, resolve("timm:test_vit").model.classes) == (160, 1000)
    images = {"source": make_folder(tmp_path, {f"{name}/0.jpg": jpeg(0, 200, 200) for name in "abc"})}
    config = resolve("timm:test_vit", data=images)
    assert (config.data.image, config.model.classes) == (160, 3)  # of the data
    assert config.data.normalize == "127.5,127.5,127.5/127.5,127.5,127.5"
    config = resolve("timm:test_vit", {"classes": 5}, {**images, "image": 64, "normalize": "published"})
    assert (config.data.image, config.model.classes, config.data.normalize) == (64, 5, "published")
    assert resolve("resnet8", data=images).data.normalize == "imagenet"
    assert resolve("resnet8").data.normalize == "auto"  # nothing to normalize


def resolve(name: str, model: dict[str, Any] | None = None, data: dict[str, Any] | None = None) -> Config:
    return resolve_model(make_config({"model": {"name": name, **(model or {})}, "data": data or {}}, given=()))
