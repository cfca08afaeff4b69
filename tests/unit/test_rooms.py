"""Who may import whom; the rooms of docs/design.md, section 7."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stagewright

SOURCE = Path(stagewright.__file__).parent
# What each room may import of ours, anywhere in its files; experiment, cli and recipes chain the rooms.
ALLOWED = {
    "cluster": set(),
    "config": set(),
    "metrics": set(),
    "model": set(),
    "data": set(),
    "catalog": {"cluster"},
    "profile": {"model", "catalog"},
    "plan": {"cluster", "catalog", "profile"},
    "schedule": {"plan"},
    "simulate": {"schedule", "plan", "metrics", "cluster"},
    "predict": {"simulate", "plan", "profile", "catalog", "cluster", "model"},
    "planner": {"predict", "simulate", "plan", "catalog", "cluster"},
    "runtime": {"config", "model", "schedule", "data", "plan", "cluster", "metrics"},
    "report": {"metrics"},
    "machine": {"cluster", "catalog"},
    "monitor": {"machine", "metrics"},
    "track": {"config", "metrics"},
    "doctor": {"cluster", "machine", "monitor", "runtime"},
}
WITH_TORCH = {"model", "data", "runtime", "bench", "doctor"}
PROFILE_WITH_TORCH = {"measure.py", "trace.py"}
# Files that stand alone within a room that does not.
ALONE = {
    "profile/profile.py": set(),
    "profile/shape.py": set(),
    "plan/plan.py": {"cluster"},
}
PLANNING = {"catalog", "profile", "simulate", "predict", "planner"}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path: Path) -> str:
    return ".".join(("stagewright", *path.relative_to(SOURCE).with_suffix("").parts))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_the_rooms_it_may(path: Path) -> None:
    room = room_of(module_of(path))
    if room in ALLOWED:
        used = {room_of(name) for name in imports(path) if name.startswith("stagewright.")} - {room, "__version__"}
        assert used <= ALLOWED[room], f"{room} imports {sorted(used - ALLOWED[room])}"


@pytest.mark.parametrize(("name", "allowed"), ALONE.items())
def test_some_files_import_less_than_their_room(name: str, allowed: set[str]) -> None:
    used = {room_of(module) for module in imports(SOURCE / name) if module.startswith("stagewright.")}
    assert used <= allowed


@pytest.mark.parametrize("path", sorted((SOURCE / "runtime").glob("*.py")), ids=lambda path: path.name)
def test_the_runtime_knows_nothing_of_costs(path: Path) -> None:
    own = [name for name in imports(path) if name.startswith("stagewright.")]
    assert not {room_of(name) for name in own} & PLANNING
    assert not [
        name for name in own if name.startswith("stagewright.plan.") and not name.startswith("stagewright.plan.plan")
    ]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_torch_stays_in_its_rooms(path: Path) -> None:
    room = room_of(module_of(path))
    uses_torch = any(name.split(".")[0] == "torch" for name in imports(path, top_level=True))
    assert not uses_torch or room in WITH_TORCH or (room == "profile" and path.name in PROFILE_WITH_TORCH)
    distributed = any(name.startswith("torch.distributed") for name in imports(path))
    assert not distributed or room == "runtime" or path.name == "peers.py"


def test_there_is_no_utils() -> None:
    assert not list(SOURCE.rglob("util*.py"))


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["data", "inspect"],
        ["data", "bench"],
        ["checkpoint", "list"],
        ["bench"],
        ["compare"],
        ["report"],
        ["watch"],
    ],
    ids=" ".join,
)
def test_help_imports_neither_torch_nor_numpy_nor_pydantic(command: list[str]) -> None:
    code = (
        "import sys, stagewright.cli.main\n"
        f"try: stagewright.cli.main.main({[*command, '--help']})\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
