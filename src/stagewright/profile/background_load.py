"""A process that trains a model until its parent ends: `python -m stagewright.profile.background_load WORKLOAD`.

`measure` starts it, so that a profile is taken on a machine as busy as it will be in a run.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

import torch

from stagewright.model.call import differentiable
from stagewright.profile.measure import Workload, build_workload


def run_load(text: str) -> None:
    """Train the model over and over, until standard input is closed."""
    request = json.loads(text)
    values: dict[str, Any] = request["workload"]
    workload = Workload(**{**values, "input": tuple(values["input"]), "samples": tuple(values["samples"])})
    torch.set_num_threads(workload.threads)
    model = build_workload(workload)
    example = torch.randn(request["samples"], *workload.input, device=workload.device)
    passes = 0
    while not select.select([sys.stdin], [], [], 0)[
        0
    ]:  # a pipe, which closes when the parent ends, for whatever reason
        torch.autograd.backward([leaf.float().mean() for leaf in differentiable(model(example))])
        if passes == 0:
            print("running", flush=True)
        passes += 1


if __name__ == "__main__":
    run_load(sys.argv[1])
