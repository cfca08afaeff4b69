"""Measures every unit of a model on this device, inside whole forward and backward passes, without stopping the device.

Forward is timed around each unit's call. Backward runs once through the whole graph; a hook at each unit's output
records when its gradient arrived, and the time until the next arrival is the unit's. On a GPU the times are events in
the stream, read after everything has run; the GPU is kept busy first, so that launch overhead is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from stagewright.errors import UserError
from stagewright.model.call import Inputs, differentiable
from stagewright.model.chain import Chain
from stagewright.model.load import build_model
from stagewright.model.walk import Walk, model_errors, require_output
from stagewright.profile.profile import Ceilings, Profile, Table, Unit
from stagewright.profile.trace import kind_of, run_units
from stagewright.torch_internals import keep_gpu_busy
from stagewright.voice import SILENT, Voice

_WARM_UP = 2  # passes that are not counted
REPEATS = 7
_MATRIX = {"cpu": 512, "cuda": 8192}  # sides of a product large enough to fill the device
_MOST_SAMPLES = 2**20
_COPY_BYTES = 64 << 20
_HEAD_START_CYCLES = 200_000_000  # a tenth of a second
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is profiled; plain values, so that it can be sent to another process."""

    model: str
    classes: int | None
    input: tuple[int, ...]
    precision: str
    device: str
    threads: int
    samples: tuple[int, ...]
    tokens: int = 0  # samples are whole numbers below this one; 0: real numbers
    frozen: str | None = None  # patterns of parameters that are not trained

    @property
    def is_channels_last(self) -> bool:
        """Whether images of convolutional models are stored so, as ranks on GPUs do."""
        return self.device == "cuda"


class Clock:
    """Points in time: the CPU's clock, or events in a GPU's stream."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last) / 1e3) if self._on_gpu else float(last - first)

    def head_start(self) -> None:
        """Keep a GPU busy, so that kernels launched meanwhile run back to back even if launches are slow."""
        if self._on_gpu:
            keep_gpu_busy(_HEAD_START_CYCLES)

    def synchronize(self) -> None:
        """Wait for everything that was launched; marks can be read after that."""
        if self._on_gpu:
            torch.cuda.synchronize()


def measure(
    workload: Workload,
    context: Context,
    together: int = 1,
    voice: Voice = SILENT,
    load: Callable[[int], None] = lambda samples: None,
    repeats: int = REPEATS,
) -> Profile:
    """Profile a model here, while `together` - 1 other processes train it.

    `load` is called with each microbatch size before it is measured, to make those processes train on the same size.
    `repeats`: passes that are counted.
    """
    torch.set_num_threads(workload.threads)
    model = build_workload(workload)
    chain = Chain(model, make_example(workload, 1), context=context, device=workload.device)
    is_shared = together > 1 and workload.device == "cuda"
    alone = _table(workload, chain, workload.samples[-1], context, repeats).seconds if is_shared else None
    tables = []
    for samples in workload.samples:
        voice.progress(f"{workload.model}: microbatch of {samples}")
        load(samples)
        tables.append(_table(workload, chain, samples, context, repeats))
    voice.progress("ceilings of the device")
    ceilings = measure_ceilings(workload.device, workload.precision)
    if alone is not None:
        ceilings = replace(ceilings, alone=tables[-1].seconds / alone)
    name = torch.cuda.get_device_name() if workload.device == "cuda" else "cpu"
    return Profile(workload.model, name, "stagewright", workload.input, together, ceilings, tuple(tables))


def build_workload(workload: Workload) -> nn.Module:
    """The model of a workload, on its device, in training mode, stored as a rank stores it."""
    side = workload.input[-1] if len(workload.input) == 3 else None
    model = build_model(workload.model, 0, workload.classes, image=side, frozen=workload.frozen)
    is_convolutional = any(isinstance(module, nn.Conv2d) for module in model.modules())
    order = torch.channels_last if workload.is_channels_last and is_convolutional else torch.preserve_format
    model = cast(nn.Module, model.to(device=workload.device, memory_format=order))  # type: ignore[call-overload]
    if workload.precision == "fp64":
        model = model.double()
    return model.train()


def _table(workload: Workload, chain: Chain, samples: int, context: Context, repeats: int) -> Table:
    example = make_example(workload, samples)
    with model_errors(workload.model, Inputs.of(example).form):
        units = _untimed_units(chain, example, context)
    clock = Clock(workload.device)
    passes = [time_units(chain, example, context, clock) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
    forward, backward = (
        _typical([{name: times[way] for name, times in one.items()} for one in passes]) for way in (0, 1)
    )
    timed = (replace(unit, forward=forward[unit.name], backward=backward[unit.name]) for unit in units)
    return Table(workload.precision, samples, tuple(timed))


def _typical(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each unit, scaled so that together they take the median pass.

    On a busy machine a few units of every pass wait, each time others: medians alone would add up to too little.
    """
    medians = {name: statistics.median(times[name] for times in passes) for name in passes[0]}
    whole, parts = statistics.median(sum(times.values()) for times in passes), sum(medians.values())
    return {name: seconds * (whole / parts if parts else 1.0) for name, seconds in medians.items()}


def make_example(workload: Workload, samples: int) -> Tensor:
    """Random samples, stored as a rank stores them."""
    if workload.tokens:
        return torch.randint(workload.tokens, (samples, *workload.input), device=workload.device)
    example = torch.randn(samples, *workload.input, device=workload.device)
    if workload.is_channels_last and example.dim() == 4:
        example = example.contiguous(memory_format=torch.channels_last)
    return example.double() if workload.precision == "fp64" else example


def _untimed_units(chain: Chain, example: Tensor, context: Context) -> list[Unit]:
    """The units with everything that is the same in every pass: kind, parameters and bytes."""
    units = []
    with context():
        walk = Walk(chain, example)
        for run in run_units(chain, walk):
            units.append(
                Unit(
                    run.visit.name,
                    str(kind_of(run.visit)),
                    forward=0.0,
                    backward=0.0,
                    parameters=run.parameters,
                    output=run.output.nbytes if isinstance(run.output, Tensor) else 0,
                    live=sum(value.nbytes for value in run.live),
                    live_gradient=sum(value.nbytes for value in run.live if value.requires_grad),
                    saved=run.saved,
                    begins=run.visit.name not in chain.impossible,
                    frozen=run.frozen,
                )
            )
    require_output(walk.output)
    return units


def time_units(chain: Chain, example: Tensor, context: Context, clock: Clock) -> dict[str, tuple[float, float]]:
    """Forward and backward seconds per unit, in one pass through the whole model."""
    forward: dict[str, tuple[Any, Any]] = {}
    arrivals: list[tuple[str, Any]] = []

    def arrived(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: arrivals.append((name, clock.mark()))

    clock.head_start()
    with context():  # gradients accumulate, as they do within a batch
        walk = Walk(chain, example)
        for visit in walk:
            begun = clock.mark()
            output = visit.call()
            forward[visit.name] = (begun, clock.mark())
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(arrived(visit.name))  # type: ignore[no-untyped-call]
        outputs = differentiable(walk.output)
    roots = [output.float().mean() for output in outputs]
    clock.head_start()
    torch.autograd.backward(roots)
    end = clock.mark()
    clock.synchronize()
    backward = dict.fromkeys(forward, 0.0)
    for (name, mark), (_, following) in zip(arrivals, [*arrivals[1:], ("", end)], strict=True):
        backward[name] += clock.between(mark, following)
    return {name: (clock.between(*marks), backward[name]) for name, marks in forward.items()}


def measure_ceilings(device: str, precision: str) -> Ceilings:
    """The rates of a large matrix product, of a copy and of the optimizer."""
    clock = Clock(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    side = _MATRIX[device]
    left = torch.randn(side, side, device=device).to(dtype)
    source = torch.zeros(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    weights = nn.Parameter(torch.zeros(_COPY_BYTES // 4, device=device))
    weights.grad = torch.zeros_like(weights)
    optimizer = torch.optim.SGD([weights], lr=1e-3, momentum=0.9, fused=True)
    product = _median_seconds(clock, lambda: left @ left)
    copy = _median_seconds(clock, lambda: target.copy_(source))
    update = _median_seconds(clock, lambda: optimizer.step())
    return Ceilings({precision: 2 * side**3 / product}, 2 * _COPY_BYTES / copy, _COPY_BYTES / update)


def _median_seconds(clock: Clock, work: Callable[[], Any]) -> float:
    marks = []
    for _ in range(_WARM_UP + REPEATS):
        begun = clock.mark()
        work()
        marks.append((begun, clock.mark()))
    clock.synchronize()
    return statistics.median(clock.between(*pair) for pair in marks[_WARM_UP:])


def sample_sizes(samples: Sequence[int]) -> tuple[int, ...]:
    """The microbatch sizes to measure, sorted and without duplicates."""
    sizes = tuple(sorted(set(samples)))
    if not sizes or sizes[0] < 1:
        raise UserError(f"--samples {','.join(map(str, samples))}: a microbatch has at least 1 sample")
    if sizes[-1] > _MOST_SAMPLES:
        raise UserError(f"--samples {','.join(map(str, samples))}: a microbatch has at most {_MOST_SAMPLES} samples")
    return sizes
