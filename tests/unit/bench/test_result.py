"""Anonymised texts lose names, paths and addresses, and keep numbers, versions and placements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from stagewright.bench import anonymous
from stagewright.bench.anonymous import cleaned, make_cleaner
from stagewright.bench.result import from_json


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.setattr(anonymous.socket, "gethostname", lambda: "atlas.lab.example")
    monkeypatch.setattr(anonymous.socket, "getfqdn", lambda: "atlas.lab.example")
    monkeypatch.setattr(anonymous.getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    return make_cleaner()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("on atlas.lab.example", "on <name>"),
        ("ATLAS has 8 GPUs", "<name> has 8 GPUs"),
        ("user=alice", "user=<name>"),
        ("/home/alice", "<path>"),
        ('"folder": "/home/bob/runs/20261115"', '"folder": "<path>"'),
        ("see /home/bob/secret/log.txt;", "see <path>/log.txt;"),
        ("folder:~/data/train", "folder:<path>"),
        ("tar:/data/x/*.tar", "tar:<path>/*.tar"),
        ("--nodes 10.0.0.1,10.0.0.2:7000", "--nodes <address>,<address>:7000"),
        ("[fd00::1]:7000", "[<address>]:7000"),
        ("fe80::1ff:fe23:4567:890a%eth0 up", "<address> up"),
        ("mac 00:1a:2b:3c:4d:5e", "mac <address>"),
        ("GPU-8f0d3b1e-1234-abcd-9876-0123456789ab", "<uuid>"),
    ],
)
def test_removes_names_paths_and_addresses(text: str, expected: str, clean: Callable[[str], str]) -> None:
    assert clean(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "--placement 0:0-6.0:7 --shares 11:7",
        "0:0-7,1:0-7.0:0-7,1:0-7",
        "463 images/s at 19:58:56",
        "torch 2.13.0+cpu, driver 580.159.04",
        "1.22 (0.82 - 1.42) x",
        "malice and atlases",
        "listening on 127.0.0.1",
        "listening on 0.0.0.0",
        "epoch 1  step 10/16  loss 2.3111",
    ],
)
def test_keeps_everything_else(text: str, clean: Callable[[str], str]) -> None:
    assert clean(text) == text


def test_cleans_nested_values_and_their_keys(clean: Callable[[str], str]) -> None:
    assert cleaned({"atlas": ["alice", 3, None, ("/a/b",)]}, clean) == {"<name>": ["<name>", 3, None, ["<path>"]]}


def test_reads_what_was_written_before_there_were_ratios_and_units() -> None:
    """A bench.json of 0.1.0's first suites, as that code wrote it."""
    interval = {"value": 100.0, "low": 99.0, "high": 101.0}
    repeat = {
        "rate": 100.0,
        "warmup": 1,
        "is_steady": True,
        "times": [0.6, 0.5],
        "loss": 2.0,
        "run": "r",
        "others": None,
    }
    names = ("group", "name", "data", "model", "mode", "precision", "placement", "device")
    row = dict.fromkeys(names, "x") | {"kind": "measured", "is_baseline": True, "batch": 50, "options": {}, "cuts": []}
    row |= {"repeats": [repeat], "rate": interval, "speedup": interval, "outliers": [], "reason": "", "cluster": None}
    old = {"suite": "quick", "title": "Quick", "command": "c", "date": "d", "repeats": 1, "steps": 2, "cores": 2}
    outcome = from_json(old | {"machine": {"processor": "p"}, "rows": [row], "published": []}, "old.json")
    assert outcome.unit == "images/s" and outcome.is_whole
    assert outcome.rows[0].repeats[0].times == (0.6, 0.5) and outcome.rows[0].label == "x, x"
    assert from_json(json.loads(json.dumps(asdict(outcome))), "again") == outcome
