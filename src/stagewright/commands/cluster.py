"""`stagewright cluster import`: a machine as a file that `--cluster` takes."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from stagewright.commands.options import Commands, add_json

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def add(commands: Commands) -> None:
    parser = commands.add_parser("cluster", help="describe a machine to the planner")
    parts = parser.add_subparsers(title="what to do", required=True, metavar="import")
    importing = parts.add_parser(
        "import",
        help="a cluster file from nvidia-smi's texts, or of this machine",
        description="Make a cluster file from the texts of nvidia-smi topo -m and nvidia-smi, or of this machine.",
    )
    importing.add_argument("--topo", metavar="FILE", help="text of nvidia-smi topo -m (- for standard input)")
    importing.add_argument("--smi", metavar="FILE", help="text of nvidia-smi; may be the same file")
    importing.add_argument("--here", action="store_true", help="this machine instead, asked through its driver")
    importing.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: standard output)")
    importing.add_argument("--name", help="name of the cluster (default: the file's)")
    importing.add_argument("--device", metavar="NAME", help="the catalogue's name of the cards, instead of theirs")
    importing.add_argument("--gpus", metavar="0-3,6", help="only these of them")
    importing.add_argument("--pcie", type=int, metavar="N", help="generation of the slots (default: the card's best)")
    importing.add_argument("--cores", type=int, metavar="N", help="cores that decode images")
    importing.add_argument("--count", type=int, default=1, metavar="N", help="machines like this one (default: 1)")
    importing.add_argument("--network", metavar="LINK", help="between them: net-1g, net-10g, ... net-400g")
    add_json(importing)
    importing.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from stagewright.machine.importing import Wishes, checked, import_texts, import_this

    name = parsed.name or (Path(parsed.output).stem if parsed.output else "imported")
    if not _NAME.fullmatch(name):
        raise ValueError(f"cluster name '{name}' has other characters than a-z, 0-9, - and _; give another with --name")
    for flag, value in (("pcie", parsed.pcie), ("cores", parsed.cores), ("count", parsed.count)):
        if value is not None and value < 1:
            raise ValueError(f"--{flag} is {value}; give at least 1")
    wishes = Wishes(name, parsed.device, _indices(parsed.gpus), parsed.pcie, parsed.cores, parsed.count, parsed.network)
    if parsed.here and (parsed.topo or parsed.smi):
        raise ValueError("both --here and a text were given; import one machine at a time")
    if not (parsed.here or parsed.topo or parsed.smi):
        raise ValueError("nothing to import: give --topo FILE and --smi FILE, or --here for this machine")
    box = import_this(wishes) if parsed.here else import_texts(parsed.topo, parsed.smi, wishes)
    text = checked(box)
    if parsed.output:
        _write(Path(parsed.output), text)
    if parsed.json:
        print(json.dumps({"file": parsed.output, "toml": text} | asdict(box)))
    elif parsed.output:
        print(f"{parsed.output}: {box.title}")
        print(f"next: stagewright plan resnet50 --cluster {parsed.output} --batch 256")
    else:
        sys.stdout.write(text)


def _indices(text: str | None) -> tuple[int, ...] | None:
    from stagewright.cluster import parse_placement

    if text is None:
        return None
    try:
        (devices,) = parse_placement(f"0:{text}")
    except ValueError as error:
        raise ValueError(f"--gpus '{text[:40]}' is not a list of GPUs (for example 0-3,6)") from error
    return tuple(device.index for device in devices)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"can't write {path}: {error.strerror}; choose another file with -o") from error
