"""A run inside the caller's process leaves torch's global state as it found it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from stagewright.api.training import train
from stagewright.config.sections import Config, RunConfig
from stagewright.runtime.process.torch_flags import FLAGS, preserved_state, set_flags
from stagewright.runtime.stage.scores import NonFiniteLoss

ODD_VALUES: list[Mapping[str, Any]] = [
    {},
    {
        "num_threads": 2,
        "deterministic_algorithms": (True, True),
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "cudnn.benchmark": True,
        "float32_matmul_precision": "medium",
        "cudnn.allow_tf32": False,
    },
    {"num_threads": 3, "cuda.matmul.fp32_precision": "tf32", "cudnn.conv.fp32_precision": "ieee"},  # the new interface
]


def state() -> dict[str, Any]:
    """All of torch's global state that a run could change."""
    return {flag.name: flag.read() for flag in FLAGS} | {
        "random": torch.get_rng_state().tolist(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@pytest.fixture(params=ODD_VALUES, ids=["defaults", "odd values", "new interface"])
def before(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """State as a caller's script could have set it."""
    flags = {flag.name: flag for flag in FLAGS}
    with preserved_state():
        for name, value in request.param.items():
            flags[name].set(value)  # a flag that is missing from the table would not be restored
        torch.rand(7)
        yield state()


def run(folder: Path, **options: Any) -> None:
    settings = {"samples": 32, "batch": 8, "microbatches": 2, "steps": 2, "monitor_every": 0.0, "threads": 1}
    train("resnet8", emulate=True, runs=str(folder), placement="0:0.0:1", **{**settings, **options})


def test_an_emulated_run_leaves_torch_unchanged(before: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path)
    assert state() == before


def test_an_emulated_run_that_fails_leaves_torch_unchanged(before: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NonFiniteLoss):
        run(tmp_path, lr=1e30, steps=20)
    assert state() == before


@pytest.mark.parametrize("precision", ["ieee", "fp32", "tf32"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_flags_of_a_gpu_run_are_set_and_restored(before: dict[str, Any], precision: str, deterministic: bool) -> None:
    config = Config(run=RunConfig(device="cuda", precision=precision, deterministic=deterministic))
    with preserved_state():
        set_flags(config)
        assert torch.backends.cudnn.benchmark is not deterministic
        assert torch.are_deterministic_algorithms_enabled() is (deterministic or before["deterministic_algorithms"][0])
        assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
        assert torch.backends.cudnn.allow_tf32 is (precision != "ieee")
    assert state() == before


FAULTS = """
import resource, sys
from stagewright.runtime.process.torch_flags import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        b"x" * (48 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
keep_freed_memory()
faults()
print(first, faults())
"""


@pytest.mark.parametrize("given", [{}, {"MALLOC_MMAP_MAX_": "9"}], ids=["by default", "unless the user says how"])
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another C library")
def test_a_rank_keeps_the_memory_that_it_frees(given: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**os.environ, **given}, capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    assert (after < before / 10) is not bool(given)
