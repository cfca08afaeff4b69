"""torch's global state: the flags that a run sets, and how a run inside someone else's process leaves them unchanged.

A rank process just sets its flags, and keeps the memory that it frees. An emulated run shares the process with the
caller's code, so it runs inside `preserved_state`, which restores every flag, the random state and the current device,
however the run ends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import backends

from stagewright.config.sections import Config
from stagewright.runtime.precision import Precision, precision_of

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1), "MALLOC_MMAP_MAX_": (-4, 0)}  # glibc: number and value of mallopt


def set_flags(config: Config) -> None:
    """Set this process's flags for arithmetic on GPUs: the fastest convolutions, unless bits must repeat."""
    if config.run.device != "cuda":
        return
    set_fast_flags(precision_of(config))
    backends.cudnn.benchmark = not config.run.deterministic
    if config.run.deterministic:
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)


def set_fast_flags(precision: Precision) -> None:
    """Set this process's flags for the fastest arithmetic of a precision on GPUs."""
    precision.set_flags()
    backends.cudnn.benchmark = True


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next microbatch, unless environment variables say how it works.

    glibc would return large tensors to the system at once, and page faults of the next ones take up to a seventh of a
    CPU rank's time where a layer's weights have tens of megabytes. Other C libraries have no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _MALLOC):
        for number, value in _MALLOC.values():
            mallopt(number, value)


class Flag(NamedTuple):
    """A global setting of torch."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    default: Any = None  # to restore where the value can't be read

    def read(self) -> Any:
        """The value; None where torch raises, because it was set by another interface (`fp32_precision`)."""
        try:
            return self.get()
        except RuntimeError:
            return None


def _attribute(name: str, module: Any, attribute: str, default: Any = None) -> Flag:
    return Flag(name, lambda: getattr(module, attribute), lambda value: setattr(module, attribute, value), default)


def _set_cublas_workspace(value: str) -> None:
    if value:
        os.environ[_CUBLAS_WORKSPACE] = value
    else:
        os.environ.pop(_CUBLAS_WORKSPACE, None)


# In the order of restoring: torch's coarse settings also write the fine ones, which follow them.
FLAGS = (
    Flag("num_threads", torch.get_num_threads, torch.set_num_threads),
    Flag(
        "deterministic_algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Flag(_CUBLAS_WORKSPACE, lambda: os.environ.get(_CUBLAS_WORKSPACE, ""), _set_cublas_workspace),
    _attribute("cudnn.benchmark", backends.cudnn, "benchmark"),
    Flag("float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    _attribute("cuda.matmul.allow_tf32", backends.cuda.matmul, "allow_tf32"),
    _attribute("cudnn.allow_tf32", backends.cudnn, "allow_tf32", True),
    _attribute("cuda.matmul.fp32_precision", backends.cuda.matmul, "fp32_precision"),
    _attribute("cudnn.conv.fp32_precision", backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute("cudnn.rnn.fp32_precision", backends.cudnn.rnn, "fp32_precision"),
    _attribute("mkldnn.matmul.fp32_precision", backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
)


@contextmanager
def preserved_state(gpus: Sequence[int] = ()) -> Iterator[None]:
    """Restore torch's flags, its random state and the current GPU at the end of the context; `gpus` are those used."""
    with preserved_flags(gpus), torch.random.fork_rng(gpus):
        yield


@contextmanager
def preserved_flags(gpus: Sequence[int] = ()) -> Iterator[None]:
    """Restore torch's flags, the current GPU and the random state of GPUs, but not that of the host."""
    before = [flag.read() for flag in FLAGS]
    current = torch.cuda.current_device() if gpus else None
    random = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    try:
        yield
    finally:
        for flag, value in zip(FLAGS, before, strict=True):
            wanted = flag.default if value is None else value
            if wanted is not None and flag.read() != wanted:
                flag.set(wanted)
        for gpu, state in zip(gpus, random, strict=True):
            torch.cuda.set_rng_state(state, gpu)
        if current is not None:
            torch.cuda.set_device(current)
