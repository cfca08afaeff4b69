"""Compiled stages give the reference's numbers and compile once; what decides whether CUDA graphs are used."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from stagewright.runtime.stage import compute
from stagewright.runtime.stage.compute import Compiled, Compute, ComputeOptions, CudaGraphs, Eager, make_compute
from stagewright.runtime.stage.precision import make_precision
from tests.parity import Case, assert_near, emulate, make_job, refer


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", "0:0.0:1.0:2", "second,third", mode="stale", staleness=2, steps=6, eval_every=3),
        Case("normed", "0:0-1.0:2", "third", mode="stale", staleness=1, steps=6, dynamic=True),
    ],
    ids=str,
)
def test_compiled_stages_equal_the_reference_and_compile_once(case: Case, tmp_path: Path) -> None:
    """On the CPU without code generation, on which the graphs, their number and their results do not depend."""
    torch._dynamo.reset()
    counters.clear()
    with (
        mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        mock.patch("tests.parity.make_job", partial(make_job, compile=True)),
    ):
        run = emulate(case, tmp_path)
    expected = refer(case)
    assert_near(run.weights, expected.weights | expected.buffers, 1e-9)
    assert counters["stats"]["unique_graphs"] == run.job.plan.world, "one per rank, since here they share a process"


def computing(device: str = "cuda", **options: Any) -> Compute:
    where: Any = SimpleNamespace(device=torch.device(device), seed=lambda seed: None)
    return make_compute("stage 1", nn.Identity(), make_precision("fp32", "cuda"), where, ComputeOptions(**options))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"graph": "on"}, CudaGraphs),
        ({"graph": "auto"}, CudaGraphs),
        ({"graph": "off"}, Eager),
        ({"graph": "on", "overlaps": True}, CudaGraphs),
        ({"graph": "auto", "overlaps": True}, Eager),
        ({"graph": "on", "is_compiled": True}, Compiled),
        ({"graph": "on", "device": "cpu"}, Eager),
    ],
)
def test_graphs_are_considered_on_gpus_unless_reductions_overlap(options: dict[str, Any], kind: type) -> None:
    assert type(computing(**options)) is kind


class Trial:
    """Made results and times of three calls without CUDA graphs and one with them."""

    def __init__(self, differs: float, gain: float) -> None:
        self._results = [torch.ones(4), torch.ones(4), torch.ones(4) + differs]
        self._seconds = [gain, 1.0]

    def result(self, call: object) -> list[Tensor]:
        return [self._results.pop(0)]

    def seconds(self, call: object) -> float:
        return self._seconds.pop(0)


@pytest.mark.parametrize(
    ("graph", "differs", "gain", "is_on"),
    [
        ("auto", 0.0, 1.3, True),
        ("auto", 0.0, 1.02, False),
        ("auto", 0.1, 1.3, False),
        ("on", 0.1, 0.9, True),
    ],
)
def test_a_trial_decides_on_graphs_and_its_numbers_are_logged(
    graph: str, differs: float, gain: float, is_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = computing(graph=graph)
    assert isinstance(found, CudaGraphs)
    with (
        caplog.at_level("INFO"),
        mock.patch.object(compute, "_Trial", lambda *_: Trial(differs, gain)),
        mock.patch.object(compute, "_preserved_state", lambda _: nullcontext()),
        mock.patch.object(found, "_capture", lambda _: lambda arguments: torch.ones(4)),
    ):
        for _ in range(4):
            found.forward(0, [torch.ones(4)])
    assert found.overwrites is is_on
    (line,) = caplog.messages
    assert line.startswith(f"stage 1: {'' if is_on else 'no '}CUDA graphs") and f"{gain:.2f}" in line


def test_a_stage_without_trained_parameters_is_tried_too(caplog: pytest.LogCaptureFixture) -> None:
    found = computing(graph="on")  # of a module without any
    with (
        caplog.at_level("INFO"),
        mock.patch.object(compute, "_preserved_state", lambda _: nullcontext()),
        mock.patch.object(compute, "record_event", lambda: SimpleNamespace(synchronize=lambda: None)),
        mock.patch.object(found, "_capture", lambda _: lambda arguments: arguments[0]),
    ):
        for _ in range(4):
            found.forward(0, [torch.ones(4)])
    assert "results differ by 0.0e+00" in caplog.text


def test_auto_does_without_graphs_that_need_too_much_memory(caplog: pytest.LogCaptureFixture) -> None:
    found, forced = computing(graph="auto"), computing(graph="on")
    with (
        caplog.at_level("INFO"),
        mock.patch.object(CudaGraphs, "_capture", side_effect=torch.OutOfMemoryError),
        mock.patch.object(compute, "_preserved_state", lambda _: nullcontext()),
    ):
        for _ in range(5):
            found.forward(0, [torch.ones(4)])
        assert not found.overwrites and len(caplog.messages) == 1 and "memory" in caplog.messages[0]
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(4):
                forced.forward(0, [torch.ones(4)])


@pytest.mark.parametrize(("factor", "is_refused"), [(1.0, False), (1 + 1e-5, False), (1.1, True)])
def test_a_compiled_stage_that_computes_something_else_is_refused(
    factor: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(3, 2)
    monkeypatch.setattr(torch, "compile", lambda module, **options: lambda x: factor * module(x))
    stage = Compiled("stage 0", layer, make_precision("fp32", "cpu"))
    if is_refused:
        with pytest.raises(RuntimeError, match=r"stage 0 .*differs by 1\.0e-01"):
            stage([torch.randn(4, 3)])
    else:
        assert stage([torch.randn(4, 3)]).shape == (4, 2)


def test_a_compiled_stage_that_draws_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **options: lambda x: 2 * module(x))
    Compiled("stage 0", torch.nn.Dropout(0.5), make_precision("fp32", "cpu"))([torch.ones(4, 3)])
