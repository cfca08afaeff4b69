"""Runs the forward of a stage: eagerly, compiled, or by replaying CUDA graphs of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.errors import first_line
from stagewright.model.blocks import compiled
from stagewright.model.call import call, leaves_of
from stagewright.model.standin import unchanged_state, untouched_generators
from stagewright.runtime.comm.device import Device
from stagewright.runtime.precision import Precision
from stagewright.runtime.stage.graphs import (
    BrokenCapture,
    Call,
    Launch,
    Outcome,
    Trial,
    capture,
    distance,
    forms,
    no_waiting,
    preserved_buffers,
)

Release = Callable[[], None]
_EAGER_FORWARDS = 3  # before the capture; by then kernels have been chosen and compiled
BUSY = 1.1  # the GPU's time for a forward over the host's to launch it, from which replaying can gain little
_LOGGER = logging.getLogger(__name__)
_COMPILED_LIMITS = {"fp64": 1e-8, "fp32": 1e-3, "ieee": 1e-3, "tf32": 1e-2}  # relative differences by rounding
_COMPILED_LIMIT = 0.1  # of the half precisions


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How a run wants its stages computed."""

    is_compiled: bool = False
    graph: str = "off"  # auto, on or off
    obstacle: str | None = None  # why auto does not capture this stage


class Eager:
    """Calls the module, compiled or not; all versions of the weights share it."""

    overwrites = False  # a later backward overwrites the gradients of this one's inputs
    _keeps_casts = True

    def __init__(self, module: nn.Module, precision: Precision, names: Sequence[str] = ()) -> None:
        self.module = module
        self.names = names  # of the module's parameters that get the last arguments
        self.called = module
        self._precision = precision

    def forward(self, slot: int, arguments: Sequence[object]) -> tuple[Any, Release]:
        """The stage's output, and a function to call once its backward is done."""
        return self(arguments), lambda: None

    def __call__(self, arguments: Sequence[object]) -> Any:
        with self._precision.forward_context(keeps_casts=self._keeps_casts):
            return call(self.called, arguments, self.names)


class Compiled(Eager):
    """Calls the compiled module; its first output is compared with that of the module as it is.

    Where the forward draws random numbers the two can't be compared: a compiled one draws others.
    """

    _keeps_casts = False  # compiled code does that itself; a capture calls it without, too

    def __init__(self, name: str, module: nn.Module, precision: Precision, names: Sequence[str] = ()) -> None:
        super().__init__(module, precision, names)
        self.called = compiled(module)
        self._name = name
        self._is_compared = False

    def __call__(self, arguments: Sequence[object]) -> Any:
        expected = None if self._is_compared else self._uncompiled(arguments)
        made = super().__call__(arguments)
        self._is_compared = True
        if expected is not None:
            difference = distance(_outputs(expected), _outputs(made))
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
        self.overwrites = True
        self._name = name
        self._eager = eager
        self._precision = precision
        self._device = device
        self._is_forced = is_forced
        self._forwards = 0
        self._launch: Launch | None = None
        self._forms: list[object] = []  # of the arguments that were captured
        self._free: dict[int, list[Call]] = {}  # replays of each slot that no microbatch in flight uses

    def forward(self, slot: int, arguments: Sequence[object]) -> tuple[Any, Release]:
        self._forwards += 1
        if self._forwards == _EAGER_FORWARDS and not self._is_forced:
            self._launch = Launch()
            made = self._eager.forward(slot, arguments)
            self._launch.end()
            return made
        if self._forwards == _EAGER_FORWARDS + 1:
            self.overwrites = self._try(slot, arguments)
        if not self.overwrites or self._forwards <= _EAGER_FORWARDS or forms(arguments) != self._forms:
            return self._eager.forward(slot, arguments)
        free = self._free.setdefault(slot, [])
        replay = free.pop() if free else self._capture(arguments)
        return _copied(replay(arguments)), lambda: free.append(replay)

    def _capture(self, arguments: Sequence[object]) -> Call:
        return capture(self._eager.called, self._eager.names, self._precision, arguments)

    def _try(self, slot: int, arguments: Sequence[object]) -> bool:
        """Whether to replay from now on; the first replay is there then."""
        if self._is_busy():
            return False
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            replay, outcome = self._tried(arguments)
        except RuntimeError as error:
            if self._is_forced:
                raise
            if isinstance(error, BrokenCapture):
                raise RuntimeError(
                    f"{self._name} can't be captured as CUDA graphs: {first_line(error, 160)}; give --cuda-graph off"
                ) from error
            is_short = isinstance(error, torch.OutOfMemoryError)
            why = "their memory is not free" if is_short else f"they can't be captured: {first_line(error, 160)}"
            _LOGGER.info("%s: no CUDA graphs, since %s", self._name, why)
            if stream is not None:
                torch.cuda.synchronize()  # a failed capture leaves its stream current, on which buffers were restored
                torch.cuda.set_stream(stream)
            return False
        is_on = self._is_forced or outcome.is_better
        _LOGGER.info(
            "%s: %s, %.2f times as fast as without them, results differ by %.1e (%.1e between two runs without)",
            self._name,
            "CUDA graphs" if is_on else "no CUDA graphs",
            outcome.gain,
            outcome.difference,
            outcome.noise,
        )
        if is_on:
            self._forms = forms(arguments)
            self._free[slot] = [replay]
        return is_on

    def _is_busy(self) -> bool:
        """Whether the GPU takes longer for a forward than the host to launch it, so that replays gain little."""
        host, gpu = (0.0, 0.0) if self._launch is None else self._launch.milliseconds()
        if gpu > BUSY * host:
            _LOGGER.info(
                "%s: no CUDA graphs, since the GPU takes %.2f ms for a forward and the host %.2f ms to launch it",
                self._name,
                gpu,
                host,
            )
            return True
        return False

    def _tried(self, arguments: Sequence[object]) -> tuple[Call, Outcome]:
        """A capture, and how its replay compares with eager runs, without a trace in the module."""
        with preserved_buffers(self._eager.module):
            trial = Trial(self._eager.module, self._device, arguments)
            with no_waiting(not self._is_forced):
                first = trial.result(self._eager)
            again = trial.result(self._eager)
            replay = self._capture(arguments)
            replayed = trial.result(replay)
            eager, seconds = trial.seconds(self._eager), trial.seconds(replay)
            return replay, Outcome(eager / seconds, distance(first, replayed), distance(first, again))


def _copied(made: Any) -> Any:
    """A copy of the outputs, since the next replay overwrites them while messages may still be reading."""
    if type(made) is not tuple:
        return made  # the last stage's, from which the loss is computed at once
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in made)


Compute = Eager | CudaGraphs


def make_compute(
    name: str,
    module: nn.Module,
    precision: Precision,
    device: Device,
    options: ComputeOptions,
    names: Sequence[str] = (),
) -> Compute:
    """What runs the forward of a stage; what `auto` decides is logged under the stage's name."""
    eager = Compiled(name, module, precision, names) if options.is_compiled else Eager(module, precision, names)
    is_forced = options.graph == "on"
    if device.device.type != "cuda" or options.graph == "off":
        return eager
    if options.obstacle and not is_forced:
        _LOGGER.info("%s: no CUDA graphs, since %s", name, options.obstacle)
        return eager
    return CudaGraphs(name, eager, precision, device, is_forced=is_forced)
