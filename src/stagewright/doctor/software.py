"""Python, torch and the libraries below it."""

from __future__ import annotations

from collections.abc import Iterator

from stagewright.doctor.finding import Finding, Grade, finding
from stagewright.machine.environment import Environment

_AREA = "software"


def software_findings(found: Environment) -> Iterator[Finding]:
    libraries, has_gpus = found.libraries, bool(found.gpus)
    is_cpu_build = libraries.torch is not None and libraries.cuda is None
    yield finding(_AREA, "Python", libraries.python)
    yield finding(
        _AREA,
        "torch",
        libraries.torch or "not there",
        (libraries.torch is None, Grade.HURTS, "pip install torch"),
        (
            is_cpu_build and has_gpus,
            Grade.HURTS,
            "this build knows no GPU; install one for the driver's CUDA: https://pytorch.org/get-started/locally",
        ),
    )
    yield _driver_finding(found)
    if has_gpus or libraries.cuda:
        yield finding(_AREA, "CUDA", libraries.cuda or "not in this torch")
        yield finding(_AREA, "cuDNN", libraries.cudnn or "not there")
        yield finding(
            _AREA,
            "NCCL",
            libraries.nccl or "not there",
            (
                libraries.nccl is None and len(found.gpus) > 1 and libraries.cuda is not None,
                Grade.NOTE,
                "without it ranks talk through host memory: --backend gloo",
            ),
        )


def _driver_finding(found: Environment) -> Finding:
    libraries = found.libraries
    is_too_new = _is_newer(libraries.cuda, found.driver_cuda)
    return finding(
        _AREA,
        "driver",
        _driver(found),
        (
            found.nvml is not None and "mismatch" in found.nvml,
            Grade.HURTS,
            "driver and library are of different versions; reboot, or load the kernel module again",
        ),
        (
            is_too_new,
            Grade.HURTS,
            f"torch was built for CUDA {libraries.cuda} but the driver runs up to {found.driver_cuda}; update the "
            "driver, or install an older build of torch",
        ),
        (
            not found.gpus and libraries.cuda is not None,
            Grade.NOTE,
            "torch could use GPUs but no driver shows one; install it, or start the container with --gpus all",
        ),
    )


def _driver(found: Environment) -> str:
    if found.nvml is not None:
        return f"no GPU: {found.nvml}"
    return f"{found.driver or 'not known'}, CUDA up to {found.driver_cuda or 'not known'}"


def _is_newer(one: str | None, other: str | None) -> bool:
    """Whether a CUDA is of a later major release; minor ones of a release run on each other's drivers."""
    if one is None or other is None:
        return False
    return int(one.partition(".")[0]) > int(other.partition(".")[0])
