"""Tries every model of the catalog: cuts and proves it, trains the pieces, and compares with the author's own module.

Each model is trained for three updates in double precision, in four stages and with lag, with every rank in this
process; the same updates by `plain` are what they must equal.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.models.catalog import ENTRIES, Entry
from benchmarks.models.configured import CLASSES
from benchmarks.models.plain import (
    Cut,
    Fields,
    Objective,
    Outcome,
    Task,
    cut_between_blocks,
    difference,
    even_cut,
    kept_randomness,
    train,
)
from benchmarks.models.stock import stock_pipeline
from stagewright.config.toml import FIXED, make_config
from stagewright.errors import UserError, did_you_mean, first_line
from stagewright.events import BatchLosses, Event, Scored
from stagewright.metrics import LOSS
from stagewright.model.call import Inputs
from stagewright.model.chain import Chain, Way
from stagewright.model.load import build_model
from stagewright.model.prove import SAMPLES, first_proven, prove
from stagewright.run.prepare import prepare
from stagewright.runtime.process.emulate import Emulation
from stagewright.voice import Voice

BAR = 1e-9  # the largest difference that is none
STAGES = 4
_SAMPLES = 16  # of a batch: 4 of a microbatch, since BatchNorm of fewer is chaotic
_RATE = 0.01
_PLANS = {"sync": ("0:0.0:1.0:2.0:3", "sync", STAGES), "stale": ("0:0-1.0:2", "stale", 2)}
_LIBRARIES = ("torch", "torchvision", "timm", "transformers", "peft")
_LONGEST = 300  # characters of a reason
_ANY_SCALE = 3.0  # no power of two, so that dividing by it rounds


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of one model. Differences are relative, from plain PyTorch after three updates."""

    library: str
    name: str
    way: str = ""
    units: int = 0
    most_stages: int = 0
    stages: int = 0  # into which it was cut
    seconds: float = 0.0  # to cut and prove
    sync: float | None = None
    stale: float | None = None
    noise: float | None = None  # what rounding alone does to the author's own module, where the difference is larger
    stock: str = ""  # what torch.distributed.pipelining makes of it
    refused: str = ""

    @property
    def largest(self) -> float | None:
        """The larger difference."""
        return max((gap for gap in (self.sync, self.stale) if gap is not None), default=None)

    @property
    def is_equal(self) -> bool:
        """Whether it trains as the author's module does, as far as that is determined."""
        return self.largest is not None and self.largest <= max(BAR, 100 * (self.noise or 0.0))


@dataclass(frozen=True, slots=True)
class Tries:
    """All models that were tried, and by which versions."""

    models: tuple[Tried, ...]
    versions: dict[str, str]
    missing: tuple[str, ...] = ()  # libraries that are not installed


def select(only: str | None, *, quick: bool = False) -> list[Entry]:
    """The entries whose names contain one of some texts, separated by commas."""
    wanted = [text for text in (only or "").split(",") if text]
    known = [entry.name for entry in ENTRIES]
    for text in wanted:
        if not any(text in name for name in known):
            raise UserError(f"--only {text}: no model's name contains it; {did_you_mean(text, known)}")
    chosen = [entry for entry in ENTRIES if not wanted or any(text in entry.name for text in wanted)]
    return [entry for entry in chosen if entry.is_quick] if quick else chosen


def try_models(entries: Sequence[Entry], voice: Voice) -> Tries:
    """Try models one after another; those of libraries that are not installed are left out."""
    tried = []
    for entry in entries:
        if entry.is_installed:
            tried.append(try_model(entry))
            voice.progress(describe(tried[-1]))
    missing = dict.fromkeys(entry.library for entry in entries if not entry.is_installed)
    return Tries(tuple(tried), _versions(), tuple(missing))


def describe(tried: Tried) -> str:
    """One line on one model."""
    if tried.refused:
        return f"{tried.name}: {tried.refused}"
    gaps = f"sync {_figure(tried.sync)}, stale {_figure(tried.stale)}"
    how = f"{tried.way}, {tried.units} units, {tried.stages} stages, {tried.seconds:.1f} s"
    return f"{tried.name}: {how}; differs from plain PyTorch by {gaps}"


def _figure(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.0e}"


def try_model(entry: Entry) -> Tried:
    """Cut and prove a model, train it twice, and compare."""
    tried = Tried(entry.library or "torch", entry.name)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, STAGEWRIGHT_CACHE=folder), kept_randomness():
        try:
            return _try(entry, tried, Path(folder))
        except UserError as error:
            return replace(tried, refused=str(error)[:_LONGEST])
        except Exception as error:  # code of libraries may raise anything
            return replace(tried, refused=f"failed: {type(error).__name__}: {first_line(error, _LONGEST)}")


def _try(entry: Entry, tried: Tried, folder: Path) -> Tried:
    task = replace(task_of(entry, _SAMPLES), lr=_RATE)
    began = time.perf_counter()
    chain, cut = find_cut(task, STAGES)
    possible = sum(unit not in chain.impossible for unit in chain.units[1:])
    found: dict[str, Any] = {"way": str(chain.way), "units": len(chain.units), "most_stages": possible + 1}
    found |= {"stages": len(cut.units) + 1, "seconds": time.perf_counter() - began}
    if not cut.units:
        return replace(tried, **found, refused=f"it can't be cut: {chain.trace_error or 'it has one unit'}")
    gaps: dict[str, Any] = {}
    for name, (placement, mode, stages) in _PLANS.items():
        stages = min(stages, len(cut.units) + 1)
        ranks = ".".join(f"0:{rank}" for rank in range(stages)) if name == "sync" else placement
        gaps[name] = compare(replace(task, placement=ranks, mode=mode), cut_for(chain, stages), folder)
    if max(gaps.values()) > BAR:
        found["noise"] = _noise(replace(task, placement="0:0"))
    if entry.is_compared:
        starts = cut.units if cut.is_between_blocks else cut.starts
        found["stock"] = stock_pipeline(build(task), example_of(task).first(4), starts)
    return replace(tried, **found, **gaps)


def task_of(entry: Entry, samples: int) -> Task:
    """The task of training an entry on one batch of random samples."""
    fields = entry.fields(samples, torch.Generator().manual_seed(3))
    return Task(
        f"benchmarks.models.catalog:{entry.name}",
        entry.factory,
        fields,
        batch=samples,
        takes=entry.takes,
        loss=entry.loss,
        objective=entry.objective,
    )


def example_of(task: Task) -> Inputs:
    """What the model of a task is called with."""
    fields = task.fields
    if not task.takes:
        return Inputs((fields["images"],))
    names = tuple(task.takes) if len(task.takes) > 1 else ()
    return Inputs(tuple(fields[name] for name in task.takes.values()), names)


def build(task: Task) -> nn.Module:
    """The model as a run in double precision builds it."""
    return build_model(task.model, task.seed, CLASSES, task.dtype)


def find_cut(task: Task, stages: int) -> tuple[Chain, Cut]:
    """Cut a model into so many stages, or as many as it has, by the first way that is proven."""
    model = build(task)
    example = example_of(task).first(SAMPLES)

    def attempt(chain: Chain) -> tuple[Chain, Cut]:
        cut = cut_for(chain, stages)
        if cut.units:
            prove(lambda: _in_single(task), chain, chain.by_names(cut.units), f"{task.model} {CLASSES}")
        return chain, cut

    return first_proven(Chain(model, example), attempt)


def _in_single(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    return build_model(task.model, task.seed, CLASSES, torch.float32)


def cut_for(chain: Chain, stages: int) -> Cut:
    """Cut a chain near equal numbers of units, where plain PyTorch can seed the stages alike."""
    if chain.way is Way.WHOLE:
        return Cut()
    if chain.way is Way.BLOCKS:
        return cut_between_blocks(chain.units, stages)
    return even_cut(chain.model, chain.units, stages, chain.impossible)


def compare(task: Task, cut: Cut, folder: Path) -> float:
    """The largest difference between a pipeline and the author's module after the task's updates."""
    return difference(run(task, cut, folder), train(task, cut))[0]


def _noise(task: Task) -> float:
    """The difference that rounding makes to the author's own module: of the inputs, and of a total that is scaled.

    A module that computes in single precision whatever its weights are, as RMSNorm of transformers does, rounds the
    gradient of a scaled total otherwise.
    """
    plainly = train(task)
    rounding = 1 + torch.finfo(torch.float64).eps
    moved = {name: t.double() * rounding if t.is_floating_point() else t for name, t in task.data.items()}
    others = (replace(task, inputs=moved), replace(task, objective=partial(_scaled, task.objective)))
    return max(difference(train(other), plainly)[0] for other in others)


def _scaled(objective: Objective, outputs: Any, fields: Fields) -> Any:
    """The same loss, with its total and count scaled; a mean as it is."""
    made = objective(outputs, fields)
    return (made[0] / _ANY_SCALE, made[1] / _ANY_SCALE) if isinstance(made, tuple) else made


def options_of(task: Task, cut: Cut, folder: Path) -> dict[str, dict[str, Any]]:
    """The options that train a task; its samples are written into the folder."""
    save_file({name: tensor.contiguous() for name, tensor in task.data.items()}, folder / "data.safetensors")
    asked = ",".join(f"{parameter}={field}" for parameter, field in task.takes.items())
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": task.model, "classes": CLASSES, "inputs": asked if len(task.takes) > 1 else None},
        "loss": {"name": task.loss},
        "data": {"source": f"tensors:{folder / 'data.safetensors'}", "shuffle": False},
        "plan": {
            "placement": task.placement,
            "cut": ",".join(cut.units) or None,
            "mode": task.mode,
            "batch": task.batch,
            "microbatches": task.microbatches,
        },
        "optimizer": {"lr": task.lr, "momentum": 0.9, "weight_decay": task.weight_decay},
        "run": {"steps": task.steps, "seed": task.seed, "precision": task.precision, "runs": str(folder / "runs")},
    }
    if task.mode == "stale":
        tables["plan"]["staleness"] = 1
    if task.evaluates:
        tables["data"]["val"] = tables["data"]["source"]
        tables["run"]["eval_every"] = task.steps
    return tables


def run(task: Task, cut: Cut, folder: Path) -> Outcome:
    """Train as a pipeline, with every rank in this process."""
    tables = options_of(task, cut, folder)
    job = prepare(make_config(FIXED, tables, given=())).job
    events: list[Event] = []
    emulation = Emulation(job, events.append)
    emulation.run()
    losses = {i: (total, count) for e in events if isinstance(e, BatchLosses) for i, total, count in e.losses}
    scores = [event.score.totals[LOSS][0] for event in events if isinstance(event, Scored)]
    batches = []
    for first in range(0, task.steps * task.microbatches, task.microbatches):
        totals, counts = zip(*(losses[first + number] for number in range(task.microbatches)), strict=True)
        batches.append(sum(totals) / sum(counts))
    score = sum(scores) if task.evaluates else None
    return Outcome(batches, _with_ties(task, emulation.weights()), score=score, way=str(job.way))


def _with_ties(task: Task, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by every name of the model: a stage has a tied parameter under one of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in build(task).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = dict(weights)
    for tied in names.values():
        known = next((found[name] for name in tied if name in found), None)
        found |= {} if known is None else dict.fromkeys(tied, known)
    return found


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    return found
