"""Processes that train a model meanwhile, so that a profile is taken on a machine as busy as it will be in a run.

`background_load` starts them: `python -m stagewright.run.background_load WORKLOAD`. Each trains as a rank would, in the
run's precision, and always on microbatches of the size that is being measured.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch

from stagewright import objects
from stagewright.errors import UserError
from stagewright.model.call import differentiable
from stagewright.profile.measure import Workload, build_workload, make_example
from stagewright.runtime.precision import make_precision
from stagewright.runtime.process.children import start_process
from stagewright.runtime.process.object_pipe import pack, receive_objects
from stagewright.runtime.process.torch_flags import set_fast_flags

_EXIT_SECONDS = 60.0
_FAILED = "a process that trains beside the profile"


@contextmanager
def background_load(workload: Workload, processes: int) -> Iterator[Callable[[int], None]]:
    """Start the processes; what is yielded makes all of them train on microbatches of a size, and waits until they do.

    They end by themselves when their input is closed: CUDA MPS leaves the other processes on a GPU in an undefined
    state where one is killed while its kernels run, and these then fail with illegal memory accesses.
    """
    command = [sys.executable, "-m", "stagewright.run.background_load", json.dumps(asdict(workload))]
    content = pack([workload.model]) if processes and objects.is_given(workload.model) else None
    started: list[subprocess.Popen[str]] = []

    def use(samples: int) -> None:
        for process in started:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(f"{samples}\n")
                process.stdin.flush()
        for process in started:
            assert process.stdout is not None
            if not process.stdout.readline():  # printed once it trains
                raise UserError(f"{_FAILED} ended with code {process.wait()}; take fewer --together or --samples")

    try:
        for _ in range(processes):
            started.append(start_process(command, content, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        yield use
    finally:
        with ExitStack() as stack:
            for process in started:
                stack.callback(_end, process)
            for process in started:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_load(text: str) -> None:
    """Train the model over and over on microbatches of the size that was last read, until standard input is closed."""
    values: dict[str, Any] = json.loads(text)
    workload = Workload(**{**values, "input": tuple(values["input"]), "samples": tuple(values["samples"])})
    torch.set_num_threads(workload.threads)
    precision = make_precision(workload.precision, workload.device)
    if workload.device == "cuda":
        set_fast_flags(precision)
    model = build_workload(workload)
    while line := sys.stdin.readline():
        example = make_example(workload, int(line))
        is_running = False
        before: torch.cuda.Event | None = None
        while not select.select([sys.stdin], [], [], 0)[0]:  # also at its end, when the parent ends for any reason
            with precision.forward_context():
                roots = [output.float().mean() for output in differentiable(model(example))]
            torch.autograd.backward(roots)
            before = _wait_for(before, workload.device)  # two passes at most are under way on a GPU
            if not is_running:
                is_running = True
                print("running", flush=True)
    if workload.device == "cuda":
        torch.cuda.synchronize()


def _wait_for(before: torch.cuda.Event | None, device: str) -> torch.cuda.Event | None:
    """Wait for the end of the pass before the last; returns the event at the end of the last one."""
    if device != "cuda":
        return None
    if before is not None:
        before.synchronize()
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


if __name__ == "__main__":
    receive_objects()
    run_load(sys.argv[1])
