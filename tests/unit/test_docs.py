"""Every command block of README and docs runs, here or every night, or says why not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from stagewright.cli.main import main
from tests.docs import FILES, MARKS, ROOT, Block, blocks, commands, differs, filled
from tests.marks import nightly

HERE = [file for file in FILES if any(block.kind == "run" for block in blocks(file))]
NIGHTLY = [file for file in FILES if any(block.kind in ("nightly", "gpu") for block in blocks(file))]


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", FILES, ids=name)
def test_every_command_block_is_run_or_says_why_not(file: Path) -> None:
    check(file)


def check(file: Path, marks: Mapping[str, Mapping[str, str]] = MARKS) -> None:
    """Every command block of a file is listed under its key, and every key of the file is that of one block."""
    found = blocks(file, marks)
    for block in found:
        assert not block.more, f"{block}: a fence says only its language; move '{block.more}' to tests/docs.toml"
        if block.looks_like_commands or block.mark:
            assert block.mark, f"{block}: tests/docs.toml has no '{block.key}' under [\"{name(file)}\"]"
            assert block.kind, f"{block}: '{block.mark}' is not run, nightly, gpu, file: NAME or not run: WHY"
            assert block.kind not in ("not run", "file") or block.reason, f"{block}: {block.kind}, and nothing after it"
            assert block.language or block.kind == "not run", f"{block}: commands without a fence; start with ```sh"
    for key in marks.get(name(file), {}):
        count = sum(block.key == key for block in found)
        assert count == 1, f"{name(file)}: {count} blocks begin with '{key}', which tests/docs.toml has once"


def test_the_side_file_lists_only_files_that_exist() -> None:
    assert MARKS.keys() <= {name(file) for file in FILES}


def test_files_and_tests_that_the_recipes_name_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    sources = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert not [test for test in re.findall(r"`(test_\w+)`", text) if f"def {test}(" not in sources]
    paths = re.findall(r"`((?:\w+/)+[\w.]*)`", text)
    below = (ROOT, ROOT / "src/stagewright")
    missing = [path for path in paths if not any((folder / path).exists() for folder in below)]
    assert paths and not missing


@pytest.mark.parametrize("file", HERE, ids=name)
def test_commands_of_the_documentation_work(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that a block can import the model file of an earlier one
    for block in blocks(file):
        if block.kind == "file":
            Path(block.reason).write_text(block.text + "\n")
        elif block.kind == "run" and block.language == "python":
            exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
        elif block.kind == "run":
            monkeypatch.setenv("COLUMNS", block.columns)
            run_here(block, capsys)


def run_here(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in commands(block):
        assert words[0] == "stagewright", f"{block}: {words[0]} is run by a shell; mark the block nightly"
        capsys.readouterr()
        try:
            main(filled(words[1:]))
        except SystemExit as error:
            assert not error.code, f"{block}: {' '.join(words)}: {capsys.readouterr().err}"
        printed = capsys.readouterr().out
        missing = differs(expected, printed, block.columns)
        assert missing is None, f"{block}: {' '.join(words)} does not print {missing!r} there, but:\n{printed}"


@nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", NIGHTLY, ids=name)
def test_nightly_commands_of_the_documentation_work(file: Path, tmp_path: Path) -> None:
    """All blocks run in order in one folder, with `stagewright` on the path."""
    shim = tmp_path / "bin" / "stagewright"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stagewright "$@"\n')
    shim.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    path = f"{shim.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:."}
    for block in blocks(file):
        if block.kind == "file":
            (work / block.reason).write_text(block.text + "\n")
        elif block.kind in ("run", "nightly") or (block.kind == "gpu" and torch.cuda.is_available()):
            for text, expected in programs(block):
                program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euc"]
                columns = {"COLUMNS": block.columns}
                done = subprocess.run(
                    [*program, text], cwd=work, env=environment | columns, capture_output=True, text=True, timeout=1800
                )
                assert done.returncode == 0, f"{block}:\n{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
                missing = differs(expected, done.stdout, block.columns)
                assert missing is None, f"{block}: {text} does not print {missing!r} there, but:\n{done.stdout}"


def programs(block: Block) -> list[tuple[str, list[str]]]:
    """What a shell or Python runs, and the lines that it should print."""
    if block.language != "console":
        return [(block.text, [])]
    return [(shlex.join(words), expected) for words, expected in commands(block)]


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("Train:\n\n    stagewright train --steps 3\n", "run"),
        ("```\nstagewright train --steps 3\n```\n", ""),
        ("```sh\nstagewright train --steps 3\n```\n", ""),
        ("```sh run\nstagewright train --steps 3\n```\n", "run"),
        ("```sh\nstagewright train --steps 3\n```\n", "not run:"),
        ("```sh\nstagewright train --steps 3\n```\n", "sometimes"),
        ("```sh\nstagewright train --steps 3\n```\n" * 2, "run"),
        ("No block of that key\n", "run"),
    ],
)
def test_a_block_that_is_not_listed_once_is_an_error(
    text: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.md"
    file.write_text(text)
    monkeypatch.setattr("tests.docs.ROOT", tmp_path)
    monkeypatch.setattr("tests.unit.test_docs.ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"x\.md"):
        check(file, {"x.md": {"stagewright train --steps 3": mark} if mark else {}})


def test_pictures_lists_and_listed_blocks_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.md"
    file.write_text(
        "Picture:\n\n    a ──► b\n\n- item\n\n    stagewright is a word here\n\n"
        "```python\nimport stagewright\n\n# why\nstagewright.train(  # a call\n)\n```\n"
    )
    monkeypatch.setattr("tests.docs.ROOT", tmp_path)
    monkeypatch.setattr("tests.unit.test_docs.ROOT", tmp_path)
    check(file, {"x.md": {"stagewright.train(": "nightly"}})


def test_output_is_compared_line_by_line() -> None:
    printed = "a 1\nb 2\nc 3\nd 4\n"
    assert differs(["a 1", "b 2"], printed) is None and differs(["a 1", "...", "d 4"], printed) is None
    assert differs(["a 1", "c 3"], printed) == "c 3" and differs(["...", "e"], printed) == "e"
    assert differs(["b 2"], printed) == "b 2" and differs([*printed.splitlines(), "e"], printed) == "e"


def test_a_backslash_continues_a_command_and_patterns_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run-1").mkdir()
    text = "# first\nstagewright report run-* \\\n    --json  # the page\n\nstagewright --version"
    first, second = commands(Block(tmp_path, 1, "sh", text))
    assert filled(first[0]) == ["stagewright", "report", "run-1", "--json"] and filled(["no-*"]) == ["no-*"]
    assert second == (["stagewright", "--version"], [])
