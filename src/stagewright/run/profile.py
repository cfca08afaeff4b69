"""Make a profile: measure a model and the links between ranks on this machine, or import a profile of PipeDream.

Further down: this machine as it is, with a short profile that is measured once and kept in the user's cache, under a
name with everything that it depends on, so that `stagewright plan MODEL` answers at once the second time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stagewright import __version__
from stagewright.cluster.catalog import open_cluster
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster
from stagewright.config.sections import AUTO, require_within
from stagewright.errors import UserError, is_out_of_memory, within_memory
from stagewright.files import cache_folder
from stagewright.hardware.cluster_file import ImportOptions, checked_toml, import_this_machine
from stagewright.hardware.devices import default_device, default_precision, require_cuda
from stagewright.hardware.host import num_cores
from stagewright.hardware.meters import busy_seconds
from stagewright.model.call import Form
from stagewright.model.load import find_entry
from stagewright.model.networks.configured import version_of
from stagewright.model.networks.libraries import package_of
from stagewright.objects import is_given, shown
from stagewright.planning.traced import form_of, meta_model, trace_model
from stagewright.profile.measure import Workload, measure, sample_sizes
from stagewright.profile.pipedream import read_pipedream
from stagewright.profile.profile import Profile, Transfer, read_profile
from stagewright.run.background_load import background_load
from stagewright.runtime.precision import make_precision
from stagewright.runtime.process.link_test import measure_links
from stagewright.runtime.process.torch_flags import preserved_state, set_fast_flags

_MOST_PER_CORE = 16  # processes at once
_MOST_RANKS = 4  # on a CPU
_BUSY = 0.2  # share of the cores: a profile beside programs that use more is not kept
LEAST_SECONDS = 0.5  # that use is counted over
# Of a short profile: samples of its microbatches, the largest that take about so long, and how often each is counted.
_GPU_SIZES = ((16, 64), (4, 16), (1, 4))
_CPU_SIZES = ((8, 32), (4, 16), (2, 8), (1, 4), (1, 2))
_SHORT_SECONDS, _SHORT_REPEATS = 3.0, 3
_PASSES = 3 * (_SHORT_REPEATS + 2)  # in forwards: a backward takes two
CORE_RATE = 3e10  # operations per second of a usual core, to guess how long something takes before it is measured


def measure_profile(options: Any, report: Callable[[str], None], form: Form | None = None) -> Profile:
    """Measure a model on this machine; `form` is what it takes, where that is neither the zoo's input nor an image."""
    require_within("--together", options.together, most=_MOST_PER_CORE * num_cores())
    if options.device == "cuda":
        require_cuda()
    form = form or form_of(options.model, options.image)
    _require_one_input(form)
    sizes = sample_sizes(read_sizes(options.samples))
    asked = (name.strip() for name in options.precision.split(","))
    names = [default_precision(options.device) if name == AUTO else name for name in asked]
    precisions = [make_precision(name, options.device) for name in names]
    profiles = []
    is_text, side = form.dtypes == ("int64",), form.shapes[0][-1] if len(form.shapes[0]) == 3 else None
    for name, precision in zip(names, precisions, strict=True):
        on_gpu = options.device == "cuda"
        workload = Workload(
            options.model,
            0,
            options.classes,
            form.shapes[0],
            name,
            options.device,
            options.threads,
            sizes,
            on_gpu,
            _vocabulary(options) if is_text else 0,
            options.freeze,
        )
        with (
            within_memory(image=side, classes=options.classes, samples=sizes[-1], together=options.together),
            preserved_state([torch.cuda.current_device()] if on_gpu else ()),
            background_load(workload, options.together - 1) as load,
        ):
            if on_gpu:
                set_fast_flags(precision)
            repeats = {"repeats": options.repeats} if hasattr(options, "repeats") else {}
            profiles.append(measure(workload, precision.forward_context, options.together, report, load, **repeats))
    profile = _merged(profiles)
    if options.together > 1:
        report("links between ranks")
        profile = _with_links(profile, options.together, options.device)
    return profile


def _require_one_input(form: Form) -> None:
    """An error for a model that a profile can't call: it takes one tensor, of real numbers or of tokens."""
    if len(form.shapes) != 1 or form.dtypes[0] not in ("float32", "int64"):
        raise UserError(
            f"a profile is of a model with one input of float32 or int64, and this one takes {form}; give --cluster to "
            "plan it without a profile"
        )


def _vocabulary(options: Any) -> int:
    """How many different tokens the embedding of a model of text takes."""
    model = meta_model(options.model, options.classes)
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=2)


def _merged(profiles: Sequence[Profile]) -> Profile:
    """One profile with the tables and the matrix rates of several precisions."""
    first = profiles[0]
    matrix: dict[str, float] = {}
    for profile in profiles:
        matrix |= profile.ceilings.matrix if profile.ceilings else {}
    assert first.ceilings is not None
    tables = tuple(table for profile in profiles for table in profile.tables)
    return replace(first, tables=tables, ceilings=replace(first.ceilings, matrix=matrix))


def _with_links(profile: Profile, ranks: int, device: str) -> Profile:
    """The same profile with the measured speed of transfers between ranks, through host memory."""
    found = measure_links(ranks, device=device)
    assert profile.ceilings is not None
    transfers = tuple(Transfer(**entry) for entry in found["transfers"])
    sums = {name: found[name] for name in ("reduce", "host", "gloo_reduce", "gloo_host")}
    return replace(profile, ceilings=replace(profile.ceilings, transfers=transfers, **sums))


def import_profile(options: Any) -> Profile:
    """Read PipeDream's graph.txt."""
    sizes = read_sizes(options.samples)
    if len(sizes) != 1:
        raise UserError(f"--samples {options.samples} names {len(sizes)} sizes; give the one the file was taken at")
    return read_pipedream(options.pipedream, options.model, sizes[0])


def read_sizes(text: str) -> list[int]:
    """The microbatch sizes of --samples."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--samples must be comma-separated integers such as 8,16, got '{text}'") from None


# --- This machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Here:
    """This machine: the kind of its devices, how many, their cluster where it has GPUs, and the profile."""

    device: str
    devices: int
    profile: Profile
    catalog: Catalog | None
    cluster: Cluster | None
    file: Path  # of the profile
    threads: int = 1  # of each rank on a CPU


def ranks_here(device: str, threads: int | None = None) -> tuple[int, int]:
    """Ranks that this machine has a device for, and the threads of each: its GPUs, or a few that share its cores."""
    if device == "cuda":
        return torch.cuda.device_count(), 1
    ranks = max(2, min(num_cores() // (threads or 1), _MOST_RANKS))
    return ranks, threads or max(1, num_cores() // ranks)


@dataclass(frozen=True, slots=True)
class Subject:
    """What of a model is profiled in short; what is left out is as the model and the machine have it."""

    precision: str
    image: int | None = None
    classes: int | None = None
    freeze: str | None = None
    device: str | None = None
    threads: int | None = None
    batch: int | None = None
    microbatches: int | None = None

    @staticmethod
    def of(options: Any) -> Subject:
        """That of the options of `plan` and of a run."""
        given: dict[str, Any] = {field.name: getattr(options, field.name, None) for field in fields(Subject)}
        return Subject(**given)


def profile_here(
    model: str,
    subject: Subject,
    progress: Callable[[str], None],
    form: Form | None = None,
    *,
    is_alone: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Here:
    """A short profile of a model on this machine, from the cache where it is there.

    `is_alone`: of one process with all of a CPU's cores, beside which none other runs. `announce`: is told instead of
    `progress` that a profile is made.
    """
    device = subject.device or default_device()
    devices, threads = (1, num_cores()) if is_alone else ranks_here(device, subject.threads)
    wanted = SimpleNamespace(
        model=model,
        together=1 if device == "cuda" else devices,
        device=device,
        precision=subject.precision,
        threads=threads,
        image=subject.image,
        classes=subject.classes,
        freeze=subject.freeze,
        repeats=_SHORT_REPEATS,
    )
    form = form or form_of(model, subject.image)
    sizes = _sizes_for(subject, device, devices, is_alone=is_alone)
    if sizes[0] != _sizes_of(device)[0]:
        wanted.most = sizes[0]  # a profile of larger microbatches would not do
    file = cache_folder("profiles") / f"{_key(wanted, form)}.json"
    if file.exists() and not is_given(model):  # an object of a script may be another one each time
        try:
            return _here(device, devices, threads, read_profile(file), file)
        except UserError:
            file.unlink()  # of an older format
    if not is_alone:
        kept = "" if is_given(model) else f", once; kept in {file.parent}"
        (announce or progress)(f"profiling {shown(model)} on this machine{kept}")
    since = _Cores()
    profile = _short_profile(wanted, form, sizes, progress, is_alone=is_alone)
    others = since.used_by_others()
    if device == "cpu" and others > _BUSY * num_cores():
        file = file.with_suffix(".busy.json")  # which no later run takes
        (announce or progress)(
            f"other programs kept {others:.1f} of {num_cores()} cores busy during the profile, so what it predicts may "
            "be far off; it is made anew next time"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.write(file)
    return _here(device, devices, threads, profile, file)


def _sizes_of(device: str) -> Sequence[tuple[int, int]]:
    return _GPU_SIZES if device == "cuda" else _CPU_SIZES


def _sizes_for(subject: Subject, device: str, devices: int, *, is_alone: bool) -> Sequence[tuple[int, int]]:
    """The sizes to try, without those that have only larger microbatches than the batch has."""
    sizes, batch = _sizes_of(device), subject.batch
    if batch is None:
        return sizes
    share = batch // max(devices, subject.microbatches or 1)
    return [pair for pair in sizes if pair[is_alone] <= share] or [(1, 1)]


class _Cores:
    """How many cores other programs use, from now on."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(with_stolen=True), sum(os.times()[:4])

    def used_by_others(self) -> float:
        seconds = time.monotonic() - self._began
        own = sum(os.times()[:4]) - self._own  # with those of processes that have ended
        others = busy_seconds(with_stolen=True) - self._busy - own
        return max(0.0, others / seconds) if seconds > LEAST_SECONDS else 0.0


def _short_profile(
    wanted: SimpleNamespace,
    form: Form,
    sizes: Sequence[tuple[int, int]],
    progress: Callable[[str], None],
    *,
    is_alone: bool,
) -> Profile:
    """Measure microbatches that take a few seconds; smaller ones where a GPU has not the memory for these."""
    if wanted.device == "cpu":
        traced = trace_model(wanted.model, wanted.classes, wanted.image, form, wanted.freeze)
        operations = sum(shape.operations for shape in traced.shapes)
        most = _SHORT_SECONDS * CORE_RATE * wanted.threads / (_PASSES * max(operations, 1.0))
        quick = next((pair for pair in sizes if sum(pair) <= most), sizes[-1])
        samples = _joined(quick[1:] if is_alone else quick)
        return measure_profile(SimpleNamespace(**vars(wanted), samples=samples), progress, form)
    for pair in sizes[:-1]:
        try:
            return measure_profile(SimpleNamespace(**vars(wanted), samples=_joined(pair)), progress, form)
        except UserError as error:
            if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                raise
            torch.cuda.empty_cache()
    return measure_profile(SimpleNamespace(**vars(wanted), samples=_joined(sizes[-1])), progress, form)


def _joined(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _here(device: str, devices: int, threads: int, profile: Profile, file: Path) -> Here:
    if device == "cpu":
        return Here(device, devices, profile, None, None, file, threads)
    machine = import_this_machine(ImportOptions("here", None, None, None, None, 1, None))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as text:
        text.write(checked_toml(machine))
        text.flush()
        catalog, cluster = open_cluster(text.name)
    return Here(device, devices, profile, catalog, cluster, file)


def _key(wanted: SimpleNamespace, form: Form) -> str:
    """A name with the model, and a digest of what else a profile depends on."""
    entry = find_entry(wanted.model)
    classes = wanted.classes or (entry.classes if entry else None)
    about = {**vars(wanted), "image": None, "form": str(form), "classes": classes}
    about |= {"torch": torch.__version__, "stagewright": __version__, "cores": num_cores()}
    if wanted.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    if package_of(wanted.model) is not None:
        about["code"] = version_of(wanted.model)
    elif ":" in wanted.model:
        path = Path(wanted.model.partition(":")[0].replace(".", "/") + ".py")
        about["code"] = path.stat().st_mtime_ns if path.exists() else 0
    digest = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:16]
    name = "".join(letter if letter.isalnum() else "-" for letter in wanted.model)
    return f"{name}-{digest}"
