"""Inspects a model: its units, how it can be cut, where it can't, and whether a cut into some stages is proven."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stagewright.config.sections import Config
from stagewright.config.toml import FIXED, make_config
from stagewright.data.sources import cast
from stagewright.errors import UserError, counted
from stagewright.model.call import Form, Inputs
from stagewright.model.chain import Chain, Way
from stagewright.model.load import start_model
from stagewright.model.networks.weights import Start
from stagewright.model.probe import Given
from stagewright.model.prove import SAMPLES, Differs, Proof, first_proven, prove
from stagewright.model.walk import Walk, model_errors
from stagewright.planning.traced import form_of
from stagewright.profile.trace import run_units
from stagewright.run.defaults import resolve_model
from stagewright.run.opening import bind
from stagewright.runtime.process.assemble import open_data, open_model

_SAMPLES = 2
_STAGES = 4  # of the cut that is proven, unless the model has fewer units or another number is asked for


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """One unit, for one sample."""

    name: str
    parameters: int  # that are trained
    flops: float  # of forward; a multiply-add counts as two
    bytes_across: int  # a cut after it
    impossible: str | None  # why no stage can begin with it
    frozen: int = 0  # parameters that are not trained


@dataclass(frozen=True, slots=True, repr=False)
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
    weights: Start | None = None  # where its first weights came from, if they are not new

    def __repr__(self) -> str:
        parameters = sum(unit.parameters for unit in self.units)
        proven = f"proven before {', '.join(self.cuts)}" if self.proof else self.refused or "not cut"
        return (
            f"Inspection({self.model}: {counted(len(self.units), 'unit')}, {parameters:,} parameters, at most "
            f"{counted(self.most_stages, 'stage')}, {proven})"
        )


def inspect_model(
    name: str,
    *,
    classes: int | None = None,
    image: int | None = None,
    data: str | None = None,
    inputs: str | None = None,
    init: str | None = None,
    freeze: str | None = None,
    cut: str | None = None,
    stages: int | None = None,
    seed: int = 0,
) -> Inspection:
    """Trace a model on samples like those of the data, and prove a cut into stages: an even one, or the one given.

    `inputs` says which fields of the data the model takes, as `--inputs` of a run does.
    """
    config = _config(name, data, image, seed, classes=classes, inputs=inputs, init=init, freeze=freeze)
    name, classes = config.model.name, config.model.classes
    build = partial(open_model, config)
    model, weights = start_model(name, seed, classes, image=config.data.image, init=config.model.init, frozen=freeze)
    given = _given(config, model, has_data=data is not None)
    example = given.inputs
    shapes = {field: tuple(tensor.shape[1:]) for field, tensor in zip(given.names, example.tensors, strict=True)}
    with model_errors(name, example.form):
        (few := example.repeated(_SAMPLES)).call(build())
    first = Chain(model, example, build=build)

    def attempt(chain: Chain) -> tuple[Chain, tuple[str, ...], Proof | None]:
        cuts = _cuts(chain, cut, stages)
        return chain, cuts, prove(build, chain, cuts, f"{name} {classes}") if cuts else None

    refused: str | None = None
    try:
        chain, cuts, proof = first_proven(first, attempt)
    except Differs as error:
        chain, cuts, proof, refused = first, _cuts(first, cut, stages), None, str(error)
    whole = dict(chain.trace.training.whole) if chain.trace else {}
    units = _units(chain, few)
    most = 1 if chain.way is Way.WHOLE else len(chain.units) - len(chain.impossible)
    return Inspection(
        name, shapes, str(chain.way), chain.trace_error, whole, units, most, cuts, proof, refused, weights
    )


def sample_form(name: str, data: str, classes: int | None = None, image: int | None = None) -> Form:
    """What a model takes of samples of the data."""
    config = _config(name, data, image, 0, classes=classes)
    return _given(config, open_model(config), has_data=True).inputs.form


def _config(name: str, data: str | None, image: int | None, seed: int, **model: Any) -> Config:
    """A run of the model, with what its name tells filled in."""
    sources = {"source": data or "synthetic", "image": image}
    return resolve_model(
        make_config(FIXED, {"model": {"name": name, **model}, "data": sources, "run": {"seed": seed}}, given=())
    )


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


def _given(config: Config, model: nn.Module, *, has_data: bool) -> Given:
    """What the model is called with: samples of the data, or a random image or text."""
    if not has_data:
        form, generator = form_of(config.model.name, config.data.image), torch.Generator().manual_seed(0)
        shape = (1, *form.shapes[0])
        if form.dtypes == ("int64",):
            return Given(Inputs((torch.randint(2, shape, generator=generator),)), ("input_ids",))
        return Given(Inputs((torch.randn(shape, generator=generator),)), ("image",))
    source = open_data(config, config.data.source)
    fields = cast(source.batch(np.arange(SAMPLES) % len(source)), source.targets, torch.float32)
    return bind(model, tuple(fields), source, config).given(fields)


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
            impossible = chain.impossible.get(name)
            facts.append(UnitFacts(name, unit.parameters, flops, crossing, impossible, unit.frozen))
            before = total
    return tuple(facts)
