"""Whether this machine has the devices that a configuration asks for, and which connection suits them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.config.sections import Config

if TYPE_CHECKING:
    from stagewright.plan.plan import Plan

_MPS_FOLDER = "/tmp/nvidia-mps"


@contextmanager
def within_memory(**asked: int | None) -> Iterator[None]:
    """Turn an allocation that this machine has no memory for into an error with the options that decide it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        options = ", ".join(f"--{name} {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"this machine has not the memory for {options}; give less of the largest") from error


def require_kind(config: Config) -> None:
    """An error where this machine has no device of the kind, or the kind lacks what is asked of it."""
    import torch

    run = config.run
    if run.compile and run.cuda_graph == "on":
        raise ValueError("both --compile and --cuda-graph on were given; a compiled stage is not captured, so give one")
    if run.device == "cpu":
        for flag, is_set in (("--share-gpu", run.share_gpu), ("--cuda-graph on", run.cuda_graph == "on")):
            if is_set:
                raise ValueError(f"{flag} needs --device cuda, but the device is cpu; leave it out")
        if run.backend == "nccl":
            raise ValueError("--backend nccl needs --device cuda, but the device is cpu; use gloo")
    elif not torch.cuda.is_available():
        raise ValueError(f"--device cuda was asked for, but torch {torch.__version__} sees no GPU; use --device cpu")


def require_devices(config: Config, plan: Plan, warn: Callable[[str], None]) -> None:
    """An error where the placement names GPUs that are not there, or shares one where that can't be."""
    import torch

    from stagewright.runtime.device import gpu_of

    run = config.run
    if run.device != "cuda" or run.emulate:
        return
    if len({device.machine for device in plan.devices}) > 1:
        return  # each machine has its own GPUs, and its ranks say what they miss
    gpus, here = torch.cuda.device_count(), plan.devices
    beyond = [device for device in here if device.index >= gpus]
    if beyond and not run.share_gpu:
        raise ValueError(
            f"placement names device {beyond[0]} but this machine has {gpus} GPU{'s' if gpus > 1 else ''} "
            f"(0-{gpus - 1}); use --share-gpu to put several ranks on one"
        )
    ranks = Counter(gpu_of(device.index, gpus, share=run.share_gpu) for device in here)
    gpu, most = ranks.most_common(1)[0]
    if run.backend == "nccl" and run.share_gpu:
        raise ValueError(f"--backend nccl needs a GPU for each rank, but {most} ranks share GPU {gpu}; use gloo")
    if most == 1:
        return
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER))
    if not (folder / "control").exists():
        warn(
            f"{most} ranks share GPU {gpu} and CUDA MPS is not running, so they take turns and are slower; "
            "start it with nvidia-cuda-mps-control -d"
        )
