"""What docs/security.md promises about the source: it unpickles nothing and gives nothing to a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stagewright

SOURCE = Path(stagewright.__file__).parent
PICKLES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
UNPICKLING = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("torch", "save")}


def calls(tree: ast.AST) -> list[tuple[tuple[str, str], ast.Call]]:
    return [
        ((node.func.value.id, node.func.attr), node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    ]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
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
