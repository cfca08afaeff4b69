"""Commands in fresh processes: every line with its time, and one line where a command fails."""

import re
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import timed_command
from benchmarks.timed_command import Printed, run_command
from stagewright.errors import RunFailed
from tests.waiting import is_running


def test_lines_have_the_time_at_which_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_command, "time", SimpleNamespace(monotonic=count(10).__next__))  # 10, 11, 12, ...
    code = "import os; print(os.environ['A_NAME']); print('step  1/9')"
    printed = run_command([sys.executable, "-c", code], {"A_NAME": "a value"})
    assert printed == Printed(((1, "a value"), (2, "step  1/9")), 3) and printed.last == "step  1/9"
    assert (printed.when(re.compile("a")), printed.when(re.compile(r"step +1/"))) == (1, 2)
    assert printed.when(re.compile("step +2/")) is None and Printed((), 1.0).last == ""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('so far'); sys.exit('no CUDA\\nhere')", "ended with 1: here"),
        ("print('so far'); raise SystemExit(3)", "ended with 3: so far"),
        ("raise SystemExit(4)", "ended with 4: "),
    ],
)
def test_a_command_that_fails_is_one_line(code: str, why: str) -> None:
    with pytest.raises(RunFailed) as caught:
        run_command([sys.executable, "-c", code], {})
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_an_interrupted_bench_ends_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM is an exception here, while the command's next line is read."""
    moments = iter((0.0,))

    def monotonic() -> float:
        try:
            return next(moments)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(timed_command, "time", SimpleNamespace(monotonic=monotonic))
    file = tmp_path / "pid"
    code = f"import os, signal; open({str(file)!r}, 'w').write(str(os.getpid())); print('ready'); signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        run_command([sys.executable, "-c", code], {})
    assert not is_running(int(file.read_text()))
