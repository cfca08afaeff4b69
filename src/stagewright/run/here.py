"""A model on this machine as it is: its devices, and a short profile that is measured once and kept.

The profile is in the user's cache, under a name with everything that it depends on, so that `stagewright plan MODEL`
answers at once the second time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from stagewright.cluster.catalog import open_cluster
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster
from stagewright.errors import UserError
from stagewright.hardware.cluster_file import ImportOptions, checked_toml, import_this_machine
from stagewright.hardware.host import num_cores
from stagewright.profile.profile import Profile, read_profile
from stagewright.run.profile import measure_profile

_CPU_SIZES, _GPU_SIZES = "4,16", "16,64"  # samples of a microbatch: a few quick ones
_MOST_RANKS = 4  # on a CPU


@dataclass(frozen=True, slots=True)
class Here:
    """This machine: the kind of its devices, how many, their cluster where it has GPUs, and the profile."""

    device: str
    devices: int
    profile: Profile
    catalog: Catalog | None
    cluster: Cluster | None
    file: Path  # of the profile


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def profile_here(model: str, options: Any, progress: Callable[[str], None]) -> Here:
    """A short profile of a model on this machine, from the cache where it is there."""
    device = default_device()
    devices = torch.cuda.device_count() if device == "cuda" else max(2, min(num_cores(), _MOST_RANKS))
    sizes = _GPU_SIZES if device == "cuda" else _CPU_SIZES
    wanted = SimpleNamespace(
        model=model,
        together=1 if device == "cuda" else devices,
        device=device,
        samples=sizes,
        precision=options.precision,
        threads=1,
        image=options.image,
        classes=options.classes,
    )
    file = cache_folder() / f"{_key(wanted)}.json"
    if file.exists():
        try:
            return _here(device, devices, read_profile(file), file)
        except UserError:
            file.unlink()  # of an older format
    progress(f"profiling {model} on this machine, once")
    profile = measure_profile(wanted, progress)
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.write(file)
    return _here(device, devices, profile, file)


def _here(device: str, devices: int, profile: Profile, file: Path) -> Here:
    if device == "cpu":
        return Here(device, devices, profile, None, None, file)
    machine = import_this_machine(ImportOptions("here", None, None, None, None, 1, None))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as text:
        text.write(checked_toml(machine))
        text.flush()
        catalog, cluster = open_cluster(text.name)
    return Here(device, devices, profile, catalog, cluster, file)


def cache_folder() -> Path:
    """Where profiles of this machine are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stagewright" / "profiles"


def _key(wanted: SimpleNamespace) -> str:
    """A name with the model, and a digest of what else a profile depends on."""
    about = {**vars(wanted), "torch": torch.__version__, "cores": num_cores()}
    if wanted.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    if ":" in wanted.model:
        path = Path(wanted.model.partition(":")[0].replace(".", "/") + ".py")
        about["code"] = path.stat().st_mtime_ns if path.exists() else 0
    digest = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:16]
    name = "".join(letter if letter.isalnum() else "-" for letter in wanted.model)
    return f"{name}-{digest}"
