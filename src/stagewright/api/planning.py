"""Plan from Python: `stagewright plan`, `simulate`, `profile` and `inspect` as functions that return what they find."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Unpack

from stagewright.api.given import Data, Given, Model, completes
from stagewright.api.options import InspectOptions, PlanOptions, ProfileOptions, SimulateOptions
from stagewright.config.commands import completed
from stagewright.plan.plan import Plan
from stagewright.planning.planner import Choice
from stagewright.planning.predict import Prediction
from stagewright.planning.question import Question, search
from stagewright.profile.profile import Profile
from stagewright.run.inspect import Inspection, inspect_model, sample_form
from stagewright.run.plan import ask
from stagewright.run.plan import simulate as simulate_plan
from stagewright.run.profile import Subject, import_profile, measure_profile
from stagewright.voice import Voice

_LOADED = ("synthetic", "imagenet")  # data that a plan may count the loading of


@completes(PlanOptions)
def plan(
    model: Model,
    *,
    data: Literal["synthetic", "imagenet"] | Data | None = None,
    profile: str | os.PathLike[str] | Profile | None = None,
    **options: Unpack[PlanOptions],
) -> Choice:
    """Search for the fastest plan; without `cluster` and `profile`, for this machine, which is profiled first.

    data: what is loaded, or a Dataset whose samples the model takes. `choice.best.plan` is the plan to train:
    `stagewright.train(model, plan=choice)`.
    """
    with Given() as given:
        return search(ask(_question("plan", given, model, data, {**options, "profile": given.file(profile)})))


@completes(SimulateOptions)
def simulate(
    model: Model,
    *,
    data: Literal["synthetic", "imagenet"] | Data | None = None,
    profile: str | os.PathLike[str] | Profile | None = None,
    plan: str | os.PathLike[str] | Plan | Choice | None = None,
    **options: Unpack[SimulateOptions],
) -> Prediction:
    """Predict the speed, memory and idle time of a plan on a cluster, or by a profile of this machine.

    data: what is loaded, or a Dataset whose samples the model takes. What is odd about a plan is a warning.
    """
    with Given() as given:
        values = {**options, "profile": given.file(profile), "plan": given.file(plan)}
        warn = Voice(warn=lambda text: warnings.warn(text, stacklevel=2))
        return simulate_plan(_question("simulate", given, model, data, values), warn)[0]


@completes(ProfileOptions)
def profile(model: Model, *, data: Data | None = None, **options: Unpack[ProfileOptions]) -> Profile:
    """Measure the time and bytes of every unit of a model on this machine; `profile.write(FILE)` keeps it.

    data: a Dataset whose samples the model takes, where these are not images.
    """
    with Given() as given:
        name = given.model(model)
        values = completed("profile", {**options, "model": name})
        if values["pipedream"]:
            return import_profile(values["pipedream"], name, values["samples"])
        form = None if data is None else sample_form(name, given.data(data), values["classes"], values["image"])
        return measure_profile(Subject.of(values), form=form)


@completes(InspectOptions)
def inspect(model: Model, *, data: Data | None = None, **options: Unpack[InspectOptions]) -> Inspection:
    """The units of a model, how it can be cut and where it can't, and the proof of a cut into stages.

    data: a name or a Dataset whose samples the model takes, where these are not images.
    """
    with Given() as given:
        source = None if data is None else given.data(data)
        values = completed("inspect", {**options, "model": given.model(model), "data": source})
        name = values.pop("model")
        return inspect_model(name, **{name: value for name, value in values.items() if name != "json"})


def _question(command: str, given: Given, model: Model, data: Any, options: Mapping[str, Any]) -> Question:
    """What a command would ask, with what the model takes, where samples of the data say that."""
    name = given.model(model)
    is_loaded = data is None or data in _LOADED if isinstance(data, str | None) else False
    values = completed(command, {**options, "model": name, "data": data if is_loaded else None})
    form = None if is_loaded else sample_form(name, given.data(data), values["classes"], values["image"])
    return Question.of(command, values, form)
