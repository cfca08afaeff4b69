"""Mutated configurations, placements, shares, plans, profiles, clusters, node lists: read, or refused in one line."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagewright.cli import main as cli
from stagewright.cluster.catalog import open_cluster
from stagewright.cluster.placement import parse_placement
from stagewright.cluster.topology import Cluster, Machine
from stagewright.config.toml import as_toml, make_config, parse_assignment, read_toml
from stagewright.model.cut import Chain
from stagewright.plan.make import make_plan, read_plan
from stagewright.planning.build import build_plan, stage_numbers
from stagewright.planning.simulate import balanced_costs
from stagewright.profile.profile import read_profile
from stagewright.runtime.multinode.nodes import cluster_of, read_nodes

CASES = int(os.environ.get("STAGEWRIGHT_READER_FUZZ", "400"))  # per reader; `make soak` runs many more
_SHOWN = max(4, CASES // 100)  # of them also run as a command
_SECONDS = 2.0  # of CPU time per text
_TOKENS = (
    *("nan", "inf", "-inf", "1e999", "-1", "0", "1.5", "9" * 25, "9" * 5000, "true", "null", '""', "''", "[]", "{}"),
    *("[", "]", "{", "}", '"', "\\", "\0", "\n", "\r", "=", ":", ",", ".", "-", "\ud800", "\u202e", "٣", "²", " "),
    *("[[", "]]", "[" * 3000, "1-99999999", "0:0-65536", "65536:0", "$(id)", "../..", "\x1b[2J"),
)


_VALUES = (
    *("true", "-1", "0", "1", "3", "0.5", "1e400", "nan", "-inf", "9223372036854775807", "9" * 30, "1979-05-27"),
    *('""', '"x"', '"0:0"', '"0:0-40"', '"1,1"', '"2:1"', '"dp"', '"pipedream"', '"gpipe"', "[]", "{}", '["0:0"]'),
)


def mutated(text: str, generator: random.Random) -> str:
    """A text with a few changes of the kind that breaks readers: changed, removed or doubled pieces, odd tokens."""
    for _ in range(generator.choice((1, 1, 1, 2, 4, 8))):
        at = generator.randrange(len(text) + 1)
        end = at + generator.randrange(1, 30)
        match generator.randrange(8):
            case 6 | 7 if " = " in text:
                lines = text.split("\n")
                number = generator.choice([number for number, line in enumerate(lines) if " = " in line])
                lines[number] = f"{lines[number].partition(' = ')[0]} = {generator.choice(_VALUES)}"
                text = "\n".join(lines)
            case 0:
                text = text[:at] + chr(generator.randrange(1, 256)) + text[at + 1 :]
            case 1:
                text = text[:at] + text[end:]
            case 2:
                text = text[:end] + text[at:]
            case 3:
                text = text[:at] + generator.choice(_TOKENS) + text[at:]
            case 4:
                text = text[:at] + generator.choice(_TOKENS) + text[end:]
            case _:
                text = text[:at]
    return text


def with_value_changed(tree: Any, generator: random.Random) -> Any:
    """The same JSON with one value replaced by one of another type, or left out."""
    values = (
        None,
        True,
        -1,
        0,
        1,
        1.5,
        10**25,
        float("nan"),
        float("inf"),
        "",
        "x",
        "0:0",
        [],
        {},
        [[]],
        [None],
        {"a": 1},
    )
    if isinstance(tree, dict) and tree and generator.random() < 0.9:
        key = generator.choice(list(tree))
        if generator.random() < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: with_value_changed(tree[key], generator)}
    if isinstance(tree, list) and tree and generator.random() < 0.9:
        index = generator.randrange(len(tree))
        return [*tree[:index], with_value_changed(tree[index], generator), *tree[index + 1 :]]
    return generator.choice(values)


@dataclass(frozen=True)
class Reader:
    """A reader of something that a user wrote."""

    read: Callable[[str, Path], object]
    seeds: Sequence[str]
    command: Callable[[str, Path], list[str]]  # the command that reads the same
    is_json: bool = False
    share: float = 1.0  # of the cases: fewer for a slow reader

    @property
    def cases(self) -> int:
        return int(CASES * self.share)


def _file(text: str, path: Path) -> str:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return str(path)


def _read_config(text: str, path: Path) -> None:
    config = make_config(read_toml(_file(text, path)))
    plan = build_plan(config.plan, cluster_of(config), costs=balanced_costs)
    assert plan.world <= 65536 * 8


def _read_shares(text: str, path: Path) -> None:
    shares = stage_numbers(text, "shares", ":")
    assert shares is not None
    _chain().by_shares(shares)


@cache
def _chain() -> Chain:
    from stagewright.model.load import build_model

    return Chain(build_model("vgg-small", 0, 10))


def _plan_seed(text: str) -> str:
    return json.dumps(make_plan(parse_placement(text), batch=32, cuts=["a"] * text.count(".")).describe(), indent=1)


_UNITS = [
    {
        "name": name,
        "kind": "conv2d",
        "forward": 0.1,
        "backward": 0.2,
        **dict.fromkeys(("parameters", "output", "live", "live_gradient", "saved", "workspace"), 4),
    }
    for name in ("a", "b")
]
_PROFILE = json.dumps(
    {
        "format": "stagewright-profile-1",
        "model": "m",
        "device": "cpu",
        "software": "torch 2",
        "input": [3, 32, 32],
        "together": 2,
        "ceilings": {"matrix": {"fp32": 1e11}, "copy": 1e10, "update": 1e9, "overhead": 1e-5},
        "tables": [{"precision": "fp32", "samples": samples, "units": _UNITS} for samples in (4, 8)],
    },
    indent=1,
)
_CLUSTER = """
[link.my-net]
bandwidth = 1e9
latency = 5e-6
[device.mine]
title = "a device with a long title, so that some changes hit what people alone read and are no error"
memory_mib = 16000
bandwidth = 9e11
usd = 1000
[device.mine.peak]
fp32 = 1.5e13
[cluster.home]
network = "my-net"
[[cluster.home.machines]]
device = "mine"
devices = 4
count = 2
cores = 16
levels = [{ link = "pcie3-pix", groups = [[0, 1], [2, 3]] }, { link = "pcie3-sys", lanes = 2 }]
"""
READERS = {
    "config": Reader(
        _read_config,
        [as_toml(make_config({"plan": {"placement": "0:0-1.0:2", "microbatches": 4}, "run": {"steps": 3}}))],
        lambda text, path: ["train", "--config", _file(text, path)],
    ),
    "assignment": Reader(
        lambda text, path: make_config(parse_assignment(text)),
        ["run.seed=3", "optimizer.lr=1e-3", 'model.name="vgg"', "data.shuffle=false", "nodes.list=10.0.0.1,10.0.0.2"],
        lambda text, path: ["train", f"--set={text}"],
    ),
    "placement": Reader(
        lambda text, path: parse_placement(text, Cluster((Machine(), Machine(8)))),
        ["0:0-6.0:7", "0:0-7,1:0-7.0:0-7,1:0-7", "0:0,2,4-6", "0:0-2.0:3-4.1:5"],
        lambda text, path: ["schedule", f"--placement={text}", "--batch", "8"],
    ),
    "shares": Reader(
        _read_shares,
        ["11:7", "1:1:1", "3:14:2:1"],
        lambda text, path: ["train", "--placement", "0:0.0:1", f"--shares={text}", f"--runs={path}"],
    ),
    "plan": Reader(
        lambda text, path: read_plan(text, "plan.json"),
        [_plan_seed("0:0-6.0:7"), _plan_seed("0:0-1"), json.dumps({"plan": json.loads(_plan_seed("0:0.0:1.0:2"))})],
        lambda text, path: ["train", "--plan", _file(text, path)],
        is_json=True,
    ),
    "profile": Reader(
        lambda text, path: read_profile(_file(text, path)).at("fp32", 6),
        [_PROFILE],
        lambda text, path: ["simulate", "vgg-small", "--profile", _file(text, path), "--mode", "dp", "--batch", "8"],
        is_json=True,
    ),
    "cluster": Reader(
        lambda text, path: open_cluster(_file(text, path)),
        [_CLUSTER],
        lambda text, path: ["simulate", "vgg-small", "--cluster", _file(text, path), "--mode", "dp", "--batch", "8"],
        share=0.25,
    ),
    "nodes": Reader(
        lambda text, path: read_nodes(text, {}),
        ["10.0.0.1,10.0.0.2:7000", "[fd00::1]:29600,fd00::2", "node-1.lan,node-2"],
        lambda text, path: ["train", f"--nodes={text}"],
    ),
}


def attempt(reader: Reader, text: str, path: Path) -> str | None:
    """Why the reader refuses a text, or None; fails on any other exception, and where reading takes long."""
    began = time.process_time()
    try:
        reader.read(text, path)
        refusal = None
    except ValueError as error:
        refusal = str(error)
        assert type(error).__name__ != "UnicodeDecodeError" and refusal.strip(), f"no reason for {text!r}"
    seconds = time.process_time() - began
    assert seconds < _SECONDS, f"{seconds:.1f} s to read {text[:300]!r}"
    return refusal


def assert_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails with exit code 2 and one line that says why."""
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.count("\n") == 1 and "Traceback" not in shown, (command, shown)
    assert len(shown) < 1000 and shown[:-1].isprintable(), shown


@pytest.mark.timeout(1800 + CASES // 5)
@pytest.mark.parametrize("name", READERS)
def test_mutated_texts_are_read_or_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_TOKEN", "sixteen letters or more")
    reader, path = READERS[name], tmp_path / f"{name}.toml"
    for seed in reader.seeds:
        assert attempt(reader, seed, path) is None
    generator = random.Random(name)
    refused: list[str] = []
    for number in range(reader.cases):
        seed = reader.seeds[number % len(reader.seeds)]
        if reader.is_json and number % 2:
            text = json.dumps(with_value_changed(json.loads(seed), generator))
        else:
            text = mutated(seed, generator)
        if attempt(reader, text, path) is not None:
            refused.append(text)
    assert 0.1 < len(refused) / reader.cases < 1
    shown = [text for text in refused if "\0" not in text]  # a command line can't hold that
    for text in shown[:: max(1, len(shown) // _SHOWN)]:
        assert_one_line(reader.command(text, path), capsys)


@pytest.mark.parametrize("name", READERS)
def test_texts_of_any_kind_are_read_or_refused(name: str, tmp_path: Path) -> None:
    reader = READERS[name]

    @settings(max_examples=reader.cases // 4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.text(max_size=60) | st.from_regex(r"[0-9:.,\[\]{}=\"a-]{1,40}", fullmatch=True))
    def check(text: str) -> None:
        attempt(reader, text, tmp_path / "any.toml")

    check()
