"""Inspects a model: its units, how it can be cut, where it can't, and whether a cut into some stages is proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stagewright.config.toml import make_config
from stagewright.data.sources import cast
from stagewright.errors import UserError, counted
from stagewright.model.call import Inputs
from stagewright.model.cut import Chain, Way
from stagewright.model.load import build_model
from stagewright.model.probe import Given
from stagewright.model.prove import SAMPLES, Differs, Proof, first_proven, prove
from stagewright.model.walk import Walk, model_errors
from stagewright.model.zoo import ZOO
from stagewright.profile.shapes import run_units
from stagewright.run.samples import bind
from stagewright.runtime.process.assemble import open_data

_SAMPLES = 2
_STAGES = 4  # of the cut that is proven, unless the model has fewer units or another number is asked for


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """One unit, for one sample."""

    name: str
    parameters: int
    flops: float  # of forward; a multiply-add counts as two
    bytes_across: int  # a cut after it
    impossible: str | None  # why no stage can begin with it


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a model before it is trained."""

    model: str
    inputs: dict[str, tuple[int, ...]]  # the shape of each for one sample, by the field it is
    way: str
    why: str | None  # the model's own code was not recorded
    whole: dict[str, str]  # modules kept whole, and why
    units: tuple[UnitFacts, ...]
    most_stages: int
    cuts: tuple[str, ...]
    proof: Proof | None
    refused: str | None  # why the cut is not proven


def inspect_model(
    name: str,
    *,
    classes: int | None = None,
    image: int | None = None,
    data: str | None = None,
    inputs: str | None = None,
    cut: str | None = None,
    stages: int | None = None,
    seed: int = 0,
) -> Inspection:
    """Trace a model on samples like those of the data, and prove a cut into stages: an even one, or the one given.

    `inputs` says which fields of the data the model takes, as `--inputs` of a run does.
    """
    build = partial(build_model, name, seed, classes)
    given = _given(name, build, classes, image, data, inputs)
    example = given.inputs
    shapes = {field: tuple(tensor.shape[1:]) for field, tensor in zip(given.names, example.tensors, strict=True)}
    few = example.repeated(_SAMPLES)
    with model_errors(name, example.form):
        few.call(build().train())
    tried: list[Chain] = []

    def attempt(chain: Chain) -> tuple[Chain, tuple[str, ...], Proof | None]:
        tried.append(chain)
        cuts = _cuts(chain, cut, stages)
        return chain, cuts, prove(build, chain, cuts, f"{name} {classes}") if cuts else None

    refused: str | None = None
    try:
        chain, cuts, proof = first_proven(lambda way: Chain(build(), example, way=way, build=build), attempt)
    except Differs as error:
        chain, cuts, proof, refused = tried[0], _cuts(tried[0], cut, stages), None, str(error)
    whole = dict(chain.trace.training.whole) if chain.trace else {}
    units = _units(chain, few)
    most = 1 if chain.way is Way.WHOLE else len(chain.units) - len(chain.impossible)
    return Inspection(name, shapes, str(chain.way), chain.trace_error, whole, units, most, cuts, proof, refused)


def _cuts(chain: Chain, cut: str | None, stages: int | None) -> tuple[str, ...]:
    """The cut to prove: the given one, or an even one into some stages."""
    most = len(chain.units) - len(chain.impossible)
    if cut is not None:
        return chain.by_names([name.strip() for name in cut.split(",")])
    if stages is not None and stages > most:
        raise UserError(
            f"--stages {stages}, but the model can be cut into at most {counted(most, 'stage')}; give fewer"
        )
    return chain.by_shares([1] * (stages or min(_STAGES, most)))


def _given(
    name: str,
    build: Callable[[], nn.Module],
    classes: int | None,
    image: int | None,
    data: str | None,
    inputs: str | None,
) -> Given:
    """What the model is called with: samples of the data, or a random image or text."""
    entry = ZOO.get(name)
    side = image or (entry.image if entry else 32)
    if data is None:
        generator = torch.Generator().manual_seed(0)
        if entry is not None and entry.tokens is not None:
            return Given(Inputs((torch.randint(2, (1, entry.tokens), generator=generator),)), ("input_ids",))
        return Given(Inputs((torch.randn(1, 3, side, side, generator=generator),)), ("image",))
    table = {"model": {"name": name, "classes": classes or (entry.classes if entry else 10), "inputs": inputs}}
    config = make_config(table | {"data": {"source": data, "image": side}}, given=())
    source = open_data(config, data)
    fields = cast(source.batch(np.arange(SAMPLES) % len(source)), source.targets, torch.float32)
    return bind(build(), tuple(fields), source.targets, config).given(fields)


def _units(chain: Chain, example: Inputs) -> tuple[UnitFacts, ...]:
    chain.model.train()
    facts: list[UnitFacts] = []
    before = 0
    with FlopCounterMode(display=False) as counter:
        for unit in run_units(chain, Walk(chain, example)):
            total = counter.get_total_flops()
            crossing = sum(value.nbytes for value in unit.live) // len(example)
            name = unit.visit.name
            flops = (total - before) / len(example)
            facts.append(UnitFacts(name, unit.parameters, flops, crossing, chain.impossible.get(name)))
            before = total
    return tuple(facts)
