"""What docs/security.md promises about the source: it unpickles nothing but what a process inherits from the one that
started it, and gives nothing to a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stagewright

SOURCE = Path(stagewright.__file__).parent
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
INHERITED = "runtime/process/object_pipe.py"  # a pipe from the supervisor
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
UNPICKLING = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("torch", "save")}


def calls(tree: ast.AST) -> list[tuple[tuple[str, str], ast.Call]]:
    return [
        ((node.func.value.id, node.func.attr), node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    ]


@pytest.mark.parametrize(
    "path", sorted({*SOURCE.rglob("*.py")} - {SOURCE / INHERITED}), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_no_file_unpickles_or_runs_a_shell(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not imported & PICKLES
    for name, call in calls(tree):
        assert name not in SHELLS
        assert name not in UNPICKLING or forbids_pickles(call), f"{'.'.join(name)} at line {call.lineno}"
        assert not any(keyword.arg == "shell" for keyword in call.keywords)


def forbids_pickles(call: ast.Call) -> bool:
    return any(
        keyword.arg == "allow_pickle" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in call.keywords
    )


def test_the_one_file_that_unpickles_reads_an_inherited_pipe() -> None:
    """It opens nothing but a descriptor, and nobody else calls it but processes of ours as they start."""
    tree = ast.parse((SOURCE / INHERITED).read_text())
    assert [name for name, _ in calls(tree) if name in UNPICKLING] == [("torch", "save"), ("torch", "load")]
    opened = [name for name, _ in calls(tree) if name[1] in ("open", "fdopen", "read_bytes", "socket")]
    assert opened == [("os", "fdopen")]
    callers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "receive_objects"
    }
    assert callers == {"runtime/process/rank.py", "run/background_load.py"}
