"""`stagewright doctor` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from stagewright.cli.main import main
from stagewright.hardware.doctor.check import check_machine, show, try_measuring
from stagewright.hardware.doctor.measure import Measured
from tests.marks import nightly
from tests.nvml_like import Card, Library
from tests.waiting import LONG

ROOT = Path(__file__).parents[4]


@nightly
def test_prints_plain_lines_and_measures_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", "doctor", "--data", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"COLUMNS": "40"}, capture_output=True, text=True, timeout=LONG, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert "\x1b" not in done.stdout and done.stderr == ""
    assert any("between two ranks" in line and "GB/s" in line for line in lines), done.stdout
    assert any("memory copy, one core" in line for line in lines)
    assert any("  data  " in line and "MB/s" in line for line in lines)


def test_json_grades_the_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library([Card(limit=200_000), Card(width=4)], {(0, 1): 50}))
    main(["doctor", "--fast", "--json"])
    found = json.loads(capsys.readouterr().out)
    problems = {(item["area"], item["name"]) for item in found["findings"] if item["grade"] == "problem"}
    assert {("GPU 0", "power cap"), ("GPU 1", "PCIe")} <= problems
    assert found["environment"]["topology"] == [["X", "SYS"], ["SYS", "X"]] and found["measured"] == []
    assert found["verdict"].startswith("2 GPUs; ")
    assert all(item["advice"] for item in found["findings"] if item["grade"] != "fine")


def test_eight_gpus_fit_into_80_columns_and_equal_findings_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {(one, other): 30 for one in range(8) for other in range(one, 8)}
    cards = [Card(), Card(), Card(limit=200_000), *[Card()] * 5]
    monkeypatch.setitem(sys.modules, "pynvml", Library(cards, pairs))
    text = StringIO()
    show(Console(file=text, width=80), check_machine(None, measures=False))
    assert max(len(line) for line in text.getvalue().splitlines()) <= 80
    assert "GPU7   PHB" in text.getvalue()
    said = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "fine power cap 0-1,3-7 350 W of 350 W" in said and "problem power cap 2 200 W of 350 W" in said
    assert said.index("software") < said.index("GPUs") < said.index("topology") and "GPU 0" not in said


def test_a_measurement_that_fails_gives_its_reason() -> None:
    def broken(name: str) -> Measured:
        raise RuntimeError("CUDA error:\nout of luck")

    found = try_measuring("between two ranks", broken)
    assert found.bandwidth is None and found.trouble == "CUDA error: out of luck"


def test_missing_data_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--fast", "--data", "/nowhere"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and "--data /nowhere: no such file or folder" in error


def test_data_without_an_end_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), Path("/proc/kmsg"), tmp_path):
        if path.exists():
            with pytest.raises(SystemExit):
                main(["doctor", "--fast", "--data", str(path)])
            said = capsys.readouterr().err
            assert said.count("\n") == 1 and f"--data {path} " in said
