"""One story per bug that users met, so that none comes back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import stagewright
from stagewright import __main__ as entry
from stagewright.cli.main import main
from stagewright.config.toml import make_config
from stagewright.report.live.terminal import PipeSafeConsole
from stagewright.run.train import run
from tests.commands import prints
from tests.unit.api.test_training import make_net
from tests.waiting import LONG, wait_until


def test_warnings_do_not_break_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--placement", "0:0-2.0:3", "--mode", "sync", "--batch", "8", "--microbatches", "2")
    for command in (["schedule"], ["simulate", "vgg-small", "--cluster", "titan-v-8"]):
        main([*command, *few, "--json"])
        printed = capsys.readouterr()
        assert json.loads(printed.out)["plan"]["microbatches"] == 2
        assert printed.err.startswith("warning: 2 microbatches for 3 replicas")


def test_a_crowded_schedule_leaves_out_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = ("--placement", "0:0.0:1", "--mode", "stale", "--batch", "14", "--microbatches", "14")
    row = prints(capsys, "schedule", *plan, "--backward", "2,2", "--batches", "1").splitlines()[0]
    numbers = [int(number) for number in re.findall(r"F(\d+)", row)]
    assert numbers == sorted(set(numbers)) and len(numbers) < row.count("F") == 14


def test_a_terminal_without_unicode_gets_ascii() -> None:
    command = ["schedule", "--placement", "0:0.0:1"]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = [sys.executable, "-m", "stagewright", *command]
    done = subprocess.run(program, env=os.environ | ascii_only, capture_output=True, timeout=LONG)
    assert done.returncode == 0 and b"F0" in done.stdout and b".." in done.stdout, done.stderr


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        console = PipeSafeConsole(file=closed)
        tables = {
            "model": {"name": f"{__name__}:make_net"},
            "plan": {"batch": 16},
            "data": {"image": 8, "samples": 32},
            "run": {"steps": 4, "emulate": True, "runs": str(tmp_path), "log_every": 1},
        }
        result = run(make_config(tables), console)
        assert console.quiet
    assert len(result.steps) == 4 and (result.folder / "summary.json").exists()


def test_weights_go_to_the_run_folder_when_the_export_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights could not be written to /proc/w.safetensors.*they are in (\S+)\)"):
        stagewright.train(make_net, image=8, samples=16, batch=16, steps=1, emulate=True, runs=str(tmp_path),
                         export="/proc/w.safetensors")  # fmt: skip
    assert list(tmp_path.glob("*/weights.safetensors"))


def test_an_interrupt_during_imports_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "stagewright.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "stagewright.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit):
        entry.main()
    assert capsys.readouterr().err == "stagewright: interrupted before it started\n"


CHILD = """
import os, time
from stagewright.runtime.process.signals import exit_with_parent
exit_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(3600)
"""


def test_a_child_process_dies_with_its_parent() -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
