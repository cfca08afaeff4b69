"""Which devices and which precision a run has where its options leave that to this machine.

`--device auto` is this machine's GPUs, or its CPU where torch sees none. `--precision auto` is bf16 where every GPU
computes in it, and fp32 anywhere else: fp16 needs loss scaling and skips updates, so it is used only where asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from stagewright.config.rules import check_rules
from stagewright.config.sections import AUTO, Config
from stagewright.config.toml import flag_values
from stagewright.errors import UserError
from stagewright.hardware.host import num_cores

_BF16 = 8  # compute capability from which on GPUs compute in bf16


def default_device() -> Literal["cpu", "cuda"]:
    """cuda where torch sees a GPU, else cpu."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu"


def num_devices(device: str) -> int:
    """GPUs of this machine, or cores that this process may use."""
    return torch.cuda.device_count() if device == "cuda" else num_cores()


def default_precision(device: str) -> str:
    """The precision that a device trains fastest in without changing what an update is."""
    if device != "cuda":
        return "fp32"
    majors = (torch.cuda.get_device_capability(index)[0] for index in range(torch.cuda.device_count()))
    return "bf16" if all(major >= _BF16 for major in majors) else "fp32"


def with_devices(config: Config) -> Config:
    """The configuration with this machine's device and precision in place of auto; what these exclude is an error."""
    run = config.run
    device = default_device() if run.device == AUTO else run.device
    if device == "cuda":
        require_cuda()
    precision = default_precision(device) if run.precision == AUTO else run.precision
    config = replace(config, run=replace(run, device=device, precision=precision))
    check_rules(flag_values(config), ())
    return config


def require_cuda() -> None:
    """An error where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise UserError(f"--device cuda was asked for, but torch {torch.__version__} sees no GPU; use --device cpu")
