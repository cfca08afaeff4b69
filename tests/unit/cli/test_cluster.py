"""`stagewright cluster list`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import check_output

import pytest

from tests.commands import fails, prints, prints_in_terminal
from tests.smi_texts import TITAN_8


def test_lists_the_catalog(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = prints_in_terminal(capsys, monkeypatch, 80, "cluster", "list").splitlines()
    assert max(map(len, lines)) <= 80
    for words in ("titan-v-16 16 2 x 8 titan-v", "rtx-2080ti-22 22 616", "net-10g 1.1"):
        assert any(" ".join(line.split()).startswith(words) for line in lines), words
    found = json.loads(prints(capsys, "cluster", "list", "--json"))
    (server,) = (entry for entry in found["clusters"] if entry["name"] == "titan-v-16")
    assert server["number"] == 16 and server["links"] == ["pcie3-pix", "pcie3-phb", "pcie3-sys", "net-100g"]
    assert {"rtx-4090", "cpu"} <= {entry["name"] for entry in found["devices"]}
    assert "memory" in {entry["name"] for entry in found["links"]}


def test_the_catalog_is_listed_in_one_order() -> None:
    command = [sys.executable, "-m", "stagewright", "cluster", "list", "--json"]
    listed = [check_output(command, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "3", "5")]
    assert listed[0] == listed[1] == listed[2]


def test_a_name_that_is_no_text_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "topo").write_text(TITAN_8)
    options = ("--topo", str(tmp_path / "topo"), "--device", "titan-v", "--network", os.fsdecode(b"\xff"))
    assert "UTF-8" in fails(capsys, "cluster", "import", *options)
