"""`selftest`: what passes, what fails and what can't be checked; ranks are emulated, and real ones train nightly."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.calibration.rows import read_rows
from stagewright.cli import machine as command
from stagewright.config.sections import Config
from stagewright.errors import RunFailed
from stagewright.hardware.doctor import selftest
from stagewright.hardware.doctor.selftest import Check, CheckState, Effort, UnderTest, run_checks, runs_on
from stagewright.planning.traced import trace_model
from stagewright.profile.profile import Ceilings, Profile, Table, Transfer, Unit
from stagewright.run.profile import Here
from stagewright.run.train import Result, run
from tests.commands import fails, prints

CPU = UnderTest("cpu", 2)
SMALL = Effort("resnet8", "fp32", batches=(6, 6), networks=("resnet8",), steps=2)
LINKS = {"transfers": [{"source": 0, "target": 1, "bandwidth": 2e9, "latency": 3e-5}], "reduce": 1e9, "wrong": []}


def emulated(config: Config) -> Result:
    return run(replace(config, run=replace(config.run, emulate=True)))


def profiled(config: Config, *_: object) -> Here:
    """Units that take a millisecond each and have many weights, so that stages win; measured at 2 and 4 samples."""
    model = config.model.name
    names = [shape.name for shape in trace_model(model).shapes]
    units = tuple(Unit(name, "conv", 1e-3, 2e-3, 10**7, 9, 9, 9, 9) for name in names)
    ceilings = Ceilings({"fp32": 1e9}, 1e9, 5e8, 1e8, (Transfer(0, 1, 1e9, 1e-5),))
    tables = tuple(Table("fp32", samples, units) for samples in (2, 4))
    return Here("cpu", 2, Profile(model, "cpu", "stagewright", (3, 32, 32), 2, ceilings, tables), None, None, Path())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "measure_links", lambda *_, **__: LINKS)
    monkeypatch.setattr(selftest, "profile_here", profiled)


def checks(
    machine: UnderTest, effort: Effort, tmp_path: Path, minutes: float = 99, until: str = ""
) -> dict[str, Check]:
    """What was found by the name of each check, up to a part."""
    found = run_checks(machine, effort, minutes, str(tmp_path / "row.toml"))
    return {f"{check.part}: {check.name}": check for check in takewhile(lambda check: check.part != until, found)}


def test_every_check_passes_on_two_cpu_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", emulated)
    found = checks(CPU, SMALL, tmp_path)
    assert {name: one.line for name, one in found.items() if one.state is not CheckState.PASSED} == {
        "links: messages and sums, nccl": "NCCL needs a GPU for each rank, this machine has 0 GPUs"
    }
    for mode in ("dp 2", "sync 1-1", "stale 1-1"):
        assert 0 <= found[f"parity: resnet8, {mode}"].figures["difference"] <= 1e-12
    assert "2.00 GB/s, 30 us" in found["links: messages and sums, gloo"].line
    assert " 1-1: " in found["rates: resnet8, the plan chosen here"].line
    rate = found["rates: resnet8, data parallel on all"].figures
    assert rate["images_per_second"] > 0 and rate["predicted"] > 0
    (row,) = read_rows(str(tmp_path / "row.toml"))
    assert (row.hardware, row.gpus, row.model, row.batch_per_gpu) == ("cpu", 2, "resnet8", 4)
    assert row.images_per_second == round(rate["images_per_second"], 2)


def wrong_weight(result: Result) -> Result:
    """The result with one weight off by a thousandth."""
    weights = result.weights()
    weights["fc.bias"][0] += 1e-3

    class Off(Result):
        def weights(self) -> dict[str, torch.Tensor]:
            return weights

    return Off(**{name: getattr(result, name) for name in Result.__dataclass_fields__})


def test_a_weight_that_differs_fails_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", lambda config: wrong_weight(emulated(config)))
    found = run_checks(CPU, replace(SMALL, steps=1), 99, str(tmp_path / "row.toml"))
    first = next(check for check in found if check.part == "parity")
    assert first.state is CheckState.FAILED and "(fc.bias), bar 1e-09" in first.line
    assert first.figures["difference"] > first.figures["bar"]


def test_a_run_that_fails_is_one_line_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(config: Config) -> Result:
        raise RunFailed("rank 1 was killed by SIGKILL\nat 1F3")

    wrong = {**LINKS, "wrong": ["sum of 2 ranks at rank 1"]}
    monkeypatch.setattr(selftest, "measure_links", lambda *_, **__: wrong)
    monkeypatch.setattr(selftest, "run", failing)
    found = checks(CPU, SMALL, tmp_path)
    assert found["links: messages and sums, gloo"].state is CheckState.FAILED
    assert "sum of 2 ranks at rank 1" in found["links: messages and sums, gloo"].line
    failed = [
        one.line
        for name, one in found.items()
        if name.startswith(("parity", "rates")) and one.state is CheckState.FAILED
    ]
    assert set(failed) == {"rank 1 was killed by SIGKILL"} and len(failed) == 6
    assert found["row: to send"].state is CheckState.NOT_CHECKED and not (tmp_path / "row.toml").exists()


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    found = checks(CPU, SMALL, tmp_path, minutes=-1)
    assert {one.state for one in found.values()} == {CheckState.NOT_CHECKED}
    assert all("--minutes" in one.line for one in found.values())


def test_one_gpu_is_not_enough_for_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "Tesla V100")
    found = checks(UnderTest("cuda", 1), SMALL, tmp_path, until="rates")
    code = found.pop("torch: code for the GPUs")
    assert code.state is CheckState.FAILED and "Tesla V100 of compute capability 7.0" in code.line
    assert {one.state for one in found.values()} == {CheckState.NOT_CHECKED} and len(found) == 4
    assert all("--share-gpu" in one.line for one in found.values())


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [
        ("sm_86", (8, 6), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_75", (8, 0), False),
        ("sm_75", (7, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_120", (12, 0), True),
        ("compute_90", (12, 0), True),
        ("compute_120", (10, 0), False),
    ],
)
def test_which_code_runs_on_which_gpu(code: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(code, capability) is runs


CHECKS = (
    Check(CheckState.PASSED, "all right", {"send": 1e9}, "links", "messages"),
    Check(CheckState.FAILED, "largest difference 1e-2", {}, "parity", "resnet8, dp 2"),
)


def test_the_command_prints_lines_or_json_and_fails_with_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_checks", lambda *_: iter(CHECKS[:1]))
    assert prints(capsys, "selftest") == "pass: links, messages: all right\n"
    found: dict[str, Any] = json.loads(prints(capsys, "selftest", "--json"))
    assert set(found) == {"machine", "environment", "checks"} and "torch" in found["environment"]
    assert found["checks"] == [
        {"part": "links", "name": "messages", "state": "pass", "line": "all right", "figures": {"send": 1e9}}
    ]
    monkeypatch.setattr(command, "run_checks", lambda *_: iter(CHECKS))
    assert "1 of 2 checks failed, first parity, resnet8, dp 2: largest difference 1e-2" in fails(capsys, "selftest")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the error says is missing")
def test_sharing_needs_exactly_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "this one has 0" in fails(capsys, "selftest", "--share-gpu")


@pytest.mark.skipif("STAGEWRIGHT_NIGHTLY" not in os.environ, reason="takes long: make nightly")
def test_real_ranks_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    row = tmp_path / "row.toml"
    found = json.loads(prints(capsys, "selftest", "--minutes", "60", "--row", str(row), "--json"))
    assert {check["state"] for check in found["checks"]} <= {"pass", "not checked"}
    assert sum(check["state"] == "pass" for check in found["checks"]) >= 9 and read_rows(str(row))
