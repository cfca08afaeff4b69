"""Make a profile: measure a model and the links between ranks on this machine, or import a profile of PipeDream.

Further down: this machine as it is, with a short profile that is measured once and kept in the user's cache, under a
name with everything that it depends on, so that `stagewright plan MODEL` answers at once the second time.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stagewright import __version__
from stagewright.cluster.catalog import read_catalog
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster
from stagewright.config.sections import AUTO, Config, require_within
from stagewright.errors import UserError, is_out_of_memory, within_memory
from stagewright.files import cache_folder
from stagewright.hardware.cluster_file import ImportOptions, import_this_machine
from stagewright.hardware.devices import default_precision, require_cuda
from stagewright.hardware.host import num_cores
from stagewright.hardware.meters import busy_seconds
from stagewright.model.call import Form
from stagewright.model.load import find_entry
from stagewright.model.networks.configured import version_of
from stagewright.model.networks.libraries import package_of
from stagewright.objects import is_given, shown
from stagewright.planning.traced import form_of, meta_model, trace_model
from stagewright.profile.measure import REPEATS, Workload, measure, sample_sizes
from stagewright.profile.pipedream import read_pipedream
from stagewright.profile.profile import Ceilings, Profile, Transfer, read_profile
from stagewright.run.background_load import background_load
from stagewright.runtime.precision import make_precision
from stagewright.runtime.process.link_test import measure_links
from stagewright.runtime.process.torch_flags import preserved_state, set_fast_flags
from stagewright.voice import SILENT, Voice

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


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured, and how."""

    model: str
    samples: tuple[int, ...]  # of the microbatches
    precisions: tuple[str, ...]
    device: str
    threads: int = 1  # of each process
    together: int = 1  # processes at once
    image: int | None = None
    classes: int | None = None
    freeze: str | None = None
    repeats: int = REPEATS  # passes that are counted

    @staticmethod
    def of(values: Mapping[str, Any]) -> Subject:
        """That of the options of `profile`."""
        asked = (name.strip() for name in values["precision"].split(","))
        names = tuple(default_precision(values["device"]) if name == AUTO else name for name in asked)
        same = {name: values[name] for name in ("model", "device", "threads", "together", "image", "classes", "freeze")}
        return Subject(samples=sample_sizes(_read_sizes(values["samples"])), precisions=names, **same)


def measure_profile(subject: Subject, voice: Voice = SILENT, form: Form | None = None) -> Profile:
    """Measure a model on this machine; `form` is what it takes, where that is neither the zoo's input nor an image."""
    require_within("--together", subject.together, most=_MOST_PER_CORE * num_cores())
    on_gpu = subject.device == "cuda"
    if on_gpu:
        require_cuda()
    form = form or form_of(subject.model, subject.image)
    if len(form.shapes) != 1 or form.dtypes[0] not in ("float32", "int64"):
        raise UserError(
            f"a profile is of a model with one input of float32 or int64, and this one takes {form}; give --cluster to "
            "plan it without a profile"
        )
    precisions = {name: make_precision(name, subject.device) for name in subject.precisions}
    side = form.shapes[0][-1] if len(form.shapes[0]) == 3 else None
    profiles = []
    for name, precision in precisions.items():
        workload = Workload(
            subject.model,
            subject.classes,
            form.shapes[0],
            name,
            subject.device,
            subject.threads,
            subject.samples,
            _vocabulary(subject) if form.dtypes == ("int64",) else 0,
            subject.freeze,
        )
        with (
            within_memory(image=side, classes=subject.classes, samples=subject.samples[-1], together=subject.together),
            preserved_state([torch.cuda.current_device()] if on_gpu else ()),
            background_load(workload, subject.together - 1) as load,
        ):
            if on_gpu:
                set_fast_flags(precision)
            context, together = precision.forward_context, subject.together
            profiles.append(measure(workload, context, together, voice, load, subject.repeats))
    ceilings = [profile.ceilings for profile in profiles if profile.ceilings is not None]
    matrix = {name: rate for own in ceilings for name, rate in own.matrix.items()}
    tables = tuple(table for profile in profiles for table in profile.tables)
    found = replace(ceilings[0], matrix=matrix)
    if subject.together > 1:
        voice.progress("links between ranks")
        found = _with_links(found, subject.together, subject.device)
    return replace(profiles[0], tables=tables, ceilings=found)


def _vocabulary(subject: Subject) -> int:
    """How many different tokens the embedding of a model of text takes."""
    model = meta_model(subject.model, subject.classes)
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=2)


def _with_links(ceilings: Ceilings, ranks: int, device: str) -> Ceilings:
    """The same with the measured speed of transfers between ranks, through host memory."""
    found = measure_links(ranks, device=device)
    transfers = tuple(Transfer(**entry) for entry in found["transfers"])
    sums = {name: found[name] for name in ("reduce", "host", "gloo_reduce", "gloo_host")}
    return replace(ceilings, transfers=transfers, **sums)


def import_profile(file: str, model: str, samples: str) -> Profile:
    """Read PipeDream's graph.txt."""
    sizes = _read_sizes(samples)
    if len(sizes) != 1:
        raise UserError(f"--samples {samples} names {len(sizes)} sizes; give the one the file was taken at")
    return read_pipedream(file, model, sizes[0])


def _read_sizes(text: str) -> list[int]:
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


def profile_here(config: Config, voice: Voice = SILENT, form: Form | None = None, *, is_alone: bool = False) -> Here:
    """A short profile of a configuration's model on this machine, from the cache where it is there.

    Its device and precision are resolved. `is_alone`: of one process with all of a CPU's cores, beside which none other
    runs. Notes say that a profile is made.
    """
    run, model = config.run, config.model.name
    devices, threads = (1, num_cores()) if is_alone else _ranks_here(run.device, run.threads)
    sizes = _sizes_for(config, devices, is_alone=is_alone)
    subject = Subject(
        model,
        sizes[0],
        (run.precision,),
        run.device,
        threads,
        1 if run.device == "cuda" else devices,
        config.data.image,
        config.model.classes,
        config.model.freeze,
        _SHORT_REPEATS,
    )
    file = cache_folder("profiles") / f"{_key(subject, form or form_of(model, config.data.image))}.json"
    if file.exists() and not is_given(model):  # an object of a script may be another one each time
        try:
            return _here(subject, devices, read_profile(file), file)
        except UserError:
            file.unlink()  # of an older format
    if not is_alone:
        kept = "" if is_given(model) else f", once; kept in {file.parent}"
        voice.note(f"profiling {shown(model)} on this machine{kept}")
    since = _Cores()
    profile = _short_profile(subject, form, sizes, voice, is_alone=is_alone)
    others = since.used_by_others()
    if run.device == "cpu" and others > _BUSY * num_cores():
        file = file.with_suffix(".busy.json")  # which no later run takes
        voice.note(
            f"other programs kept {others:.1f} of {num_cores()} cores busy during the profile, so what it predicts may "
            "be far off; it is made anew next time"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    profile.write(file)
    return _here(subject, devices, profile, file)


def _ranks_here(device: str, threads: int | None) -> tuple[int, int]:
    """Ranks that this machine has a device for, and the threads of each: its GPUs, or a few that share its cores."""
    if device == "cuda":
        return torch.cuda.device_count(), 1
    ranks = max(2, min(num_cores() // (threads or 1), _MOST_RANKS))
    return ranks, threads or max(1, num_cores() // ranks)


def _sizes_for(config: Config, devices: int, *, is_alone: bool) -> Sequence[tuple[int, ...]]:
    """The sizes to try, without those that have only larger microbatches than the batch has."""
    sizes = _GPU_SIZES if config.run.device == "cuda" else _CPU_SIZES
    if config.plan.batch is None:
        return sizes
    share = config.plan.batch // max(devices, config.plan.microbatches or 1)
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
    subject: Subject, form: Form | None, sizes: Sequence[tuple[int, ...]], voice: Voice, *, is_alone: bool
) -> Profile:
    """Measure microbatches that take a few seconds; smaller ones where a GPU has not the memory for these."""
    if subject.device == "cpu":
        shapes = trace_model(subject.model, subject.classes, subject.image, form, subject.freeze).shapes
        operations = sum(shape.operations for shape in shapes)
        most = _SHORT_SECONDS * CORE_RATE * subject.threads / (_PASSES * max(operations, 1.0))
        quick = next((pair for pair in sizes if sum(pair) <= most), sizes[-1])
        return measure_profile(replace(subject, samples=sample_sizes(quick[1:] if is_alone else quick)), voice, form)
    for samples in sizes[:-1]:
        try:
            return measure_profile(replace(subject, samples=samples), voice, form)
        except UserError as error:
            if error.__cause__ is None or not is_out_of_memory(error.__cause__):
                raise
            torch.cuda.empty_cache()
    return measure_profile(replace(subject, samples=sample_sizes(sizes[-1])), voice, form)


def _here(subject: Subject, devices: int, profile: Profile, file: Path) -> Here:
    if subject.device == "cpu":
        return Here(subject.device, devices, profile, None, None, file, subject.threads)
    return Here(subject.device, devices, profile, *own_cluster(), file)


def own_cluster() -> tuple[Catalog, Cluster]:
    """This machine's GPUs as a cluster, and the catalog with it."""
    machine = import_this_machine(ImportOptions("here"))
    catalog = read_catalog((), machine.tables)
    return catalog, catalog.cluster(machine.name)


def _key(subject: Subject, form: Form) -> str:
    """A name with the model, and a digest of what else a profile depends on."""
    model, entry = subject.model, find_entry(subject.model)
    about: dict[str, Any] = asdict(subject) | {"image": None, "form": str(form)}
    about |= {"classes": subject.classes or (entry.classes if entry else None)}
    about |= {"torch": torch.__version__, "stagewright": __version__, "cores": num_cores()}
    if subject.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    if package_of(model) is not None:
        about["code"] = version_of(model)
    elif ":" in model:
        path = Path(model.partition(":")[0].replace(".", "/") + ".py")
        about["code"] = path.stat().st_mtime_ns if path.exists() else 0
    digest = hashlib.sha256(repr(sorted(about.items())).encode()).hexdigest()[:16]
    return f"{''.join(letter if letter.isalnum() else '-' for letter in model)}-{digest}"
