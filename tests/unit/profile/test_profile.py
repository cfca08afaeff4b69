"""Profiles as files: what is written is read back, sizes in between are interpolated, other models are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.profile.pipedream import read_pipedream
from stagewright.profile.profile import Ceilings, Profile, Table, Transfer, Unit, read_profile


def unit(name: str, scale: int = 1) -> Unit:
    return Unit(name, "linear", 0.5 * scale, 1.0 * scale, 7, 10 * scale, 20 * scale, 15 * scale, 30 * scale)


def profile() -> Profile:
    tables = (Table("fp32", 4, (unit("a"), unit("b"))), Table("fp32", 8, (unit("a", 3), unit("b", 3))))
    ceilings = Ceilings({"fp32": 1e9}, 1e9, 5e8, 1e8, (Transfer(0, 1, 1e9, 1e-5),))
    return Profile("model", "cpu", "stagewright", (3, 4, 4), 2, ceilings, tables)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    profile().write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile()


def test_a_size_in_between_is_on_the_line(tmp_path: Path) -> None:
    table = profile().at("fp32", 6)
    assert table.samples == 6 and table.units[0] == replace(unit("a", 2))


@pytest.mark.parametrize(
    ("precision", "samples", "words"),
    [("bf16", 4, ["fp32", "bf16"]), ("fp32", 2, ["4 to 8", "2", "--samples 2"]), ("fp32", 16, ["4 to 8", "16"])],
)
def test_what_was_not_measured_is_not_guessed(precision: str, samples: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        profile().at(precision, samples)
    assert all(word in str(caught.value) for word in words)


def test_another_models_profile_is_refused() -> None:
    profile().require("model", ["a", "b"])
    with pytest.raises(ValueError, match=r"of model \(2 units\) but the model is other \(3 units\)"):
        profile().require("other", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("[]", "stagewright profile"),
        ('{"format": "stagewright-profile-0"}', "stagewright profile"),
        ('{"format": "stagewright-profile-1", "model": 3}', "model"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=word):
        read_profile(tmp_path / "p.json")


@pytest.mark.parametrize("damage", ["nan", "negative", "names", "empty"])
def test_damaged_numbers_are_refused(tmp_path: Path, damage: str) -> None:
    profile().write(tmp_path / "p.json")
    content = json.loads((tmp_path / "p.json").read_text())
    units = content["tables"][0]["units"]
    if damage == "nan":
        units[0]["forward"] = float("inf")
    elif damage == "negative":
        units[0]["saved"] = -1
    elif damage == "names":
        units[0]["name"] = "z"
    else:
        content["tables"] = []
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="profile again"):
        read_profile(tmp_path / "p.json")


GRAPH = """\
node1 -- Input0 -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=64.0, parameter_size=0.0
node2 -- Conv -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=100.0, parameter_size=40.0
node10 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.5, activation_size=100.0, parameter_size=0.0
node3 -- Add -- forward_compute_time=0.25, backward_compute_time=0.25, activation_size=100.0, parameter_size=0.0
\tnode1 -- node2
\tnode2 -- node10
\tnode2 -- node3
\tnode10 -- node3
"""


def test_pipedreams_graph_in_the_order_its_edges_say(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(GRAPH)
    (table,) = read_pipedream(tmp_path / "graph.txt", "m", 16).tables
    assert [u.name for u in table.units] == ["node2", "node10", "node3"]  # the input is dropped
    assert [u.forward for u in table.units] == [0.0015, 0.0005, 0.00025]
    assert table.units[0].parameters == 10
    assert [u.live for u in table.units] == [100, 200, 0]  # the first is still needed by the last


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("node2 -- Conv", "node2 Conv"), "line 2"),
        (("time=1.5", "time=-1.5"), "out of range"),
        (("time=1.5", "time=1..5"), "not a number"),
        (("\tnode2 -- node3", "\tnode2 -- node9"), "node9"),
        (("\tnode2 -- node3", "\tnode3 -- node2"), "circle"),
    ],
)
def test_a_broken_graph_says_where(tmp_path: Path, change: tuple[str, str], word: str) -> None:
    (tmp_path / "graph.txt").write_text(GRAPH.replace(*change))
    with pytest.raises(ValueError, match=word):
        read_pipedream(tmp_path / "graph.txt", "m", 16)
