"""Models of one trait each, as a pipeline and as the author's module: equal, or refused in one line.

Every day each trait is trained by one plan, where its difficulty lies; `STAGEWRIGHT_NIGHTLY=1` tries all plans.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.models.plain import Cut, Outcome, Task, difference, train
from benchmarks.models.run import cut_for, run
from stagewright.errors import RunFailed, UserError
from stagewright.model.chain import Chain, Way
from stagewright.model.load import build_model
from tests.traits import TRAITS, Expected, Trait

PLANS = {
    "one stage": ("0:0", "sync", 1),
    "dp 2": ("0:0-1", "dp", 1),
    "sync 1-1-1-1": ("0:0.0:1.0:2.0:3", "sync", 4),
    "stale 2-1": ("0:0-1.0:2", "stale", 2),
}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
IS_NIGHTLY = bool(os.environ.get("STAGEWRIGHT_NIGHTLY"))


ALSO_DAILY = {
    *(("noise by random", "one stage"), ("noise by numpy", "one stage")),  # the only ones that show the seeds
    (
        "autocast inside forward in fp32",
        "sync 1-1-1-1",
    ),  # can be cut in single precision, not in double
}


def daily_plan(number: int) -> str:
    """In turns, so that neighbours, which are alike, are tried by different plans."""
    return ("stale 2-1", "one stage", "sync 1-1-1-1", "dp 2")[number % 4]


CASES = [
    (trait, plan)
    for number, trait in enumerate(TRAITS.values())
    for plan in PLANS
    if IS_NIGHTLY or plan == daily_plan(number) or (trait.name, plan) in ALSO_DAILY
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated functions that authors still use
        yield


@pytest.mark.parametrize(
    ("trait", "plan"), CASES, ids=[f"{trait.name} {plan}".replace(" ", "_") for trait, plan in CASES]
)
def test_a_trait_trains_as_its_author_wrote_it_or_is_refused(trait: Trait, plan: str, tmp_path: Path) -> None:
    placement, mode, stages = PLANS[plan]
    inputs, labels = trait.data(16)
    task = Task(
        trait.model,
        trait.factory,
        inputs,
        labels,
        placement=placement,
        mode=mode,
        steps=3 if IS_NIGHTLY else 2,
        precision=trait.precision,
        weight_decay=trait.weight_decay,
        evaluates=True,
    )
    try:
        cut = Cut() if stages == 1 else find_cut(task, trait, stages)
        actual = run(task, cut, tmp_path)
    except UserError as error:
        assert "\n" not in str(error)
        assert trait.expected is Expected.EQUAL_OR_REFUSED, str(error)
        return
    except RunFailed as error:  # a sample left out the block that a stage ends with, which no proof can foresee
        assert trait.expected is Expected.EQUAL_OR_REFUSED, str(error)
        assert "no stage can end there" in str(error)
        return
    if trait.draws and cut.units and (not cut.is_seeded or actual.way not in ("", way_of(cut))):
        return  # plain PyTorch can't draw the same numbers there; the proof has, in one process
    gap, where = difference(actual, train(task, cut))
    assert gap <= TOLERANCE[trait.precision], where
    assert moves(actual)


def find_cut(task: Task, trait: Trait, stages: int) -> Cut:
    """Near equal numbers of units, where the model can be cut."""
    model = build_model(trait.model, task.seed, None, task.dtype)
    example = task.fields["images"][:1]
    chain = Chain(model, example, build=lambda: build_model(trait.model, task.seed, None, task.dtype))
    cut = cut_for(chain, stages)
    if len(cut.units) < stages - 1:
        raise UserError(f"{trait.name} has {len(chain.units)} units")
    return cut


def way_of(cut: Cut) -> str:
    return str(Way.BLOCKS) if cut.is_between_blocks else str(Way.GRAPH)


def moves(outcome: Outcome) -> bool:
    return len(set(outcome.losses)) == len(outcome.losses)
