"""Make a profile: measure a model and the links between ranks on this machine, or import a profile of PipeDream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stagewright.config.sections import require_within
from stagewright.errors import UserError
from stagewright.hardware.host import num_cores
from stagewright.model.zoo import build
from stagewright.planning.traced import form_of
from stagewright.profile.measure import Workload, measure, sample_sizes
from stagewright.profile.pipedream import read_pipedream
from stagewright.profile.profile import Profile, Transfer
from stagewright.profile.shapes import on_meta
from stagewright.run.background_load import background_load
from stagewright.run.prepare import require_cuda, within_memory
from stagewright.runtime.process.link_test import measure_links
from stagewright.runtime.process.torch_flags import preserved_state, set_fast_flags
from stagewright.runtime.stage.precision import make_precision

_MOST_PER_CORE = 16  # processes at once


def measure_profile(options: Any, report: Callable[[str], None]) -> Profile:
    """Measure a model on this machine."""
    require_within("--together", options.together, most=_MOST_PER_CORE * num_cores())
    if options.device == "cuda":
        require_cuda()
    form = form_of(options.model, options.image)
    sizes = sample_sizes(read_sizes(options.samples))
    names = [name.strip() for name in options.precision.split(",")]
    precisions = [make_precision(name, options.device) for name in names]
    profiles = []
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
            _vocabulary(options) if form.dtypes == ("int64",) else 0,
        )
        with (
            within_memory(
                image=form.shapes[0][-1], classes=options.classes, samples=sizes[-1], together=options.together
            ),
            preserved_state([torch.cuda.current_device()] if on_gpu else ()),
            background_load(workload, options.together - 1) as load,
        ):
            if on_gpu:
                set_fast_flags(precision)
            profiles.append(measure(workload, precision.forward_context, options.together, report, load))
    profile = _merged(profiles)
    if options.together > 1:
        report("links between ranks")
        profile = _with_links(profile, options.together, options.device)
    return profile


def _vocabulary(options: Any) -> int:
    """How many different tokens the embedding of a model of text takes."""
    model = on_meta(lambda: build(options.model, options.classes))
    return max(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))


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
    return replace(
        profile, ceilings=replace(profile.ceilings, transfers=transfers, reduce=found["reduce"], host=found["host"])
    )


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
