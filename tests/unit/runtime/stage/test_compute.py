"""Compiled stages give the reference's numbers and compile once; what decides whether CUDA graphs are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from stagewright.runtime.precision import make_precision
from stagewright.runtime.stage import compute, graphs
from stagewright.runtime.stage.compute import Compiled, Compute, ComputeOptions, CudaGraphs, Eager, make_compute
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
        ({"graph": "on", "obstacle": "of something"}, CudaGraphs),
        ({"graph": "auto", "obstacle": "of something"}, Eager),
        ({"graph": "auto", "is_compiled": True}, CudaGraphs),
        ({"graph": "off", "is_compiled": True}, Compiled),
        ({"graph": "on", "device": "cpu"}, Eager),
    ],
)
def test_graphs_are_considered_on_gpus_unless_something_forbids_it(options: dict[str, Any], kind: type) -> None:
    assert type(computing(**options)) is kind


class MadeTrial:
    """Made results and times of three calls without CUDA graphs and one with them."""

    def __init__(self, differs: float, gain: float, noise: float = 0.0) -> None:
        self._results = [torch.ones(4), torch.ones(4) + noise, torch.ones(4) + differs]
        self._seconds = [gain, 1.0]

    def result(self, call: object) -> list[Tensor]:
        return [self._results.pop(0)]

    def seconds(self, call: object) -> float:
        return self._seconds.pop(0)


class MadeLaunch:
    """Made times of a forward: the host's, and the GPU's."""

    times = 2.0, 2.0

    def end(self) -> None:
        pass

    def milliseconds(self) -> tuple[float, float]:
        return self.times


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compute, graphs):
        monkeypatch.setattr(module, "preserved_buffers", lambda _: nullcontext())
    monkeypatch.setattr(compute, "no_waiting", lambda _: nullcontext())
    monkeypatch.setattr(compute, "Launch", MadeLaunch)


def forwards(found: Compute, count: int, *arguments: object) -> None:
    for _ in range(count):
        found.forward(0, arguments or [torch.ones(4)])[1]()


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
        mock.patch.object(compute, "Trial", lambda *_: MadeTrial(differs, gain)),
        mock.patch.object(compute, "capture", lambda *_: lambda arguments: torch.ones(4)),
    ):
        forwards(found, 4)
    assert found.overwrites is is_on
    (line,) = caplog.messages
    assert line.startswith(f"stage 1: {'' if is_on else 'no '}CUDA graphs") and f"{gain:.2f}" in line


@pytest.mark.parametrize(("graph", "captures"), [("auto", 0), ("on", 1)])
def test_auto_captures_nothing_where_the_gpu_is_busy_anyway(
    graph: str, captures: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeLaunch, "times", (2.0, 2.5))
    found = computing(graph=graph)
    with (
        caplog.at_level("INFO"),
        mock.patch.object(compute, "Trial", lambda *_: MadeTrial(0.0, 1.3)),
        mock.patch.object(compute, "capture", return_value=lambda arguments: torch.ones(4)) as capture,
    ):
        forwards(found, 6)
    assert capture.call_count == captures
    assert captures or "takes 2.50 ms for a forward and the host 2.00 ms to launch it" in caplog.text


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(4, dtype=torch.int64), torch.ones(4).requires_grad_(), 7])
def test_only_what_is_like_the_captured_arguments_is_replayed(other: object) -> None:
    """A replay copies into the captured arguments, which would spread a smaller tensor over a larger one."""
    found = computing(graph="on")
    replay = mock.Mock(side_effect=lambda arguments: arguments[0])
    with (
        mock.patch.object(compute, "Trial", lambda *_: MadeTrial(0.0, 1.3)),
        mock.patch.object(compute, "capture", return_value=replay),
    ):
        forwards(found, 5)
        assert replay.call_count == 2
        made, _ = found.forward(0, [other])
        assert made is other and replay.call_count == 2
        forwards(found, 1)
        assert replay.call_count == 3


def test_microbatches_in_flight_have_captures_and_outputs_of_their_own() -> None:
    """A replay overwrites what the capture returned, which a message may still read."""
    found, captured = computing(graph="on"), list[Tensor]()

    def capture(*_: object) -> Callable[[Sequence[object]], tuple[Tensor]]:
        captured.append(torch.zeros(4))
        held = captured[-1]
        return lambda arguments: (held.copy_(cast(Tensor, arguments[0])),)

    with (
        mock.patch.object(compute, "Trial", lambda *_: MadeTrial(0.0, 1.3)),
        mock.patch.object(compute, "capture", capture),
    ):
        forwards(found, 4)
        (first,), release = found.forward(0, [torch.full((4,), 1.0)])
        (second,), _ = found.forward(0, [torch.full((4,), 2.0)])
        assert len(captured) == 2, "the first one's backward is not done"
        release()
        (third,), _ = found.forward(0, [torch.full((4,), 3.0)])
    assert len(captured) == 2
    assert [float(made.mean()) for made in (first, second, third)] == [1.0, 2.0, 3.0]


def test_a_stage_without_trained_parameters_is_tried_too(caplog: pytest.LogCaptureFixture) -> None:
    found = computing(graph="on")  # of a module without any
    with (
        caplog.at_level("INFO"),
        mock.patch.object(graphs, "record_event", lambda: SimpleNamespace(synchronize=lambda: None)),
        mock.patch.object(compute, "capture", lambda *_: lambda arguments: arguments[0]),
    ):
        forwards(found, 4)
    assert "results differ by 0.0e+00" in caplog.text


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("error", "words"), [(torch.OutOfMemoryError(), "memory"), (RuntimeError("called a wait\nat x"), "a wait")]
)
def test_auto_does_without_graphs_that_can_not_be_captured(
    error: Exception,
    words: str,
    begun: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a capture that failed for another reason than memory, torch's allocator would keep what is freed."""

    def make_graphed(stage: Callable[..., Any], samples: Sequence[Tensor], **options: Any) -> None:
        stage(*samples)  # runs once as usual, to warm up, and then is captured
        raise error

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed)
    monkeypatch.setattr(graphs, "capturing", lambda: begun)
    monkeypatch.setattr(compute, "Trial", lambda *_: MadeTrial(0.0, 1.3))
    found, forced = computing(graph="auto"), computing(graph="on")
    with caplog.at_level("INFO"):
        if begun and words == "a wait":
            with pytest.raises(RuntimeError, match="stage 1 can't be captured as CUDA graphs"):
                forwards(found, 5)
        else:
            forwards(found, 5)
            assert not found.overwrites and len(caplog.messages) == 1 and words in caplog.messages[0]
            assert "\n" not in caplog.messages[0]
        with pytest.raises(type(error)):
            forwards(forced, 4)


def test_what_fails_after_the_capture_leaves_no_capture_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(MadeTrial):
        def seconds(self, call: object) -> float:
            raise RuntimeError("no events here")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda stage, samples, **_: stage(*samples) and stage)
    monkeypatch.setattr(graphs, "capturing", lambda: True)
    monkeypatch.setattr(compute, "Trial", lambda *_: Failing(0.0, 1.3))
    found = computing(graph="auto")
    forwards(found, 5)
    assert not found.overwrites


@pytest.mark.parametrize(
    ("differs", "noise", "deterministic", "is_on"),
    [(0.0, 0.0, True, True), (1e-7, 0.0, True, False), (1e-7, 0.0, False, True), (0.05, 0.05, False, False)],
)
def test_a_replay_must_equal_a_forward_that_is_the_same_each_time(
    differs: float, noise: float, deterministic: bool, is_on: bool
) -> None:
    """Two runs of a forward that leaves out layers at random differ by as much as a replay that does not."""
    found = computing(graph="auto")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with (
            mock.patch.object(compute, "Trial", lambda *_: MadeTrial(differs, 1.3, noise)),
            mock.patch.object(compute, "capture", lambda *_: lambda arguments: torch.ones(4)),
        ):
            forwards(found, 4)
    finally:
        torch.use_deterministic_algorithms(before)
    assert found.overwrites is is_on


def test_a_capture_calls_compiled_code_without_compiling_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    module, precision = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), make_precision("bf16", "cpu")
    where: Any = SimpleNamespace(device=torch.device("cuda"), seed=lambda seed: None)
    found = make_compute("stage 1", module, precision, where, ComputeOptions(is_compiled=True, graph="on"))
    seen: list[Tensor] = []

    def make_graphed(stage: Callable[..., Any], samples: Sequence[Tensor], **options: Any) -> Callable[..., Any]:
        seen.extend(samples)
        made = stage(*samples)
        return lambda *_: made

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed)
    monkeypatch.setattr(compute, "Trial", lambda *_: MadeTrial(0.0, 1.3))
    expected = found.forward(0, [torch.ones(8, 4)])[0]
    forwards(found, 3, torch.ones(8, 4))
    made = found.forward(0, [torch.ones(8, 4)])[0]
    assert torch.equal(made, expected) and counters["stats"]["unique_graphs"] == 1
    weights = list(module.parameters())
    assert [sample.data_ptr() for sample in seen[1:]] == [weight.data_ptr() for weight in weights]
    assert not any(sample is weight for sample, weight in zip(seen[1:], weights, strict=True))


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
