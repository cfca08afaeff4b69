"""The process of one rank of one side: `python -m stagewright.bench.demo.process RUNNER JOB RANK MEETING`.

Commands are JSON lines on standard input, events are JSON lines on standard output. The process exits when its input
ends, whatever it is doing, so that no rank outlives the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from stagewright.metrics import Span
from stagewright.runtime.job import Job


class Runner(Protocol):
    """One rank of a side, ready to train batches, which count from 0."""

    loss: float | None  # of the last batch trained, on ranks that compute one

    def train(self, first: int, steps: int) -> None: ...

    def busy(self, start: float, end: float) -> float | None:
        """The share of a segment's middle in which this rank's GPU computed, where it is known."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """What this rank has of the trained weights, by the names of the whole model."""
        ...

    def spans(self) -> Sequence[Span]:
        """Its last actions, where it records them."""
        ...


def main() -> None:
    """Build one rank by a class, module:Class, then train one segment per command."""
    name, path, rank, meeting = sys.argv[1:]
    module, _, made = name.partition(":")
    commands, send = _read_commands(), _open_output()
    job = Job.load(Path(path))
    torch.set_num_threads(job.config.run.threads or 1)
    runner: Runner = getattr(import_module(module), made)(job, int(rank), Path(meeting))
    send({"kind": "ready"})
    while True:
        command = commands.get()
        if "rest" in command:
            torch.cuda.empty_cache()
            send({"kind": "rested"})
            continue
        if "save" in command:
            folder = Path(command["save"])
            save_file(runner.weights(), folder / f"{rank}.safetensors")
            (folder / f"{rank}.json").write_text(json.dumps([asdict(span) for span in runner.spans()]))
            send({"kind": "saved"})
            continue
        time.sleep(max(0.0, command["at"] - time.monotonic()))  # all ranks of a machine read the same clock
        used = time.process_time()
        runner.train(command["first"], command["steps"])
        if job.config.run.device == "cuda":
            torch.cuda.synchronize()
        end, used = time.monotonic(), time.process_time() - used
        busy = runner.busy(command["at"], end)
        send({"kind": "timed", "end": end, "used": used, "loss": runner.loss, "busy": busy})


def _open_output() -> Callable[[dict[str, Any]], None]:
    """Reserve standard output for events; anything else that is printed goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(event: dict[str, Any]) -> None:
        output.write(json.dumps(event) + "\n")
        output.flush()

    return send


def _read_commands() -> queue.SimpleQueue[dict[str, Any]]:
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return commands


if __name__ == "__main__":
    main()
