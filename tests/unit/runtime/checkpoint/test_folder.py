"""Checkpoints on the disk: complete or never used; which are kept; a full disk."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stagewright.cli.checkpoint import run_list
from stagewright.events import Saved, Step, Unsaved
from stagewright.runtime.checkpoint import save as saver
from stagewright.runtime.checkpoint.folder import (
    CheckpointError,
    checkpoints_folder,
    clear,
    list_folders,
    newest_intact,
    open_checkpoint,
)
from stagewright.runtime.checkpoint.format import hash_file, write_shard
from stagewright.runtime.job import Job
from stagewright.runtime.process.log import Record
from tests.keeping import KILLS, emulate_job, emulate_keeping, keeping, same_bits, saved_at, write_manifest
from tests.mutations import with_value_changed
from tests.parity import Case, EmulatedRun, emulate, make_job

CASE = Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, microbatches=3, steps=6)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> EmulatedRun:
    return emulate_keeping(CASE, tmp_path_factory.mktemp("kept"), every=2, keep=0)


@pytest.fixture
def run(kept: EmulatedRun, tmp_path: Path) -> Path:
    """A run folder with checkpoints at 2, 4 and 6 to be damaged."""
    return Path(shutil.copytree(kept.job.folder, tmp_path / "run"))


# --- Files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_tensors_reads_back_and_has_its_hash(tmp_path: Path) -> None:
    tensors = {
        "weight": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(7),
        "nothing": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "double": torch.randn(3, dtype=torch.float64).as_strided((2, 2), (1, 1)),
    }
    size, digest = write_shard(tmp_path / "a.safetensors", tensors)
    assert (tmp_path / "a.safetensors").stat().st_size == size and hash_file(tmp_path / "a.safetensors") == digest
    assert same_bits(load_file(tmp_path / "a.safetensors"), {name: t.contiguous() for name, t in tensors.items()})


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def _rename_file_in_manifest(path: Path) -> None:
    _rewrite(path, lambda fields: fields["files"][0].update(name="../4/stage-0.master.safetensors"))


def _rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and its hash with it."""
    fields = json.loads(path.read_text())
    change(fields)
    write_manifest(path, fields)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a bit": ("stage-0.slot-1.safetensors", _flip, "does not match its hash"),
    "an end": ("stage-1.master.safetensors", _cut, "bytes instead of"),
    "a file": ("stage-0.buffers-1.safetensors", Path.unlink, "is missing"),
    "the manifest": ("manifest.json", Path.unlink, "No such file"),
    "half the manifest": ("manifest.json", _cut, "manifest.json is not JSON"),
    "an empty manifest": ("manifest.json", lambda path: path.write_text("{}"), "does not match its hash"),
    "a list for a manifest": ("manifest.json", lambda path: path.write_text("[1]"), "does not match its hash"),
    "a deep manifest": ("manifest.json", lambda path: path.write_text("[" * 10**5), "is not JSON"),
    "a number of the manifest": ("manifest.json", lambda path: path.write_text(
        path.read_text().replace('"batch": 6', '"batch": 8', 1)), "does not match its hash"),
    "another format": ("manifest.json", lambda path: _rewrite(
        path, lambda fields: fields.update(format=9)), "format 9, this version reads 1"),
    "a manifest without a plan": ("manifest.json", lambda path: _rewrite(
        path, lambda fields: fields.pop("plan")), "plan: field required"),
    "a plan without stages": ("manifest.json", lambda path: _rewrite(
        path, lambda fields: fields["plan"].update(stages=[], cuts=[])), "impossible plan"),
    "a stage without ranks": ("manifest.json", lambda path: _rewrite(
        path, lambda fields: fields["plan"]["stages"][0].update(ranks=[])), "impossible plan"),
    "a rank that is not there": ("manifest.json", lambda path: _rewrite(
        path, lambda fields: fields["plan"]["stages"][0].update(ranks=[0, 9])), "impossible plan"),
    "a round of nothing": ("manifest.json", lambda path: _rewrite(
        path, lambda fields: fields["plan"]["stages"][1].update(round=0)), "impossible plan"),
    "a path outside": ("manifest.json", _rename_file_in_manifest, "outside its folder"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_names_a_damaged_checkpoint_and_uses_the_one_before(damage: str, run: Path) -> None:
    name, damaging, words = DAMAGES[damage]
    damaging(checkpoints_folder(run) / "6" / name)
    newest, (reason,) = newest_intact(run)
    assert newest is not None and newest.batch == 4
    assert words in reason and "\n" not in reason and str(checkpoints_folder(run) / "6") in reason
    with pytest.raises(CheckpointError):
        open_checkpoint(checkpoints_folder(run) / "6").verify()


def test_ignores_and_clears_interrupted_writes(run: Path) -> None:
    root = checkpoints_folder(run)
    (root / "6").rename(root / "6.partial")  # complete except for its name, which comes last
    newest, reasons = newest_intact(run)
    assert newest is not None and newest.batch == 4 and reasons == []
    (root / "8.partial").mkdir()
    clear(run)
    assert sorted(path.name for path in root.iterdir()) == ["2", "4"]


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_intact(tmp_path) == (None, [])


# --- Keeping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [4, 6]), (0, [2, 4, 6])])
def test_keeps_the_newest_checkpoints(keep: int, left: list[int], tmp_path: Path) -> None:
    job = emulate_keeping(CASE, tmp_path, every=2, keep=keep).job
    assert [int(folder.name) for folder in list_folders(Path(job.folder))] == left
    assert [path.name for path in checkpoints_folder(Path(job.folder)).glob("*.partial")] == []


def test_deletes_an_old_checkpoint_only_after_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = saver.write_file

    def fail_late(folder: Path, stage: int, kind: str, tensors: dict[str, torch.Tensor]) -> object:
        if folder.name == "6.partial" and (stage, kind) == (1, "optimizer/momentum_buffer"):
            raise OSError(28, "No space left on device")
        return written(folder, stage, kind, tensors)

    monkeypatch.setattr(saver, "write_file", fail_late)
    records: list[Record] = []
    job = keeping(make_job(CASE, tmp_path), every=2, keep=1)
    emulate_job(job, records)
    assert [int(folder.name) for folder in list_folders(Path(job.folder))] == [4]
    assert [record for record in records if isinstance(record, Unsaved)] == [Unsaved(6, "No space left on device")]
    saved_at(job, 4).verify()


# --- A full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Callable[[Job], None]]:
    """Leave less space than one checkpoint needs: by a small file system if possible, otherwise by a limit on files."""
    mounted: list[Path] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(job: Job) -> None:
        target = checkpoints_folder(Path(job.folder))
        target.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(target)], capture_output=True, check=False
        )
        if done.returncode == 0:
            mounted.append(target)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for target in mounted:
        subprocess.run(["umount", str(target)], check=True)


def test_a_run_continues_on_a_full_disk_and_reports_the_missing_checkpoints(
    tmp_path: Path, full_disk: Callable[[Job], None]
) -> None:
    whole = emulate(CASE, tmp_path)
    job = keeping(make_job(CASE, tmp_path), every=2)
    full_disk(job)
    records: list[Record] = []
    run = emulate_job(job, records)
    unsaved = [record for record in records if isinstance(record, Unsaved)]
    assert [record.batch for record in unsaved] == [2, 4, 6]
    assert all(record.reason in ("No space left on device", "File too large") for record in unsaved)
    assert not any(isinstance(record, Saved) for record in records)
    assert list(checkpoints_folder(Path(job.folder)).iterdir()) == []
    assert [record.batch for record in records if isinstance(record, Step)] == list(range(6))
    assert same_bits(run.weights, whole.weights)


def test_refuses_junk_in_a_manifest_with_one_line_or_reads_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, generator = checkpoints_folder(run) / "6" / "manifest.json", random.Random(0)
    good = path.read_text()
    outcomes = {"read": 0, "refused": 0}
    for _ in range(10_000 if KILLS else 400):
        write_manifest(path, with_value_changed(json.loads(good), generator))
        try:
            open_checkpoint(path.parent)
            outcomes["read"] += 1
            run_list(Namespace(path=str(path.parent), json=True))
        except CheckpointError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error)
    assert min(outcomes.values()) > 50, outcomes
    capsys.readouterr()
