"""Checkpoints that were damaged or forged, with and without correct hashes, and ones that are deleted while read.

Every command reads one or refuses it in one line, within `_MOST_MEMORY` bytes and `_MOST_SECONDS` of CPU time.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.main import main
from stagewright.runtime.checkpoint import folder as checkpoints
from stagewright.runtime.checkpoint.folder import list_folders, newest_intact, open_checkpoint, remove
from tests.commands import fails, prints
from tests.keeping import write_manifest
from tests.limits import cpu_time, more_memory
from tests.models import CLASSES, SIDE
from tests.mutations import mutated, with_header_length, with_value_changed

CASES = int(os.environ.get("STAGEWRIGHT_READER_FUZZ", "400")) // 50
_MOST_MEMORY = 2 * 2**30
_MOST_SECONDS = 30.0
_TRAIN = (
    f"train --model tests.models:normed --classes {CLASSES} --image {SIDE} --batch 8 --microbatches 4 --samples 64 "
    "--placement 0:0-1.0:2 --cut third --staleness 1 --emulate --checkpoint-every 2 --keep 0"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at batches 2 and 4: two replicas with BatchNorm, two stages, two versions."""
    runs = tmp_path_factory.mktemp("runs")
    main([*_TRAIN.split(), "--steps", "4", "--runs", str(runs)])
    (run,) = runs.iterdir()
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def commands(run: Path) -> list[list[str]]:
    newest, out = str(run / "checkpoints/4"), str(run / "w.safetensors")
    resume = ["train", "--resume", newest, "--steps", "5", "--emulate", "--runs", str(run.parent / "new")]
    return [
        *(["checkpoint", action, str(run)] for action in ("list", "verify", "show")),
        ["checkpoint", "export", newest, out],
        resume,
        [*resume, "--placement", "0:0.0:1"],
    ]


def rehashed(folder: Path) -> None:
    """Make the sizes and hashes of a checkpoint's manifest those of its files, and its own hash correct."""
    fields = json.loads((folder / "manifest.json").read_text())
    if not isinstance(fields, dict):
        return
    files = fields.get("files")
    for file in files if isinstance(files, list) else ():
        if isinstance(file, dict) and file.get("name") in (path.name for path in folder.iterdir()):
            data = (folder / file["name"]).read_bytes()
            file |= {"bytes": len(data), "blake2b": hashlib.blake2b(data, digest_size=32).hexdigest()}
    write_manifest(folder / "manifest.json", fields)


def forge_header(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Replace the header of a safetensors file; its tensors stay as they are."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    text = json.dumps(change(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


def renamed(header: dict[str, Any]) -> dict[str, Any]:
    first, *_ = header
    return {"other" if name == first else name: entry for name, entry in header.items()}


def reshaped(header: dict[str, Any]) -> dict[str, Any]:
    return {name: entry | {"shape": [1, *entry["shape"], 1]} for name, entry in header.items()}


def retyped(header: dict[str, Any]) -> dict[str, Any]:
    types = {"F32": "I32", "I64": "F64"}
    return {name: entry | {"dtype": types[entry["dtype"]]} for name, entry in header.items()}


def odd_type(header: dict[str, Any]) -> dict[str, Any]:
    """A type that torch may not have."""
    ends = {name: entry["data_offsets"] for name, entry in header.items()}
    return {
        name: {"dtype": "F8_E8M0", "shape": [end - at], "data_offsets": [at, end]} for name, (at, end) in ends.items()
    }


FORGERIES = {"renamed": renamed, "reshaped": reshaped, "retyped": retyped, "odd type": odd_type}


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether a command succeeds; it may fail in one line alone."""
    try:
        with more_memory(_MOST_MEMORY), cpu_time(_MOST_SECONDS):
            main(words)
    except SystemExit as ended:
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if not line.startswith("warning: ")]
        assert ended.code == 2 and len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 1200, (words, error)
        return False
    except BaseException as error:
        error.add_note(f"command {words}")
        raise
    finally:
        capsys.readouterr()
    return True


@pytest.mark.parametrize(
    ("forgery", "kind"),
    [
        (forgery, kind)
        for number, forgery in enumerate(FORGERIES)
        for place, kind in enumerate(("master", "buffers/1", "slot/0", "optimizer/"))
        if CASES > 8 or place in (number, (number + 1) % 4)
    ],
)
def test_a_forged_shard_is_refused_in_one_line(
    forgery: str, kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints/4"
    name = next(file.name for file in open_checkpoint(folder).manifest.files if file.kind.startswith(kind))
    forge_header(folder / name, FORGERIES[forgery])
    rehashed(folder)
    verified, _, exported, resumed, moved = [outcome(words, capsys) for words in commands(run)[1:]]
    assert verified  # it does not look inside
    if kind == "master":
        assert not resumed and not moved and not (exported and forgery != "retyped")
    elif kind != "buffers/1":
        assert not resumed


@pytest.mark.parametrize("count", [-1, 2**53, 10**25])
def test_counts_that_no_run_reaches_are_refused_in_one_line(
    count: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "checkpoints/4/manifest.json"
    fields = json.loads(path.read_text())
    fields["stages"][0]["counts"][0] = count
    path.write_text(json.dumps(fields))
    rehashed(path.parent)
    assert "impossible" in fails(capsys, *commands(run)[4]) and not outcome(commands(run)[1], capsys)


@pytest.mark.timeout(1800 + CASES)
@pytest.mark.parametrize("target", ["manifest", "shard"])
def test_mutated_checkpoints_are_used_or_refused(
    target: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator, refused = random.Random(target), 0
    for number in range(CASES):
        run = shutil.copytree(whole, tmp_path / str(number) / "run")
        folder = run / "checkpoints/4"
        manifest = folder / "manifest.json"
        path = manifest if target == "manifest" else generator.choice(sorted(folder.glob("*.safetensors")))
        if number % 4 == 0:
            path.write_bytes(mutated(path.read_bytes(), generator))
        elif target == "manifest":
            manifest.write_text(json.dumps(with_value_changed(json.loads(manifest.read_text()), generator)))
            rehashed(folder)
        elif number % 4 == 1:
            path.write_bytes(with_header_length(mutated(path.read_bytes(), generator)))
            rehashed(folder)
        else:
            forge_header(path, lambda header: with_value_changed(header, generator))
            rehashed(folder)
        refused += not outcome(commands(run)[number % 6], capsys)
        shutil.rmtree(tmp_path / str(number))
    assert refused > 0


def test_a_checkpoint_deleted_while_it_is_read_is_not_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run that trains does with --keep, between the listing and the reading, and between two files."""
    listed = list_folders(run)
    remove(run / "checkpoints/2")
    monkeypatch.setattr("stagewright.cli.checkpoint.list_folders", lambda _: listed)
    assert prints(capsys, "checkpoint", "verify", str(run)) == "1 intact: 4; deleted meanwhile: 2\n"
    assert json.loads(prints(capsys, "checkpoint", "verify", str(run), "--json")) == {
        "whole": [4],
        "damaged": [],
        "gone": [2],
    }
    assert [
        row["batch"] for row in json.loads(prints(capsys, "checkpoint", "list", str(run), "--json"))["checkpoints"]
    ] == [4]

    def read_slowly(path: Path) -> str:
        remove(path.parent)
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(checkpoints, "hash_file", read_slowly)
    shown = fails(capsys, "checkpoint", "export", str(run / "checkpoints/4"), str(run / "w"))
    assert "deleted while it was read" in shown and "damaged" not in shown
    assert newest_intact(run) == (None, [])
