"""The matrix of connections, from the driver and from saved text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.hardware.gpu import Nvml
from stagewright.hardware.smi import SmiText, parse_topology
from stagewright.hardware.topology import read_topology
from tests.nvml_like import Card, Library
from tests.smi_texts import BRIDGED_4, MESH_8, SWITCHED_4, TITAN_8, topo


def parsed(text: str) -> list[list[str]]:
    return parse_topology(SmiText("topo.txt", text)).texts()


def read(library: Library) -> list[list[str]]:
    library.nvmlInit()
    return read_topology(Nvml(library)).texts()


def test_reads_bridges_and_sockets_from_the_driver() -> None:
    ancestors = {(0, 1): 10, (0, 2): 20, (0, 3): 30, (1, 2): 40, (1, 3): 50, (2, 3): 99}
    assert read(Library([Card()] * 4, ancestors)) == [
        ["X", "PIX", "PXB", "PHB"],
        ["PIX", "X", "NODE", "SYS"],
        ["PXB", "NODE", "X", "?"],
        ["PHB", "SYS", "?", "X"],
    ]


def test_counts_nvlinks_between_gpus_and_links_to_a_switch_reach_all() -> None:
    pairs = [Card(links=(1, 1)), Card(links=(0, 0)), Card()]
    assert read(Library(pairs, {(0, 2): 30, (1, 2): 30})) == [
        ["X", "NV2", "PHB"],
        ["NV2", "X", "PHB"],
        ["PHB", "PHB", "X"],
    ]
    assert read(Library([Card(switch_links=12)] * 3)) == [
        ["X", "NV12", "NV12"],
        ["NV12", "X", "NV12"],
        ["NV12", "NV12", "X"],
    ]


def test_reads_text_with_colour_codes_network_cards_and_a_legend() -> None:
    assert parsed(SWITCHED_4) == [["X" if i == j else "NV12" for j in range(4)] for i in range(4)]
    assert parsed(MESH_8)[0] == ["X", "NV1", "NV2", "NV1", "SYS", "SYS", "SYS", "NV2"]
    assert parsed(TITAN_8)[6] == ["SYS"] * 4 + ["PHB", "PHB", "X", "PIX"]
    assert parsed(BRIDGED_4)[2] == ["PHB", "PHB", "X", "NV4"]
    assert parse_topology(SmiText("t", MESH_8)).processors == 48


def test_reads_one_gpu_and_an_old_name_with_text_around_them() -> None:
    assert parsed("$ nvidia-smi topo -m\n\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == [["X"]]
    assert parsed("   GPU0  GPU1  CPU Affinity\n  GPU0  X  SOC  0-7\n  GPU1  SOC  X\n") == [["X", "SYS"], ["SYS", "X"]]


TWO = "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "topo.txt has no line that names the GPUs (GPU0 GPU1 ...) in 0 lines; save"),
        (TWO.replace("GPU0\t X \tPHB", "GPU0\t X \tPHX"), "line 2, column 10: GPU0 to GPU1 is 'PHX'; expected NV#,"),
        (TWO.replace("GPU1\tPHB\t X", "GPU1\tPHB\tPIX"), "line 3, column 10: GPU1 to GPU1 is 'PIX'; expected X"),
        (TWO.replace("GPU1\tPHB\t X", "GPU1\tX\tX"), "line 3, column 6: GPU1 to GPU0 is 'X'; expected NV#"),
        (TWO.replace("GPU1\tPHB", "GPU1\tSYS"), "line 2, column 1: GPU0 to GPU1 is PHB but GPU1 to GPU0 is SYS in"),
        (TWO.replace("\nGPU1\tPHB\t X ", ""), "line 1, column 1: 2 GPUs are named here but GPU1 has no row;"),
        (TWO.replace("\tPHB\n", "\n"), "line 2, column 8: GPU0 has 1 "),
        (TWO.replace("\nGPU1", "\nGPU0"), "line 3, column 1: GPU0 already has a row, in line 2"),
        (TWO.replace("\tGPU0\tGPU1", "\tGPU0\tGPU0"), "line 1, column 1: GPU0 names two columns"),
        (TWO.replace("PHB", "NV0"), "line 2, column 10: GPU0 to GPU1 is 'NV0'"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_line_and_column(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parsed(text)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_any_symmetric_matrix_reads_back(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 9))
    words = st.sampled_from(["NV1", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"])
    cells = [["X"] * size for _ in range(size)]
    for one in range(size):
        for other in range(one):
            cells[one][other] = cells[other][one] = data.draw(words)
    text = topo([" ".join(row) for row in cells], nics=data.draw(st.integers(0, 3)), tabs=data.draw(st.booleans()))
    assert parsed(text) == cells


@given(st.text(alphabet="GPU01XNVSYPHB \t\n\x1b[4m-,|", max_size=200))
def test_any_other_text_is_one_line_of_error(text: str) -> None:
    try:
        parsed(text)
    except ValueError as error:
        assert "\n" not in str(error)
