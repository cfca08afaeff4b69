"""CUDA graphs of a stage: their capture, and what a trial of one says: whether it computes the same, and how fast."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stagewright.model.call import leaves_of
from stagewright.runtime.comm.device import Device, record_event, timed_event
from stagewright.runtime.precision import Precision
from stagewright.torch_internals import tree_flatten, tree_unflatten

Call = Callable[[Sequence[object]], Any]  # of a stage
_TRIALS = 5
_MIN_SPEEDUP = 1.05  # below which replaying is not worth its memory
_TENSOR = object()  # stands for a tensor of what a stage returns
_NOISE = 10.0  # how many times the difference between two eager runs a replay may differ
_MOST_NOISE = 1e-2  # between two eager runs; where they differ by more, the forward is not the same each time


class BrokenCapture(RuntimeError):
    """A capture that began and did not end; torch's allocator takes it for unfinished from now on."""


def capture(module: nn.Module, names: Sequence[str], precision: Precision, arguments: Sequence[object]) -> Call:
    """A replay of forward, whose backward is a replay too; it uses the weights that are in the module now.

    The captured function takes the weights as arguments: their leaves would tie the capture to other streams. They
    are parameters as well: compiled code would be compiled again for tensors of another type. `names` are of the
    module's parameters that get the last arguments.
    """
    weights = {name: leaf for name, leaf in module.named_parameters() if leaf.requires_grad}
    is_changed = [_is_changed(tensor) for tensor in _tensors(arguments)]
    returned: list[Any] = []  # how the tensors become what the stage returns
    has_begun = False

    def stage(*tensors: Tensor) -> Any:
        nonlocal has_begun
        has_begun = capturing()
        given, own = tensors[: len(is_changed)], tensors[len(is_changed) :]
        copies = iter([t.clone() if changed else t for t, changed in zip(given, is_changed, strict=True)])
        values = tuple(next(copies) if isinstance(one, Tensor) else one for one in arguments)
        count = len(values) - len(names)
        named = dict(zip(names, values[count:], strict=True))
        made = functional_call(module, dict(zip(weights, own, strict=True)), values[:count], named)
        leaves, spec = tree_flatten(made)
        returned[:] = [spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    samples = [_sample(tensor) for tensor in _tensors(arguments)]
    aliases = [nn.Parameter(leaf.detach()) for leaf in weights.values()]  # share memory: nothing is copied
    context = precision.forward_context(keeps_casts=False)  # so that the casts are part of the capture
    try:
        with preserved_buffers(module), context, _no_garbage_collection():
            replay = torch.cuda.make_graphed_callables(stage, (*samples, *aliases), allow_unused_input=True)
    except RuntimeError as error:
        if has_begun and not isinstance(error, torch.OutOfMemoryError):
            raise BrokenCapture(str(error)) from error
        raise
    leaves = list(weights.values())

    def replayed(given: Sequence[object]) -> Any:
        made: Iterator[Tensor] = iter(replay(*_tensors(given), *leaves))  # type: ignore[arg-type]
        spec, template = returned
        return tree_unflatten([next(made) if leaf is _TENSOR else leaf for leaf in template], spec)

    return replayed


def capturing() -> bool:
    """Whether operations are recorded now, and not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def forms(arguments: Sequence[object]) -> list[object]:
    """What a capture holds for: the shapes and types of tensors, and the other arguments."""
    return [(a.shape, a.dtype, a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]


# --- The trial --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a replay compares with two eager runs."""

    gain: float  # times as fast
    difference: float  # of the replay from the first run, relative to the size of the results
    noise: float  # of the second run from the first

    @property
    def is_better(self) -> bool:
        """Whether the replay computes the same, and is worth its memory."""
        if torch.are_deterministic_algorithms_enabled():
            is_equal = self.difference == 0.0
        else:
            within = self.difference <= _NOISE * self.noise + torch.finfo(torch.float32).eps
            is_equal = self.noise <= _MOST_NOISE and within
        return is_equal and self.gain >= _MIN_SPEEDUP


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

    def result(self, call: Call) -> list[Tensor]:
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

    def seconds(self, call: Call) -> float:
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


def _is_changed(tensor: Tensor) -> bool:
    """Whether the stage changes an argument in place, so that it was given a copy."""
    return tensor.requires_grad and not tensor.is_leaf


def _sample(tensor: Tensor) -> Tensor:
    """A new leaf with the same values."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The distance between two results, relative to the norm of the first."""
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(some, others, strict=True))
    size = sum(float(a.double().square().sum()) for a in some)
    return float((difference / size) ** 0.5) if size else 0.0
