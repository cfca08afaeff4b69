"""`cluster import`: the nvidia-smi output of a machine becomes a cluster file that the planner accepts."""

from __future__ import annotations

import json
import re
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.cli.main import main
from stagewright.cluster.catalog import open_cluster, shipped
from stagewright.cluster.topology import Device
from stagewright.errors import UserError
from stagewright.hardware.cluster_file import find_device
from stagewright.hardware.smi import SmiText, parse_smi
from tests.nvml_like import Card, Library
from tests.smi_texts import BRIDGED_4, MESH_8, SWITCHED_4, TITAN_8, smi_xml

GIB = 1 << 30


def imported(tmp_path: Path, topo: str | None, table: str | None, *arguments: str) -> Path:
    given_texts = []
    for flag, text in (("topo", topo), ("smi", table)):
        if text is not None:
            (tmp_path / flag).write_text(text)
            given_texts += [f"--{flag}", str(tmp_path / flag)]
    main(["cluster", "import", *given_texts, "-o", str(tmp_path / "box.toml"), *arguments])
    return tmp_path / "box.toml"


def levels(path: Path) -> list[tuple[str, float, tuple[tuple[int, ...], ...]]]:
    _, cluster = open_cluster(str(path))
    return [(level.link.name, level.link.bandwidth, level.groups) for level in cluster.machines[0].levels]


@pytest.mark.parametrize("is_old", [False, True])
def test_reads_xml_of_new_and_old_drivers(is_old: bool) -> None:
    text = smi_xml("NVIDIA A100-PCIE-40GB", 40960, 2, link=(3, "8x"), watts=(200, 250), is_old=is_old)
    gpus, software = parse_smi(SmiText("smi", f"$ nvidia-smi -q -x\n\x1b[0m{text}$ exit"))
    assert (software, len(gpus)) == ("driver 550.54.15" if is_old else "driver 550.54.15, CUDA 12.4", 2)
    gpu = gpus[1]
    assert (gpu.index, gpu.uuid, gpu.name) == (1, "GPU-00000001", "NVIDIA A100-PCIE-40GB")
    assert (gpu.memory, gpu.is_mig) == (40 * GIB, False)
    assert (gpu.pcie_generation, gpu.pcie_width, gpu.card_generation, gpu.card_width) == (3, 8, None, 16)
    assert (gpu.power_limit, gpu.power_default, gpu.is_capped) == (200.0, 250.0, True)


def test_what_the_driver_does_not_know_is_none_in_xml() -> None:
    ((gpu,), _) = parse_smi(SmiText("smi", smi_xml("NVIDIA GB10", "N/A", 1, link=("N/A", "0x"))))
    assert (gpu.memory, gpu.pcie_generation, gpu.pcie_width) == (None, None, None)


def test_xml_gives_the_slots_and_the_cap(tmp_path: Path) -> None:
    cards = smi_xml("NVIDIA GeForce RTX 3090", 24576, 8, link=(3, "8x"), watts=(300, 350))
    path = imported(tmp_path, TITAN_8, cards, "--gpus", "0-1")
    assert levels(path) == [("pcie3-phb", 11.4e9 / 2, ((0, 1),))]
    text = path.read_text()
    assert "GPU 1 is capped at 300 of 350 W" in text and "shows the slot" not in text
    assert "GPUs 0, 1 of the machine" in text
    unknown = smi_xml("NVIDIA GeForce RTX 3090", 24576, 8, link=("N/A", "0x"))
    text = imported(tmp_path, TITAN_8, unknown, "--gpus", "0-1").read_text()
    assert "PCIe 4.0 x16 is the best that the GPU supports" in text and "capped" not in text


@pytest.mark.parametrize(
    ("name", "mib", "known"),
    [
        ("NVIDIA TITAN V", 12066, "titan-v"),
        ("GeForce RTX 2080 Ti", 11019, "rtx-2080ti"),
        ("NVIDIA GeForce RTX 2080 Ti", 22528, "rtx-2080ti-22"),
        ("Tesla V100-SXM2-16GB", 16160, "v100-sxm2-16"),
        ("NVIDIA A100-SXM4-80GB", 81251, "a100-sxm4-80"),  # an older driver's count
        ("NVIDIA A100-SXM4-40GB", 40536, "a100-sxm4-40"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm5"),
        ("NVIDIA A10", 23028, "a10"),
        ("NVIDIA H200", 143771, "h200"),
    ],
)
def test_finds_devices_by_name_and_memory(name: str, mib: int, known: str) -> None:
    assert find_device(shipped(), name, mib << 20) == known


def test_an_unknown_device_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'NVIDIA GeForce RTX 9080 Ti' .*12288 MiB; known: .*rtx-3090.*--device"):
        find_device(shipped(), "NVIDIA GeForce RTX 9080 Ti", 12288 << 20)
    with pytest.raises(ValueError, match=r"44000 MiB; .* rtx-2080ti \(11019 MiB\).*--device NAME"):
        find_device(shipped(), "GeForce RTX 2080 Ti", 44000 << 20)


def test_the_published_machine_matches_the_catalog(tmp_path: Path) -> None:
    path = imported(tmp_path, TITAN_8, smi_xml("NVIDIA TITAN V", 12066, 8, link=(3, "16x")))
    _, found = open_cluster(str(path))
    known = shipped().cluster("titan-v-8")
    assert found.machines[0].levels == known.machines[0].levels
    assert (found.machines[0].kind, found.machines[0].cores) == ("titan-v", 48)


def test_counts_all_links_in_a_mesh_and_only_those_to_a_switch(tmp_path: Path) -> None:
    mesh = levels(imported(tmp_path, MESH_8, smi_xml("Tesla V100-SXM2-16GB", 16160, 8)))
    assert mesh == [("nvlink2", 6 * 20e9, (tuple(range(8)),))]
    switched = levels(imported(tmp_path, SWITCHED_4, smi_xml("NVIDIA A100-SXM4-80GB", 81920, 4)))
    assert switched == [("nvlink3", 12 * 20e9, ((0, 1, 2, 3),))]


def test_nvlink_pairs_are_an_inner_level_and_geforce_copies_through_the_host(tmp_path: Path) -> None:
    pairs = levels(imported(tmp_path, BRIDGED_4, smi_xml("NVIDIA GeForce RTX 3090", 24576, 4)))
    assert pairs == [("nvlink3-ga102", 4 * 12e9, ((0, 1), (2, 3))), ("pcie4-phb", 2 * 22.2e9, ((0, 1, 2, 3),))]
    (_, outer) = levels(
        imported(tmp_path, BRIDGED_4.replace("PHB", "SYS"), smi_xml("NVIDIA GeForce RTX 3090", 24576, 4))
    )
    assert outer[:2] == ("pcie4-sys", 16e9), "there is one link between sockets, however many share it"
    beside = TITAN_8.replace("SYS", "PHB")
    (first, second) = levels(imported(tmp_path, beside, smi_xml("NVIDIA GeForce RTX 3090", 24576, 8), "--pcie", "3"))
    assert (first[0], second[0]) == ("pcie3-phb", "pcie3-phb") and first[2][0] == (0, 1)


def test_imports_some_gpus_of_several_machines_and_plans_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = TITAN_8 + smi_xml("NVIDIA TITAN V", 12066, 8)
    options = ("--gpus", "4-7", "--count", "2", "--network", "net-10g", "--cores", "12", "--name", "two")
    (tmp_path / "both.txt").write_text(both)
    path = tmp_path / "box.toml"
    text = str(tmp_path / "both.txt")
    main(["cluster", "import", "--topo", text, "--smi", text, "-o", str(path), *options, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["device"] == "titan-v" and said["toml"] == path.read_text() and said["devices"] == 4
    _, cluster = open_cluster(str(path))
    assert (cluster.name, len(cluster.machines), cluster.machines[1].cores) == ("two", 2, 12)
    assert cluster.link(Device(0, 0), Device(1, 0)).name == "net-10g"
    assert [level.groups for level in cluster.machines[0].levels] == [((0, 1), (2, 3)), ((0, 1, 2, 3),)]
    main(["plan", "vgg-small", "--cluster", str(path), "--devices", "2", "--batch", "64", "--json"])
    assert json.loads(capsys.readouterr().out)


def test_reads_standard_input_and_writes_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (SWITCHED_4 + "\xff\n" + XML).encode("latin-1")  # not UTF-8
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(data)))
    main(["cluster", "import", "--topo", "-", "--smi", "-"])
    assert 'device = "h200"' in capsys.readouterr().out


def test_imports_this_machine_from_its_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = [Card(width=8, generation=3), Card(generation=3)]
    monkeypatch.setitem(sys.modules, "pynvml", Library(cards, {(0, 1): 30}))
    main(["cluster", "import", "--here"])
    out = capsys.readouterr().out
    assert '{ link = "pcie3-phb", lanes = 0.5 }' in out and 'device = "rtx-3090"' in out


XML = smi_xml("NVIDIA H200", 143771, 4)
ENTITIES = XML.replace(
    'SYSTEM "nvsmi_device_v12.dtd">', '[<!ENTITY a "NVIDIA H200"><!ENTITY name SYSTEM "file:///etc/passwd">]>'
).replace("NVIDIA H200</", "&a;</")


@pytest.mark.parametrize(
    ("topo", "table", "arguments", "message"),
    [
        (SWITCHED_4, None, (), "give --smi FILE, or --topo FILE with --device NAME"),
        (None, XML, (), "4 GPUs but nothing says how they are connected; give --topo FILE"),
        (TITAN_8, XML, (), "the topology has 8 GPUs but nvidia-smi -q -x shows 4; save both on the same machine"),
        (SWITCHED_4, XML, ("--gpus", "2-9"), "--gpus names 4 but there are 4 (0-3)"),
        (SWITCHED_4, XML, ("--gpus", "2-x"), "--gpus '2-x' is not a list of GPUs (for example 0-3,6)"),
        (SWITCHED_4, XML, ("--name", "a b"), "cluster name 'a b'"),
        (SWITCHED_4, XML, ("--cores", "0"), "--cores is 0; give at least 1"),
        (SWITCHED_4, XML, ("--count", "2"), "has no network between machines 0 and 1"),
        (SWITCHED_4, XML, ("--device", "h300"), "unknown device 'h300'"),
        (SWITCHED_4, XML, ("--device", "rtx-4090"), "the catalog gives rtx-4090 none; choose another --device"),
        (SWITCHED_4, XML, ("--here",), "--here"),
        (SWITCHED_4, "| NVIDIA-SMI 550.54 |", (), "has no <nvidia_smi_log>; save the output of nvidia-smi -q -x"),
        (SWITCHED_4, XML + XML, (), "has 2 <nvidia_smi_log> and 2 </nvidia_smi_log>; save the output of"),
        (SWITCHED_4, XML.partition("</gpu>")[0], (), "has 1 <nvidia_smi_log> and 0 </nvidia_smi_log>; save the"),
        (SWITCHED_4, XML.replace("</uuid>", ""), (), "line 21, column 4: the XML is damaged (mismatched tag); save"),
        (SWITCHED_4, XML.replace("<attached_gpus>4", "<attached_gpus>8"), (), "describes 4 of 8 GPUs and driver 550"),
        (SWITCHED_4, XML.replace("driver_version", "driver"), (), "describes 4 of 4 GPUs and driver unknown; save"),
        (SWITCHED_4, XML.replace("NVIDIA H200", "N/A"), (), "GPU 0 has no product_name; save the output"),
        (SWITCHED_4, smi_xml("NVIDIA H200", 143771, 4, mig="Enabled"), (), "GPU 0 is split into MIG instances;"),
        (SWITCHED_4, smi_xml("NVIDIA H200", 143771, 0), (), "names driver 550.54.15 but no GPU"),
        (SWITCHED_4, XML.replace("NVIDIA H200", "&name;"), (), "the XML is damaged (undefined entity); save"),
        (SWITCHED_4, ENTITIES, (), "the XML is damaged (undefined entity); save"),
        (SWITCHED_4, XML.replace("<gpu id", "<!DOCTYPE a><gpu id"), (), "column 4: the XML is damaged (not well"),
        (SWITCHED_4, XML + " " * (4 << 20), (), "has more than 4194304 bytes; give the output of nvidia-smi alone"),
        (SWITCHED_4, smi_xml("NVIDIA H200", 143771, 4, names={2: "NVIDIA L4"}), (), "no 'NVIDIA L4' with 143771 MiB"),
        (None, None, (), "nothing to import: give --topo FILE and --smi FILE, or --here for this machine"),
        (None, None, ("--here",), "can't read this machine's GPUs ("),
        (None, None, ("--smi", "/nowhere/smi"), "/nowhere/smi: No such file or directory; give the file"),
    ],
)  # fmt: skip
def test_errors_are_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    topo: str | None,
    table: str | None,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SystemExit) as ended:
        imported(tmp_path, topo, table, *arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1 and message in error, error
    assert not (tmp_path / "box.toml").exists()


def test_two_kinds_of_gpus_must_be_imported_separately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = smi_xml("NVIDIA A100-SXM4-40GB", 40960, 4)
    table = table.replace("NVIDIA A100-SXM4-40GB", "NVIDIA V100-SXM2-32GB", 1).replace("40960", "32510", 1)
    with pytest.raises(SystemExit):
        imported(tmp_path, SWITCHED_4, table)
    assert re.search(r"GPU 0 is a v100-sxm2-32 and GPU 1 a a100-sxm4-40; .* --gpus", capsys.readouterr().err)
    assert len(levels(imported(tmp_path, SWITCHED_4, table, "--gpus", "1-3"))) == 1


@given(st.text(alphabet="<>/&;a \n!", max_size=200))
def test_any_text_inside_the_xml_is_one_line_of_error(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_smi(SmiText("smi", f"<nvidia_smi_log>{text}</nvidia_smi_log>"))
    assert "\n" not in str(caught.value)


def test_deep_and_long_texts_end_soon_and_in_one_line() -> None:
    deep = "<a>" * 100_000 + "</a>" * 100_000
    for text in (f"<nvidia_smi_log>{deep}</nvidia_smi_log>", "<nvidia_smi_log>" * 100_000, "9" * 1_000_000):
        with pytest.raises(UserError) as caught:
            parse_smi(SmiText("smi", text))
        assert "\n" not in str(caught.value)
