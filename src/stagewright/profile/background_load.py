"""A process that keeps another company while it measures: `python -m stagewright.profile.background_load SUBJECT`. Times every unit of a model on this device, inside whole forwards and backwards and without stopping the device.

Forward is timed around each unit's call. Backward runs once through the whole graph; a hook at each unit's output
notes when its gradient arrived, and the time until the next arrival is the unit's. On a GPU the notes are events in
the stream, read after everything has run; it gets something else to do first, so that issuing units is not timed."""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Iterator
from typing import Any

import torch

from stagewright.profile.measure import Subject, subject_model


def run_load(text: str) -> None:
    """Train the model over and over, until the process that asked for company ends."""
    asked = json.loads(text)
    values: dict[str, Any] = asked["subject"]
    subject = Subject(**{**values, "input": tuple(values["input"]), "samples": tuple(values["samples"])})
    torch.set_num_threads(subject.threads)
    model = subject_model(subject)
    example = torch.randn(asked["samples"], *subject.input, device=subject.device)
    for count in _forever():
        model(example).float().mean().backward()
        if count == 0:
            print("under way", flush=True)


def _forever() -> Iterator[int]:
    """Count while standard input is open: the pipe closes with the parent, however that ends."""
    count = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        yield count
        count += 1


if __name__ == "__main__":
    run_load(sys.argv[1])
