"""Times every unit of a model on this device, inside whole forwards and backwards and without stopping the device.

Forward is timed around each unit's call. Backward runs once through the whole graph; a hook at each unit's output
notes when its gradient arrived, and the time until the next arrival is the unit's. On a GPU the notes are events in
the stream, read after everything has run; it gets something else to do first, so that issuing units is not timed."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from stagewright.model.cut import Chain
from stagewright.model.load import build_model, require_logits, running
from stagewright.model.walk import Walk
from stagewright.profile.profile import Ceilings, Profile, Table, Unit
from stagewright.profile.shapes import kind_of, saving

_WARM = 2
_REPEATS = 7
_MATRIX = {"cpu": 1024, "cuda": 8192}  # sides of a product large enough to fill the device
_MOST_SAMPLES = 2**20
_COPY_BYTES = 64 << 20
_HEAD_START_CYCLES = 200_000_000  # a tenth of a second
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled, as a text that another process can read."""

    model: str
    seed: int
    classes: int | None
    input: tuple[int, ...]
    precision: str
    device: str
    threads: int
    samples: tuple[int, ...]


class Clock:
    """Marks in time: the processor's clock, or events in a GPU's stream."""

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
        """Keep a GPU busy for a while, so that what is issued meanwhile runs back to back, however slow the issuing."""
        if self._on_gpu:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Let everything that was issued end, before marks are read."""
        if self._on_gpu:
            torch.cuda.synchronize()


def measure(
    subject: Subject, context: Context, together: int = 1, tell: Callable[[str], None] = lambda text: None
) -> Profile:
    """Profile a model here, while `together` - 1 other processes do the same."""
    torch.set_num_threads(subject.threads)
    chain = Chain(subject_model(subject))
    with _company(subject, together - 1):
        tables = []
        for samples in subject.samples:
            tell(f"{subject.model}: microbatch of {samples}")
            tables.append(_table(subject, chain, samples, context))
        tell("ceilings of the device")
        ceilings = measure_ceilings(subject.device, subject.precision)
    name = torch.cuda.get_device_name() if subject.device == "cuda" else "cpu"
    return Profile(subject.model, name, "stagewright", subject.input, together, ceilings, tuple(tables))


def subject_model(subject: Subject) -> nn.Module:
    model = build_model(subject.model, subject.seed, subject.classes).to(subject.device)
    if subject.precision == "fp64":
        model = model.double()
    return model.train()


def _table(subject: Subject, chain: Chain, samples: int, context: Context) -> Table:
    example = torch.randn(samples, *subject.input, device=subject.device)
    if subject.precision == "fp64":
        example = example.double()
    with running(subject.model, subject.input):
        facts = _facts(chain, example, context)
    clock = Clock(subject.device)
    passes = [_pass(chain, example, context, clock) for _ in range(_WARM + _REPEATS)][_WARM:]
    units = tuple(
        Unit(
            name,
            fact["kind"],
            statistics.median(times[name][0] for times in passes),
            statistics.median(times[name][1] for times in passes),
            fact["parameters"],
            fact["output"],
            fact["live"],
            fact["live_gradient"],
            fact["saved"],
        )
        for name, fact in facts.items()
    )
    return Table(subject.precision, samples, units)


def _facts(chain: Chain, example: Tensor, context: Context) -> dict[str, dict[str, Any]]:
    """What does not change from pass to pass: parameters and bytes."""
    owned = {tensor.untyped_storage()._cdata for tensor in (*chain.model.parameters(), *chain.model.buffers())}
    kept: list[UntypedStorage] = []
    counted: set[int] = set()
    facts: dict[str, dict[str, Any]] = {}
    with context():
        walk = Walk(chain, example)
        for visit in walk:
            with saving(kept, owned) as saved:
                output = visit.call()
            trained = [p for p in visit.parameters if p.requires_grad and id(p) not in counted]
            counted |= {id(parameter) for parameter in trained}
            live = [value for value in walk.live_behind(output) if isinstance(value, Tensor)]
            facts[visit.name] = {
                "kind": str(kind_of(visit)),
                "parameters": sum(parameter.numel() for parameter in trained),
                "output": output.nbytes if isinstance(output, Tensor) else 0,
                "live": sum(value.nbytes for value in live),
                "live_gradient": sum(value.nbytes for value in live if value.requires_grad),
                "saved": sum(saved),
            }
    require_logits(walk.output)
    return facts


def _pass(chain: Chain, example: Tensor, context: Context, clock: Clock) -> dict[str, tuple[float, float]]:
    """One forward and one backward of the whole model: seconds of each unit."""
    forward: dict[str, tuple[Any, Any]] = {}
    arrivals: list[tuple[str, Any]] = []

    def arrived(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: arrivals.append((name, clock.mark()))

    clock.head_start()
    with context():  # gradients stay and are added to, as they are within a batch
        walk = Walk(chain, example)
        for visit in walk:
            begun = clock.mark()
            output = visit.call()
            forward[visit.name] = (begun, clock.mark())
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(arrived(visit.name))  # type: ignore[no-untyped-call]
        loss = walk.output.float().mean()
    clock.head_start()
    torch.autograd.backward(loss)
    end = clock.mark()
    clock.settle()
    backward = dict.fromkeys(forward, 0.0)
    for (name, mark), (_, following) in zip(arrivals, [*arrivals[1:], ("", end)], strict=True):
        backward[name] += clock.between(mark, following)
    return {name: (clock.between(*marks), backward[name]) for name, marks in forward.items()}


def measure_ceilings(device: str, precision: str) -> Ceilings:
    """The rate of a matrix product, of a copy and of the optimizer."""
    clock = Clock(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}.get(precision, torch.float32)
    side = _MATRIX[device]
    left = torch.randn(side, side, device=device).to(dtype)
    source = torch.zeros(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    weights = nn.Parameter(torch.zeros(_COPY_BYTES // 4, device=device))
    weights.grad = torch.zeros_like(weights)
    optimizer = torch.optim.SGD([weights], lr=1e-3, momentum=0.9, fused=True)
    product = _typical(clock, lambda: left @ left)
    copy = _typical(clock, lambda: target.copy_(source))
    update = _typical(clock, lambda: optimizer.step())
    return Ceilings({precision: 2 * side**3 / product}, 2 * _COPY_BYTES / copy, _COPY_BYTES / update)


def _typical(clock: Clock, work: Callable[[], Any]) -> float:
    marks = []
    for _ in range(_WARM + _REPEATS):
        begun = clock.mark()
        work()
        marks.append((begun, clock.mark()))
    clock.settle()
    return statistics.median(clock.between(*pair) for pair in marks[_WARM:])


@contextmanager
def _company(subject: Subject, others: int) -> Iterator[None]:
    """Other processes that train the same model meanwhile, so that caches and memory are shared as in a run."""
    text = json.dumps({"subject": _as_dict(subject), "samples": max(subject.samples)})
    command = [sys.executable, "-m", "stagewright.profile.background_load", text]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(others):
            running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()  # it is under way
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _as_dict(subject: Subject) -> dict[str, Any]:
    return {name: getattr(subject, name) for name in Subject.__slots__}


def sample_sizes(samples: Sequence[int]) -> tuple[int, ...]:
    """Microbatch sizes to measure: each once, in order."""
    sizes = tuple(sorted(set(samples)))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"--samples {','.join(map(str, samples))}: microbatches have at least 1 sample")
    if sizes[-1] > _MOST_SAMPLES:
        raise ValueError(f"--samples {','.join(map(str, samples))}: microbatches have at most {_MOST_SAMPLES} samples")
    return sizes
