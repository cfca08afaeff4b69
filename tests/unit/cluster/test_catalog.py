"""The catalog: every figure with a source and a date, user's files over it, and errors that say what to do."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from stagewright.cluster.catalog import open_cluster, price_source, read_catalog, shipped
from stagewright.cluster.specs import DeviceSpec, calibration_note
from stagewright.cluster.topology import Device

FILES = ("devices.toml", "links.toml", "software.toml", "clusters.toml", "calibration.toml")
NAMES = {
    "titan-v",
    "v100-sxm2-16",
    "v100-sxm2-32",
    "rtx-2080ti",
    "rtx-2080ti-22",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "t4",
    "l4",
    "a10",
    "a100-sxm4-40",
    "a100-sxm4-80",
    "h100-sxm5",
    "h200",
    "cpu",
}


def tables(name: str) -> dict[str, dict[str, object]]:
    return tomllib.loads(resources.files("stagewright.cluster").joinpath(name).read_text())


def figures(value: object) -> list[list[object]]:
    if isinstance(value, dict):
        return [figure for entry in value.values() for figure in figures(entry)]
    is_figure = isinstance(value, list) and len(value) == 2 and isinstance(value[0], int | float)
    is_figure = is_figure and isinstance(value[1], str)
    return [value] if is_figure else []  # type: ignore[list-item]


def test_no_alias_names_two_devices() -> None:
    devices: Any = tables("devices.toml")["device"]
    names = [name for device, entry in devices.items() for name in (device, *entry.get("aliases", []))]
    assert sorted(names) == sorted(set(names))


def test_every_figure_has_a_source_with_a_date() -> None:
    sources: dict[str, dict[str, object]] = {}
    for name in FILES:
        sources |= tables(name).get("source", {})  # type: ignore[arg-type]
    assert all(source["text"] and source["date"] and isinstance(source["checked"], bool) for source in sources.values())
    for name in FILES:
        found = figures({key: value for key, value in tables(name).items() if key != "source"})
        assert name == "clusters.toml" or found
        assert {figure[1] for figure in found} <= sources.keys()


def test_has_common_devices_links_and_networks() -> None:
    catalog = shipped()
    assert catalog.devices.keys() >= NAMES
    levels = {f"pcie{generation}-{level}" for generation in (3, 4, 5) for level in ("pix", "phb", "node", "sys")}
    networks = {f"net-{rate}g" for rate in (1, 10, 25, 100, 200, 400)}
    assert levels | networks | {f"nvlink{generation}" for generation in range(1, 6)} <= catalog.links.keys()
    assert {"titan-v-8", "titan-v-16", "v100-32", "rtx-2080ti-4"} <= catalog.clusters.keys()


def test_published_server_has_its_topology() -> None:
    cluster = shipped().cluster("titan-v-8")
    links = {
        pair: cluster.link(Device(0, pair[0]), Device(0, pair[1])).name for pair in ((0, 1), (1, 2), (3, 4), (0, 7))
    }
    assert links == {(0, 1): "pcie3-pix", (1, 2): "pcie3-phb", (3, 4): "pcie3-sys", (0, 7): "pcie3-sys"}
    assert len(shipped().cluster("v100-32").devices) == 32


@pytest.mark.parametrize(
    ("precision", "convolution", "units"),
    [("fp32", True, "tf32"), ("fp32", False, "fp32"), ("ieee", True, "fp32"), ("bf16", True, "bf16")],
)
def test_stock_fp32_uses_tf32_in_convolutions_alone(precision: str, convolution: bool, units: str) -> None:
    a100 = shipped().device("a100-sxm4-80")
    assert a100.rate(precision, convolution=convolution)[0] == a100.peak[units]


def test_precisions_without_units_run_on_fp32_units() -> None:
    titan = shipped().device("titan-v")
    assert titan.rate("bf16", convolution=True)[0] == titan.peak["fp32"]
    assert isinstance(titan, DeviceSpec)


def own(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


MINE = """
[device.my-card]
memory_mib = 1000
bandwidth = 1e11
peak = { fp32 = 1e12 }
[link.my-link]
bandwidth = 5e9
[cluster.mine]
[[cluster.mine.machines]]
device = "my-card"
devices = 3
levels = [{ link = "my-link" }]
"""


def test_a_users_file_extends_the_catalog(tmp_path: Path) -> None:
    catalog, cluster = open_cluster(own(tmp_path, MINE))
    assert len(cluster.devices) == 3 and cluster.link(*cluster.devices[:2]).bandwidth == 5e9
    assert catalog.device("my-card").memory == 1000 << 20 and "titan-v" in catalog.devices


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('my-card"', 'rtx-4091"'), ["unknown device 'rtx-4091'", "rtx-4090"]),
        (('[{ link = "my-link" }]', '[{ link = "pcie3-pxi" }]'), ["unknown link 'pcie3-pxi'", "pcie3-pix"]),
        (("bandwidth = 5e9", "bandwidth = 0"), ["link.my-link.bandwidth", "0", "above 0"]),
        (('{ link = "my-link" }', '{ link = "my-link", groups = [[0, 1]] }'), ["0:1 and 0:2", "no link"]),
        (('levels = [{ link = "my-link" }]', ""), ["0:0 and 0:1", "add a level"]),
        (("devices = 3", "devices = 3\ncount = 2"), ["no network", "machines 0 and 1", "net-10g"]),
        (("peak = { fp32 = 1e12 }", "peak = { fp16 = 1e12 }"), ["needs fp32"]),
        (("bandwidth = 1e11", 'bandwidth = "fast"'), ["not a number"]),
        (("[cluster.mine]", "[cluster.mine"), ["not TOML"]),
        (("memory_mib = 1000", ""), ["no 'memory_mib'"]),
        (("devices = 3", "devices = 1000000"), ["1000000", "65536"]),
        (("devices = 3", "devices = 3\ncore = 32"), ["cluster.mine.machines", "'core'", "did you mean 'cores'?"]),
        (("[cluster.mine]", '[cluster.mine]\nnet = "net-10g"'), ["cluster.mine", "'net'", "network"]),
        (('{ link = "my-link" }', '{ link = "my-link", lane = 2 }'), ["levels", "'lane'", "'lanes'"]),
        (("bandwidth = 5e9", "bandwidth = 5e9\nlatancy = 1e-6"), ["link.my-link", "'latancy'", "'latency'"]),
        (("bandwidth = 1e11", "bandwidth = 1e11\nprice = 500"), ["device.my-card", "'price'", "usd"]),
    ],
)
def test_errors_in_a_file_are_one_line(tmp_path: Path, change: tuple[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        open_cluster(own(tmp_path, MINE.replace(*change)))
    for word in words:
        assert word in str(caught.value)


def paths_of(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to everything in nested tables and lists."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from paths_of(item, (*at, key))


EVERYTHING = """
[software.mine]
efficiency = 0.5
handover = "my-link"
fused = true
context_mib = 300
in_flight = 2
[source.me]
text = "told"
date = "2026-01-01"
measured = "three runs"
[loader]
decode = [500.0, "me"]
[device.my-card]
aliases = ["mc"]
efficiency = { fp32 = [0.5, "me"] }
watts = 100
usd = [300, "me"]
pcie = 4
nvlink_kind = "nvlink2"
"""


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {key: one.get(key, {}) | other.get(key, {}) for key in one.keys() | other.keys()}


def test_a_value_of_any_other_type_is_one_line() -> None:
    whole = tomllib.loads(MINE)
    more = tomllib.loads(EVERYTHING)
    whole["device"]["my-card"] |= more.pop("device")["my-card"]
    whole = merged(whole, more)
    assert read_catalog((), whole).device("mc").usd == 300
    for path in paths_of(whole):
        for wrong in (3, "x", [], {}, True, [[]], float("nan")):
            tables = deepcopy(whole)
            inner: Any = tables
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = wrong
            try:
                read_catalog((), tables)
            except ValueError as error:
                assert "\n" not in str(error)
            except Exception as error:
                pytest.fail(f"{path} = {wrong!r}: {type(error).__name__}: {error}")


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(ValueError, match=r"stagewright cluster list.*'titan-v-8'"):
        open_cluster("titanv-8")
    with pytest.raises(ValueError, match="oneflow"):
        shipped().system("onefow")
    with pytest.raises(ValueError, match="No such file"):
        open_cluster("/nowhere/at/all.toml")


def test_overrides_replace_single_figures() -> None:
    tried = read_catalog((), {"device": {"titan-v": {"efficiency": {"fp32": 0.5}}}})
    assert tried.device("titan-v").efficiency["fp32"] == 0.5
    assert tried.device("titan-v").bandwidth == shipped().device("titan-v").bandwidth


def test_a_price_comes_with_its_date() -> None:
    assert "2023-07" in price_source("rtx-4090")


def test_names_devices_without_measurements() -> None:
    def remark(*names: str, precision: str = "fp16") -> str | None:
        return calibration_note([shipped().device(name) for name in names], precision)

    assert remark("v100-sxm2-16", "h200") is None and remark("h200", "titan-v", precision="fp32") is None
    assert remark("rtx-3080", "rtx-3090") == "fp16 speed of rtx-3080: by other cards of its chip family"
    assert remark("gtx-1080ti", precision="fp32") == "fp32 speed of gtx-1080ti: by its data sheet"


def test_a_users_efficiency_counts_as_measured(tmp_path: Path) -> None:
    catalog, _ = open_cluster(own(tmp_path, MINE.replace("peak =", "efficiency = { fp32 = 0.7 }\npeak =")))
    assert calibration_note([catalog.device("my-card")], "fp32") is None
    catalog, _ = open_cluster(own(tmp_path, MINE))
    assert "my-card" in str(calibration_note([catalog.device("my-card")], "fp32"))


def test_first_reduces_a_cluster_to_its_first_devices() -> None:
    cluster = shipped().cluster("v100-32").first(12)
    assert [machine.devices for machine in cluster.machines] == [8, 4]
    assert cluster.link(Device(0, 7), Device(1, 0)).name == "net-100g"
    with pytest.raises(ValueError, match="33 devices were asked for but v100-32 has 32"):
        shipped().cluster("v100-32").first(33)
