"""Runs the forward of a stage: eagerly, compiled, or by replaying CUDA graphs of it."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from stagewright.errors import first_line
from stagewright.model.blocks import compiled
from stagewright.model.call import call, leaves_of
from stagewright.model.standin import unchanged_state, untouched_generators
from stagewright.runtime.comm.device import Device, record_event, timed_event
from stagewright.runtime.stage.precision import Precision

Release = Callable[[], None]
_Call = Callable[[Sequence[object]], Any]
_EAGER_FORWARDS = 3  # before the capture; by then kernels have been chosen and compiled
_TRIALS = 5
_MIN_SPEEDUP = 1.05  # below which replaying is not worth its memory
BUSY = 1.1  # the GPU's time for a forward over the host's to launch it, from which replaying can gain little
_LOGGER = logging.getLogger(__name__)
_COMPILED_LIMITS = {"fp64": 1e-8, "fp32": 1e-3, "ieee": 1e-3, "tf32": 1e-2}  # relative differences by rounding
_TENSOR = object()  # stands for a tensor of what a stage returns
_COMPILED_LIMIT = 0.1  # of the half precisions
_NOISE = 10.0  # how many times the difference between two eager runs a replay may differ
_MOST_NOISE = 1e-2  # between two eager runs; where they differ by more, the forward is not the same each time


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How a run wants its stages computed."""

    is_compiled: bool = False
    graph: str = "off"  # auto, on or off
    obstacle: str | None = None  # why auto does not capture this stage


class Compute(Protocol):
    """Runs a stage."""

    def forward(self, slot: int, arguments: Sequence[object]) -> tuple[Any, Release]:
        """The stage's output, and a function to call once its backward is done."""
        ...

    @property
    def overwrites(self) -> bool:
        """Whether a later backward overwrites the gradients of this one's inputs."""
        ...


class Eager:
    """Calls the module, compiled or not; all versions of the weights share it."""

    overwrites = False

    def __init__(
        self, module: nn.Module, precision: Precision, names: Sequence[str] = (), *, is_compiled: bool
    ) -> None:
        self.module = module
        self.names = names  # of the module's parameters that get the last arguments
        self.called = compiled(module) if is_compiled else module
        self._precision = precision
        self._keeps_casts = not is_compiled  # compiled code does that itself; a capture calls it without, too

    def forward(self, slot: int, arguments: Sequence[object]) -> tuple[Any, Release]:
        return self(arguments), lambda: None

    def __call__(self, arguments: Sequence[object]) -> Any:
        with self._precision.forward_context(keeps_casts=self._keeps_casts):
            return call(self.called, arguments, self.names)


class Compiled(Eager):
    """Calls the compiled module; its first output is compared with that of the module as it is.

    Where the forward draws random numbers the two can't be compared: a compiled one draws others.
    """

    def __init__(self, name: str, module: nn.Module, precision: Precision, names: Sequence[str] = ()) -> None:
        super().__init__(module, precision, names, is_compiled=True)
        self._name = name
        self._is_compared = False

    def __call__(self, arguments: Sequence[object]) -> Any:
        expected = None if self._is_compared else self._uncompiled(arguments)
        made = super().__call__(arguments)
        self._is_compared = True
        if expected is not None:
            difference = _distance(_outputs(expected), _outputs(made))
            limit = _COMPILED_LIMITS.get(self._precision.name, _COMPILED_LIMIT)
            _LOGGER.info("%s: compiled, its output differs by %.1e from the uncompiled one", self._name, difference)
            if not difference <= limit:
                raise RuntimeError(
                    f"{self._name} computes something else when it is compiled: its output differs by "
                    f"{difference:.1e}, at most {limit:.0e} is rounding in {self._precision.name}; leave out --compile"
                )
        return made

    def _uncompiled(self, arguments: Sequence[object]) -> Any:
        """The output of the module as it is, leaving no trace; None where it drew random numbers."""
        copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in arguments]
        with untouched_generators(), unchanged_state((self.module,)):
            before = _generator_states()
            with torch.no_grad(), self._precision.forward_context():
                expected = call(self.module, copies, self.names)
            drew = any(not torch.equal(a, b) for a, b in zip(before, _generator_states(), strict=True))
        return None if drew else expected


def _generator_states() -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *on_gpu]


def _outputs(made: Any) -> list[Tensor]:
    return [value.detach() for value in leaves_of(made)]


class CudaGraphs:
    """Captures forward and backward of a stage, once per version slot and microbatch in flight, and replays them.

    A capture holds its activations, so every version needs the memory of the whole depth. Unless replaying is forced, a
    trial on one microbatch decides, where the host takes as long to launch a forward as the GPU to compute it: it is
    dropped where results differ or the gain is small. A microbatch of another shape is not replayed.
    """

    def __init__(self, name: str, eager: Eager, precision: Precision, device: Device, *, is_forced: bool) -> None:
        self._name = name
        self._eager = eager
        self._precision = precision
        self._device = device
        self._is_forced = is_forced
        self._forwards = 0
        self._is_on = True
        self._launch: Launch | None = None
        self._has_begun = False  # a capture, which has not ended
        self._forms: list[object] = []  # of the arguments that were captured
        self._captured: dict[int, list[_Call]] = {}
        self._free: dict[int, list[int]] = {}

    @property
    def overwrites(self) -> bool:
        return self._is_on

    def forward(self, slot: int, arguments: Sequence[object]) -> tuple[Any, Release]:
        self._forwards += 1
        if self._forwards == _EAGER_FORWARDS and not self._is_forced:
            self._launch = Launch()
            made = self._eager.forward(slot, arguments)
            self._launch.end()
            return made
        if self._forwards == _EAGER_FORWARDS + 1:
            self._is_on = self._try(slot, arguments)
        if not self._is_on or self._forwards <= _EAGER_FORWARDS or _forms(arguments) != self._forms:
            return self._eager.forward(slot, arguments)
        free = self._free.setdefault(slot, [])
        if not free:
            self._add(slot, self.capture(arguments))
        lane = free.pop()
        made = self._captured[slot][lane](arguments)
        return _copied(made), lambda: free.append(lane)

    def _add(self, slot: int, replay: _Call) -> None:
        captured = self._captured.setdefault(slot, [])
        captured.append(replay)
        self._free.setdefault(slot, []).append(len(captured) - 1)

    def _try(self, slot: int, arguments: Sequence[object]) -> bool:
        """Whether to replay from now on."""
        if self._launch is not None:
            host, gpu = self._launch.milliseconds()
            if gpu > BUSY * host:
                _LOGGER.info(
                    "%s: no CUDA graphs, since the GPU takes %.2f ms for a forward and the host %.2f ms to launch it",
                    self._name,
                    gpu,
                    host,
                )
                return False
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self._has_begun = False
        try:
            with preserved_buffers(self._eager.module):
                trial = Trial(self._eager.module, self._device, arguments)
                with no_waiting(not self._is_forced):
                    first = trial.result(self._eager)
                again = trial.result(self._eager)
                replay = self.capture(arguments)
                self._has_begun = False
                replayed = trial.result(replay)
                eager, seconds = trial.seconds(self._eager), trial.seconds(replay)
                difference, noise = _distance(first, replayed), _distance(first, again)
        except RuntimeError as error:
            is_short = isinstance(error, torch.OutOfMemoryError)
            if self._is_forced:
                raise
            if self._has_begun and not is_short:  # torch's allocator takes the capture for unfinished from now on
                raise RuntimeError(
                    f"{self._name} can't be captured as CUDA graphs: {first_line(error, 160)}; give --cuda-graph off"
                ) from error
            why = "their memory is not free" if is_short else f"they can't be captured: {first_line(error, 160)}"
            _LOGGER.info("%s: no CUDA graphs, since %s", self._name, why)
            if stream is not None:
                torch.cuda.synchronize()  # a failed capture leaves its stream current, on which buffers were restored
                torch.cuda.set_stream(stream)
            return False
        gain = eager / seconds
        is_equal = _is_equal(difference, noise)
        is_on = self._is_forced or (is_equal and gain >= _MIN_SPEEDUP)
        _LOGGER.info(
            "%s: %s, %.2f times as fast as without them, results differ by %.1e (%.1e between two runs without)",
            self._name,
            "CUDA graphs" if is_on else "no CUDA graphs",
            gain,
            difference,
            noise,
        )
        if is_on:
            self._forms = _forms(arguments)
            self._add(slot, replay)
        return is_on

    def capture(self, arguments: Sequence[object]) -> _Call:
        """A replay of forward, whose backward is a replay too; it uses the weights that are in the module now.

        The captured function takes the weights as arguments: their leaves would tie the capture to other streams. They
        are parameters as well: compiled code would be compiled again for tensors of another type.
        """
        module = self._eager.called
        weights = {name: leaf for name, leaf in module.named_parameters() if leaf.requires_grad}
        is_tensor = [isinstance(argument, Tensor) for argument in arguments]
        is_changed = [_is_changed(tensor) for tensor in _tensors(arguments)]

        def stage(*tensors: Tensor) -> Any:
            self._has_begun = capturing()
            given, own = tensors[: len(is_changed)], tensors[len(is_changed) :]
            copies = iter([t.clone() if changed else t for t, changed in zip(given, is_changed, strict=True)])
            pairs = zip(arguments, is_tensor, strict=True)
            values = tuple(next(copies) if is_one else constant for constant, is_one in pairs)
            count = len(values) - len(names)
            named = dict(zip(names, values[count:], strict=True))
            made = functional_call(module, dict(zip(weights, own, strict=True)), values[:count], named)
            leaves, spec = tree_flatten(made)
            returned[:] = [spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]]
            return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

        names: Sequence[str] = self._eager.names
        returned: list[Any] = []  # how the tensors become what the stage returns
        samples = [_sample(tensor) for tensor in _tensors(arguments)]
        aliases = [nn.Parameter(leaf.detach()) for leaf in weights.values()]  # share memory: nothing is copied
        context = self._precision.forward_context(keeps_casts=False)  # so that the casts are part of the capture
        with preserved_buffers(module), context, _no_garbage_collection():
            replay = torch.cuda.make_graphed_callables(stage, (*samples, *aliases), allow_unused_input=True)
        leaves = list(weights.values())

        def replayed(given: Sequence[object]) -> Any:
            made: Iterator[Tensor] = iter(replay(*_tensors(given), *leaves))  # type: ignore[arg-type]
            spec, template = returned
            return tree_unflatten([next(made) if leaf is _TENSOR else leaf for leaf in template], spec)

        return replayed


def capturing() -> bool:
    """Whether operations are recorded now, and not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Launch:
    """Times one forward: until the host has launched it, and on the GPU."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first = timed_event()
        self._seconds = 0.0
        self._last = self._first

    def end(self) -> None:
        self._last = timed_event()
        self._seconds = time.perf_counter() - self._began

    def milliseconds(self) -> tuple[float, float]:
        """Of the host and of the GPU; waits for the forward."""
        self._last.synchronize()
        return 1e3 * self._seconds, self._first.elapsed_time(self._last)


class Trial:
    """Runs forward and backward of one microbatch repeatedly, without a trace in the module."""

    def __init__(self, module: nn.Module, device: Device, arguments: Sequence[object]) -> None:
        self._device = device
        self._arguments = [_sample(a) if isinstance(a, Tensor) else a for a in arguments]
        self._is_changed = [isinstance(a, Tensor) and _is_changed(a) for a in arguments]
        inputs = [a for a in self._arguments if isinstance(a, Tensor) and a.requires_grad]
        self._wanted = [*inputs, *(p for p in module.parameters() if p.requires_grad)]

    def result(self, call: _Call) -> list[Tensor]:
        """Copies of the outputs and gradients."""
        self._device.seed(0)
        pairs = zip(self._arguments, self._is_changed, strict=True)
        made = call([a.clone() if is_changed and isinstance(a, Tensor) else a for a, is_changed in pairs])
        outputs = leaves_of(made)
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        seeds = [torch.ones_like(root) for root in roots]
        has_backward = roots and self._wanted  # not a stage whose parameters are all frozen
        gradients = torch.autograd.grad(roots, self._wanted, seeds, allow_unused=True) if has_backward else ()
        return [t.detach().clone() for t in (*outputs, *gradients) if t is not None]

    def seconds(self, call: _Call) -> float:
        self.result(call)
        record_event().synchronize()
        begun = time.perf_counter()
        for _ in range(_TRIALS):
            self.result(call)
        record_event().synchronize()
        return time.perf_counter() - begun


@contextmanager
def preserved_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers and the random state at the end of the context."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    random_state = torch.cuda.get_rng_state()
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.data.copy_(before)  # not a change to autograd: microbatches in flight have saved the buffer
        torch.cuda.set_rng_state(random_state)


@contextmanager
def no_waiting(is_on: bool) -> Iterator[None]:
    """Raise an error where an operation makes the host wait for the GPU."""
    if not is_on:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage before a capture, not during it: freeing an old CUDA graph would make the capture fail."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tensors(arguments: Sequence[object]) -> list[Tensor]:
    return [argument for argument in arguments if isinstance(argument, Tensor)]


def _forms(arguments: Sequence[object]) -> list[object]:
    """What a capture holds for: the shapes and types of tensors, and the other arguments."""
    return [(a.shape, a.dtype, a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]


def _is_changed(tensor: Tensor) -> bool:
    """Whether the stage changes an argument in place, so that it was given a copy."""
    return tensor.requires_grad and not tensor.is_leaf


def _sample(tensor: Tensor) -> Tensor:
    """A new leaf with the same values."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copied(made: Any) -> Any:
    """A copy of the outputs, since the next replay overwrites them while messages may still be reading."""
    if type(made) is not tuple:
        return made  # the last stage's, from which the loss is computed at once
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in made)


def _is_equal(difference: float, noise: float) -> bool:
    """Whether a replay computes the same, by how it and a second eager run differ from the first."""
    if torch.are_deterministic_algorithms_enabled():
        return difference == 0.0
    return noise <= _MOST_NOISE and difference <= _NOISE * noise + torch.finfo(torch.float32).eps


def _distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The distance between two results, relative to the norm of the first."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(some, others, strict=True))
    size = sum(float(a.double().square().sum()) for a in some)
    return float((difference / size) ** 0.5) if size else 0.0


def make_compute(
    name: str,
    module: nn.Module,
    precision: Precision,
    device: Device,
    options: ComputeOptions,
    names: Sequence[str] = (),
) -> Compute:
    """What runs the forward of a stage; what `auto` decides is logged under the stage's name."""
    eager = (
        Compiled(name, module, precision, names)
        if options.is_compiled
        else Eager(module, precision, names, is_compiled=False)
    )
    is_forced = options.graph == "on"
    if device.device.type != "cuda" or options.graph == "off":
        return eager
    if options.obstacle and not is_forced:
        _LOGGER.info("%s: no CUDA graphs, since %s", name, options.obstacle)
        return eager
    return CudaGraphs(name, eager, precision, device, is_forced=is_forced)
