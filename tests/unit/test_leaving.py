"""Whatever ends a command: a reader that leaves, a signal, a place that can't be written to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import stagewright
from stagewright import __main__ as entry
from stagewright.cli import main as cli
from stagewright.config.toml import make_config
from stagewright.report.live.terminal import PipeSafeConsole
from stagewright.run import train as experiment
from stagewright.run.export import require_target
from tests.unit.api.test_training import make_net


def test_a_reader_that_leaves_does_not_end_a_run(tmp_path: Path) -> None:
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
        result = experiment.run(make_config(tables), console)
        assert console.quiet
    assert len(result.steps) == 4 and (result.folder / "summary.json").exists()


@pytest.mark.parametrize("place", ["folder", "file/w.safetensors", "/dev/null"])
def test_weights_that_could_not_be_written_are_refused_before_training(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="weights can't be written to"):
        stagewright.train(make_net, image=8, samples=16, batch=16, steps=1, emulate=True, runs=str(tmp_path / "runs"),
                         export=str(tmp_path / place))  # fmt: skip
    assert not (tmp_path / "runs").exists()
    require_target(tmp_path / "new" / "w.safetensors")
    require_target(tmp_path / "file")


def test_weights_that_lose_their_place_stay_in_the_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights could not be written to /proc/w.safetensors.*they are in (\S+)\)"):
        stagewright.train(make_net, image=8, samples=16, batch=16, steps=1, emulate=True, runs=str(tmp_path),
                         export="/proc/w.safetensors")  # fmt: skip
    assert list(tmp_path.glob("*/weights.safetensors"))


def test_a_place_that_can_not_be_written_to_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "vgg-small", "--cluster", "titan-v-8", "--devices", "2", "--batch", "8", "-o", str(tmp_path)])
    line = capsys.readouterr().err
    assert caught.value.code == 2 and line.count("\n") == 1 and f"{tmp_path}: Is a directory" in line


def test_sigterm_ends_a_command_as_an_interrupt_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run(parsed: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("stagewright.cli.plan.run", run)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "vgg-small", "--batch", "8"])
    assert caught.value.code == 2 and "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_while_importing_is_one_line(
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


def test_a_link_test_does_not_outlive_who_asked_for_it(tmp_path: Path) -> None:
    program = "import os, time; from stagewright.runtime.process.signals import exit_with_parent; exit_with_parent(os.getppid()); time.sleep(60)"
    parent = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {program!r}]).pid, flush=True); input()"
    )
    asking = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    child = int(asking.stdout.readline())
    time.sleep(1.0)
    asking.kill()
    asking.wait()
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError("it lives on")
