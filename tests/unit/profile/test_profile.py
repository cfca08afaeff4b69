"""Profile files are read back as written, sizes in between are interpolated, profiles of other models are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stagewright.profile.profile import Ceilings, Profile, Table, Transfer, Unit, read_profile


def unit(name: str, scale: int = 1) -> Unit:
    return Unit(name, "linear", 0.5 * scale, 1.0 * scale, 7, 10 * scale, 20 * scale, 15 * scale, 30 * scale)


def profile() -> Profile:
    tables = (Table("fp32", 4, (unit("a"), unit("b"))), Table("fp32", 8, (unit("a", 3), unit("b", 3))))
    ceilings = Ceilings({"fp32": 1e9}, 1e9, 5e8, 1e8, (Transfer(0, 1, 1e9, 1e-5),))
    return Profile("model", "cpu", "stagewright", (3, 4, 4), 2, ceilings, tables)


def test_reads_back_what_it_wrote(tmp_path: Path) -> None:
    profile().write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile()


def test_stock_pytorch_sums_over_gloo_also_by_a_profile_that_has_no_other_sums() -> None:
    own = profile()
    assert own.ceilings is not None and own.over_gloo() == own
    both = replace(own, ceilings=replace(own.ceilings, reduce=3e8, host=3e10, gloo_reduce=1e8, gloo_host=1e10))
    stock = both.over_gloo().ceilings
    assert stock is not None and (stock.reduce, stock.host) == (1e8, 1e10)


@pytest.mark.parametrize(("samples", "forward", "output"), [(5, 0.75, 15), (6, 1.0, 20), (7, 1.25, 25)])
def test_a_size_between_two_measured_ones_is_interpolated(samples: int, forward: float, output: int) -> None:
    table = profile().at("fp32", samples)
    assert (table.samples, table.units[0].forward, table.units[0].output) == (samples, forward, output)
    assert table.units[0].parameters == 7
    assert profile().at("fp32", 6).units == (unit("a", 2), unit("b", 2))


@pytest.mark.parametrize(
    ("precision", "samples", "words"),
    [("bf16", 4, ["fp32", "bf16"]), ("fp32", 2, ["4 to 8", "2", "--samples 2"]), ("fp32", 16, ["4 to 8", "16"])],
)
def test_does_not_extrapolate_beyond_what_was_measured(precision: str, samples: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        profile().at(precision, samples)
    assert all(word in str(caught.value) for word in words)


def test_rejects_the_profile_of_another_model() -> None:
    profile().require("model", ["a", "b"])
    with pytest.raises(ValueError, match=r"of model \(2 units\) but the model is other \(3 units\)"):
        profile().require("other", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("[]", "stagewright profile"),
        ('{"format": "stagewright-profile-0"}', "stagewright profile"),
        ('{"format": "stagewright-profile-1", "model": 3}', "Profile lacks"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_rejects_a_file_that_is_not_a_profile(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=word):
        read_profile(tmp_path / "p.json")


@pytest.mark.parametrize("damage", ["nan", "saved", "workspace", "names", "empty"])
def test_rejects_damaged_numbers(tmp_path: Path, damage: str) -> None:
    profile().write(tmp_path / "p.json")
    content = json.loads((tmp_path / "p.json").read_text())
    units = content["tables"][0]["units"]
    if damage == "nan":
        units[0]["forward"] = float("inf")
    elif damage in ("saved", "workspace"):
        units[0][damage] = -1
    elif damage == "names":
        units[0]["name"] = "z"
    else:
        content["tables"] = []
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="profile again"):
        read_profile(tmp_path / "p.json")
