"""`stagewright checkpoint`: list, show and verify the checkpoints of a run, and export weights from one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagewright.errors import UserError
from stagewright.events import File
from stagewright.metrics import MIB
from stagewright.report.columns import Column
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import answer, open_console, print_lines, print_table
from stagewright.run.export import export_checkpoint
from stagewright.run.resume import BEST, find_checkpoint, named_folder
from stagewright.runtime.checkpoint.folder import Checkpoint, best_folder, list_folders, open_checkpoint
from stagewright.runtime.checkpoint.format import MANIFEST, CheckpointError, CheckpointGone

_FILES: tuple[Column[File], ...] = (
    Column("file", lambda file: file.name, is_text=True),
    Column("bytes", lambda file: file.bytes, "{:,}"),
    Column("hash", lambda file: file.blake2b[:16], is_text=True, wraps=True),
)


def run_list(parsed: argparse.Namespace) -> None:
    """List every checkpoint of a run; reads only manifests."""
    rows: list[dict[str, Any]] = []
    folders = _folders(parsed.path)
    best = best_folder(folders)
    for folder in folders:
        try:
            rows.append(_row(open_checkpoint(folder)) | {"is_best": folder == best})
        except CheckpointGone:
            continue
        except CheckpointError as error:
            rows.append({"folder": str(folder), "batch": int(folder.name), "damaged": str(error)})
    lines = []
    for row in rows:
        about = row.get("damaged") or f"epoch {row['epoch'] + 1}  {row['bytes'] / MIB:9.1f} MiB  {row['plan']}"
        lines.append(f"step {row['batch']:8}  {about}{'  best' if row.get('is_best') else ''}")
    none = f"{parsed.path} has no checkpoints; train with --checkpoint-every or --checkpoint-minutes"
    answer({"checkpoints": rows}, *(lines or [none]), as_json=parsed.json)


def run_show(parsed: argparse.Namespace) -> None:
    """Show what one checkpoint holds, file by file."""
    checkpoint = find_checkpoint(parsed.path).checkpoint
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
    print_lines(str(checkpoint.folder))
    print_lines(f"after step {row['batch']}: batch {manifest.position.batch} of epoch {manifest.position.epoch + 1}")
    print_lines(f"model {row['model']}, optimizer {row['optimizer']}, plan {row['plan']}")
    print_lines(", ".join(f"{kind} {size / MIB:,.1f} MiB" for kind, size in by_kind.items()))
    print_table(open_console(), _FILES, manifest.files)


def run_verify(parsed: argparse.Namespace) -> None:
    """Read every file of every checkpoint, and compare it with its hash.

    A run that is training deletes its oldest checkpoints meanwhile; these are named, and no damage.
    """
    whole, damaged, gone = [], [], []
    for folder in _folders(parsed.path):
        try:
            checkpoint = open_checkpoint(folder)
            with ProgressLine(f"reading {folder}"):
                checkpoint.verify()
            whole.append(checkpoint.batch)
        except CheckpointGone:
            gone.append(int(folder.name))
        except CheckpointError as error:
            damaged.append(str(error))
    deleted = f"; deleted meanwhile: {', '.join(map(str, gone))}" if gone else ""
    line = f"{len(whole)} intact: {', '.join(map(str, whole)) or 'none'}{deleted}"
    answer({"whole": whole, "damaged": damaged, "gone": gone}, *([] if damaged else [line]), as_json=parsed.json)
    if damaged:
        raise UserError(f"{len(damaged)} of {len(whole) + len(damaged)} checkpoints are damaged; {damaged[0]}")


def run_export(parsed: argparse.Namespace) -> None:
    """Write the weights of a checkpoint as one safetensors file."""
    checkpoint = find_checkpoint(f"{parsed.path}/{BEST}" if parsed.best else parsed.path).checkpoint
    with ProgressLine(f"writing {parsed.target}"):
        path = export_checkpoint(checkpoint, Path(parsed.target), parsed.weights)
    found = {"file": str(path), "batch": checkpoint.batch, "checkpoint": str(checkpoint.folder)}
    answer(found, f"weights after step {checkpoint.batch}: {path}", as_json=parsed.json)


def _folders(text: str) -> list[Path]:
    """The checkpoint that a path names, or all those of the run that it names."""
    folder = named_folder(text)
    if not folder.is_dir():
        raise UserError(f"{text}: no such folder; name a run folder, or one of its checkpoints")
    return [folder] if (folder / MANIFEST).is_file() else list_folders(folder)


def _row(checkpoint: Checkpoint) -> dict[str, Any]:
    plan = checkpoint.manifest.plan
    return {
        "folder": str(checkpoint.folder),
        "batch": checkpoint.batch,
        "epoch": checkpoint.manifest.position.epoch,
        "bytes": checkpoint.manifest.bytes,
        "plan": f"{plan.mode} {plan.shape}",
    }
