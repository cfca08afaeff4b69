"""`stagewright completion`, in a real bash, zsh and fish."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stagewright.cli.main import main
from tests.made_runs import make_run
from tests.waiting import LONG

LINES = {
    "stagewright tra": {"train"},
    "stagewright checkpoint ex": {"export"},
    "stagewright train --placem": {"--placement"},
    "stagewright train --mode s": {"sync", "stale"},
    "stagewright train --model vgg19": {"vgg19", "vgg19_bn"},
    "stagewright plan vgg19": {"vgg19", "vgg19_bn"},
    "stagewright plan vgg16 --cluster titan-v-1": {"titan-v-16"},
    "stagewright report ": {"20260101-a", "base", "last"},
    "stagewright checkpoint list b": {"base"},
    "stagewright train --resume la": {"last"},
    "stagewright train --steps ": set(),
    "stagewright completion f": {"fish"},
}
# What zsh's completion system would do with the words that it is given: print them.
ZSH = """
compdef() { }
_files() { }
_describe() { print -rl -- ${${(P)@[-1]}%%:*} }
compadd() { print -rl -- ${@[2,-1]} }
"""


def bash(script: Path) -> str:
    program = [f"source {script}"]
    for line in LINES:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        program.append(
            f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _stagewright; echo ${{COMPREPLY[@]}}; echo ="
        )
    return "\n".join(program)


def zsh(script: Path) -> str:
    program = [ZSH, f"source {script}"]
    for line in LINES:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        program.append(f"words=({quoted}); CURRENT={len(words)}; _stagewright; echo =")
    return "\n".join(program)


def fish(script: Path) -> str:
    lines = (f"complete -C '{line}' | string split -f 1 \\t; echo =" for line in LINES)
    return "\n".join((f"source {script}", *lines))


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_shells_complete_commands_options_choices_models_and_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = shutil.which(name)
    if shell is None:
        pytest.skip(f"there is no {name} here; apt-get install {name}")
    make_run(tmp_path / "runs" / "20260101-a")
    monkeypatch.chdir(tmp_path)
    main(["runs", "name", "last", "base"])
    capsys.readouterr()
    main(["completion", name])
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    program = {"bash": bash, "zsh": zsh, "fish": fish}[name](script)
    command = {"bash": ["-uc"], "zsh": ["-fc"], "fish": ["--no-config", "-c"]}[name]
    done = subprocess.run([shell, *command, program], capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for (line, expected), answer in zip(LINES.items(), done.stdout.split("=\n"), strict=False):
        assert completing(line, answer.split()) == expected, line


def completing(line: str, words: Sequence[str]) -> set[str]:
    """Of the words that a shell is given those that complete a line, without the files that fish lists as well."""
    return {word for word in words if word.startswith(line.split(" ")[-1]) and word not in ("runs/", "script")}
