"""`stagewright checkpoint`: what a run has kept, whether it is whole, and its weights as a plain file."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagewright.cli.parser import _RUN
from stagewright.run.export import export_checkpoint
from stagewright.run.resume import find_checkpoint
from stagewright.runtime.checkpoint.folder import list_folders, open_checkpoint
from stagewright.runtime.checkpoint.format import MANIFEST, CheckpointError

if TYPE_CHECKING:
    from stagewright.runtime.checkpoint.folder import Checkpoint


_MIB = 2**20


def run_list(parsed: argparse.Namespace) -> None:
    """Every checkpoint of a run by its manifest; only `verify` reads all the files."""
    rows: list[dict[str, Any]] = []
    for folder in _folders(parsed.path):
        try:
            rows.append(_row(_open(folder)))
        except CheckpointError as error:
            rows.append({"folder": str(folder), "batch": int(folder.name), "damaged": str(error)})
    if parsed.json:
        print(json.dumps({"checkpoints": rows}))
        return
    for row in rows:
        about = row.get("damaged") or f"epoch {row['epoch'] + 1}  {row['bytes'] / _MIB:9.1f} MiB  {row['plan']}"
        print(f"step {row['batch']:8}  {about}")
    if not rows:
        print(f"{parsed.path} has no checkpoints; train with --checkpoint-every or --checkpoint-minutes")


def run_show(parsed: argparse.Namespace) -> None:
    checkpoint = _newest(parsed.path)
    manifest = checkpoint.manifest
    by_kind: dict[str, int] = {}
    for file in manifest.files:
        kind = file.kind.partition("/")[0]
        by_kind[kind] = by_kind.get(kind, 0) + file.bytes
    row = _row(checkpoint) | {
        "position": asdict(manifest.position),
        "layout": manifest.plan.describe(),
        "model": manifest.config["model"]["name"],
        "optimizer": manifest.config["optimizer"]["name"],
        "bytes_by_kind": by_kind,
        "stages": [asdict(stage) for stage in manifest.stages],
        "files": [asdict(file) for file in manifest.files],
    }
    if parsed.json:
        print(json.dumps(row))
        return
    print(f"{checkpoint.folder}")
    print(f"after step {row['batch']}: batch {manifest.position.batch} of epoch {manifest.position.epoch + 1}")
    print(f"model {row['model']}, optimizer {row['optimizer']}, plan {row['plan']}")
    for kind, size in by_kind.items():
        print(f"{kind:10} {size / _MIB:9.1f} MiB")
    for file in manifest.files:
        print(f"  {file.name:44} {file.bytes:12}  {file.blake2b[:16]}")


def run_verify(parsed: argparse.Namespace) -> None:
    whole, damaged = [], []
    for folder in _folders(parsed.path):
        try:
            checkpoint = _open(folder)
            checkpoint.verify()
            whole.append(checkpoint.batch)
        except CheckpointError as error:
            damaged.append(str(error))
    if parsed.json:
        print(json.dumps({"whole": whole, "damaged": damaged}))
    elif not damaged:
        print(f"{len(whole)} whole: {', '.join(map(str, whole)) or 'none'}")
    if damaged:
        raise ValueError(f"{len(damaged)} of {len(whole) + len(damaged)} checkpoints are damaged; {damaged[0]}")


def run_export(parsed: argparse.Namespace) -> None:
    checkpoint = _newest(parsed.path)
    path = export_checkpoint(checkpoint, Path(parsed.target))
    if parsed.json:
        print(json.dumps({"file": str(path), "batch": checkpoint.batch, "checkpoint": str(checkpoint.folder)}))
    else:
        print(f"weights after step {checkpoint.batch}: {path}")


def _folders(text: str) -> list[Any]:
    """The folders of the checkpoints that a path names."""
    folder = Path(text)
    if not folder.is_dir():
        raise ValueError(f"{text}: no such folder; name {_RUN}")
    return [folder] if (folder / MANIFEST).is_file() else list_folders(folder)


def _open(folder: Any) -> Checkpoint:
    return open_checkpoint(folder)


def _newest(text: str) -> Checkpoint:
    return find_checkpoint(text).checkpoint


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    plan = checkpoint.manifest.plan
    return {
        "folder": str(checkpoint.folder),
        "batch": checkpoint.batch,
        "epoch": checkpoint.manifest.position.epoch,
        "bytes": checkpoint.manifest.bytes,
        "plan": f"{plan.mode} {plan.shape}",
    }
