"""Child processes: where their output goes, how they end, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagewright.runtime.process.children import Children
from tests.waiting import is_running, wait_until

SLEEP = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(3600)"]
DEAF = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP[2]}"]
TIDY = [sys.executable, "-c", f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); {SLEEP[2]}"]
PARENT = """
import sys, time
from stagewright.runtime.process.children import Children
with Children() as children:
    child = children.start([sys.executable, "-c", sys.argv[1]], stdout=-1)
    print(child.stdout.readline(), end="", flush=True)
    time.sleep(3600)
"""
CHILD = """
import os, time
from stagewright.runtime.process.signals import exit_with_parent
exit_with_parent()
print(os.getpid(), flush=True)
time.sleep(3600)
"""


def started(children: Children, command: list[str]) -> subprocess.Popen[str]:
    """A child that runs its own code already."""
    child = children.start(command, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == "here\n"
    return child


def test_gives_a_child_its_environment_and_adds_to_its_files(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['RANK']); sys.stderr.write('wrong\\n'); sys.exit(3)"
    (tmp_path / "out").write_text("before\n")
    with Children() as children:
        files = {"stdout": tmp_path / "out", "stderr": tmp_path / "err"}
        children.start([sys.executable, "-c", program], {"RANK": "2"}, stdout=files["stdout"], stderr=files["stderr"])
        started(children, SLEEP)
        wait_until(lambda: children.codes()[0] is not None)
        assert children.codes() == [3, None] and len(children.processes()) == 2
    assert (tmp_path / "out").read_text() == "before\n2\n" and (tmp_path / "err").read_text() == "wrong\n"
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("command", "is_stopped", "code"),
    [(SLEEP, False, -signal.SIGTERM), (TIDY, True, 7), (DEAF, True, -signal.SIGKILL)],
    ids=["default", "handles SIGTERM but is stopped", "ignores SIGTERM"],
)
def test_stops_every_child(command: list[str], is_stopped: bool, code: int) -> None:
    children = Children()
    child, other = started(children, command), started(children, SLEEP)
    if is_stopped:
        child.send_signal(signal.SIGSTOP)
    children.stop()
    assert (child.returncode, other.returncode) == (code, -signal.SIGTERM) and children.codes() == []


def test_an_exception_stops_children_and_what_they_started() -> None:
    nested = f"import subprocess, sys; child = subprocess.Popen({SLEEP!r}); print(child.pid, flush=True); child.wait()"
    with pytest.raises(RuntimeError, match="wrong"), Children() as children:
        child = children.start([sys.executable, "-c", nested], stdout=subprocess.PIPE)
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        raise RuntimeError("wrong")
    assert child.returncode is not None
    wait_until(lambda: not is_running(grandchild))


def test_a_signal_during_a_stop_waits_until_every_child_has_ended() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(str(children.codes()))

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        children = Children()
        child = started(children, DEAF)
        helper = [sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({os.getpid()}, {signal.SIGTERM:d})"]
        subprocess.Popen(helper)
        with pytest.raises(KeyboardInterrupt, match=r"\[\]"):
            children.stop()
            time.sleep(60)  # where the stop took less than the helper
        assert child.returncode == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_reaches_only_this_process() -> None:
    with Children() as children:
        child = started(children, SLEEP)
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_child_ends_with_its_parent(is_stopped: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if is_stopped:
        os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_running(child))
