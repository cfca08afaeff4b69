"""`stagewright completion bash`, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stagewright.cli.main import main
from tests.made_runs import make_run
from tests.waiting import LONG


def test_bash_completes_commands_options_choices_models_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    make_run(tmp_path / "runs" / "20260101-a")
    monkeypatch.chdir(tmp_path)
    main(["runs", "name", "last", "base"])
    capsys.readouterr()
    main(["completion", "bash"])
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    lines = {
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
    program = [f"source {script}"]
    for line in lines:
        *words, last = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in (*words, last))
        program.append(f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _stagewright; echo ${{COMPREPLY[@]}}")
    done = subprocess.run([bash, "-uc", "\n".join(program)], capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stderr == ""
    found = [set(answer.split()) for answer in done.stdout.split("\n")]
    for (line, expected), answer in zip(lines.items(), found, strict=False):
        assert answer == expected, line
