"""The process of one rank of one side: `python -m stagewright.bench.demo.process RUNNER JOB RANK MEETING`.

It makes a runner, a class as module:Class, and carries out calls of its methods: JSON lines on standard input, their
results as JSON lines on standard output. It exits when its input ends, whatever it is doing, so that no rank outlives
the process that started it.
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
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stagewright.metrics import Span
from stagewright.runtime.job import Job


class Runner:
    """One rank of a side, ready to train batches, which count from 0."""

    rank: int
    loss: float | None = None  # of the last batch trained, on ranks that compute one

    def train(self, first: int, steps: int) -> None:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """What this rank has of the trained weights, by the names of the whole model."""
        raise NotImplementedError

    def spans(self) -> Sequence[Span]:
        """Its last actions, where it records them."""
        return ()

    def timed(self, first: int, steps: int, at: float) -> dict[str, Any]:
        """Train batches from a moment on that all ranks share, since those of a machine read the same clock."""
        time.sleep(max(0.0, at - time.monotonic()))
        used = time.process_time()
        self.train(first, steps)
        return {"loss": self.loss, "used": time.process_time() - used, "end": time.monotonic()}

    def save(self, folder: str) -> None:
        """Write its weights (`RANK.safetensors`) and the spans of its last actions (`RANK.json`)."""
        save_file(self.weights(), Path(folder) / f"{self.rank}.safetensors")
        (Path(folder) / f"{self.rank}.json").write_text(json.dumps([asdict(span) for span in self.spans()]))


def main() -> None:
    name, path, rank, meeting = sys.argv[1:]
    calls, send = _read_calls(), _open_output()
    job = Job.load(Path(path))
    torch.set_num_threads(job.config.run.threads or 1)
    module, _, made = name.partition(":")
    runner: Runner = getattr(import_module(module), made)(job, int(rank), Path(meeting))
    send(None)  # ready
    while True:
        method, arguments = calls.get()
        send(getattr(runner, method)(*arguments))


def _open_output() -> Callable[[Any], None]:
    """Reserve standard output for results; anything else that is printed goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lambda result: print(json.dumps(result), file=output, flush=True)


def _read_calls() -> queue.SimpleQueue[tuple[str, list[Any]]]:
    calls: queue.SimpleQueue[tuple[str, list[Any]]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            calls.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return calls


if __name__ == "__main__":
    main()
