"""Importing PipeDream's graph.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagewright.profile.pipedream import read_pipedream

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


def test_nodes_are_in_the_order_of_the_edges(tmp_path: Path) -> None:
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
        (("\tnode2 -- node3", "\tnode3 -- node2"), "cycle"),
    ],
)
def test_an_error_names_the_place_in_the_graph(tmp_path: Path, change: tuple[str, str], word: str) -> None:
    (tmp_path / "graph.txt").write_text(GRAPH.replace(*change))
    with pytest.raises(ValueError, match=word):
        read_pipedream(tmp_path / "graph.txt", "m", 16)
