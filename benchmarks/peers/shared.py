"""`shared`: eight ranks that share one GPU, predicted from a profile and then measured: stock DDP and a plan.

A process of its own takes the profile of each model, with seven more beside it, under CUDA MPS as in the run; the plan
is chosen from it, on the cluster `h200-shared-8` with the links and the host budget that the same profile measured. All
predictions are in a file before anything trains. `--simulate` ends there; `--reuse FOLDER` measures the predictions
of an earlier run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.outcome import Outcome, new_outcome, not_slower
from benchmarks.peers.cases import Case, Execution, Kind, Pairing, PeerSuite, Side, Workload
from benchmarks.peers.run import run_cases
from benchmarks.timed_command import run_command, stagewright
from stagewright.bench.machine import shared_gpu
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import format_placement
from stagewright.cluster.topology import Level
from stagewright.errors import UserError
from stagewright.files import read_text, write_text
from stagewright.model.networks.zoo import ZOO
from stagewright.plan.estimate import Setting
from stagewright.plan.make import make_plan, read_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.planner import choose
from stagewright.planning.predict import predict
from stagewright.planning.setting import make_setting, measured_link
from stagewright.profile.profile import Profile, read_profile
from stagewright.voice import Voice

CLUSTER = "h200-shared-8"
RANKS = 8
PRECISION = "bf16"
BATCHES = {"vgg16": 224, "resnet152": 256, "vit_b_16": 256}
PREDICTIONS = "predictions.json"
_SAMPLES = "8,32"
_STEPS, _DDP_STEPS = 30, 6  # batches of a segment: enough that filling the pipeline does not count


@dataclass(frozen=True, slots=True)
class ModelPrediction:
    """What is predicted of one model: stock DDP, and the plan that is chosen."""

    model: str
    batch: int
    parallel: float  # images per second
    plan: Plan
    chosen: float

    def __str__(self) -> str:
        shape = f"{self.plan.mode} {self.plan.shape}, {self.plan.microbatches} microbatches"
        return f"{self.model}, batch {self.batch}: DDP {self.parallel:,.0f} images/s; {shape} {self.chosen:,.0f}"

    def describe(self) -> dict[str, object]:
        """The prediction as the file has it."""
        rates = {"ddp": self.parallel, "chosen": self.chosen}
        return {"model": self.model, "batch": self.batch, "images_per_second": rates, "plan": self.plan.describe()}


def _setting(profile: Profile) -> Setting:
    """Eight ranks on one GPU, by a profile of eight processes at once, with the links that it measured between them."""
    cluster, ceilings = shipped().cluster(CLUSTER), profile.ceilings
    (machine,) = cluster.machines
    assert ceilings is not None
    level = Level(measured_link(profile), (tuple(range(RANKS)),))
    machine = replace(machine, levels=(level,), host=ceilings.host, alone=ceilings.alone)
    return make_setting(profile, replace(cluster, machines=(machine,)), PRECISION)


def take_profile(model: str, path: Path) -> None:
    """Profile a model in a process of its own: a fault of CUDA in there ends that process alone."""
    options = f"--device cuda --precision {PRECISION} --together {RANKS} --samples {_SAMPLES}".split()
    run_command(stagewright("profile", model, *options, "-o", str(path)))


def predict_model(model: str, profile: Profile) -> ModelPrediction:
    """Predict stock DDP, and choose a plan on all ranks.

    One rank alone with the card would be as fast; the ranks stand for eight cards.
    """
    batch, setting, stock = BATCHES[model], _setting(profile), _setting(profile.over_gloo())
    everywhere = make_plan((setting.cluster.devices,), batch=batch, microbatches=RANKS, mode=Mode.DP)
    best = choose(setting, batch, whole=True).fastest
    rate = best.prediction.images_per_second
    return ModelPrediction(model, batch, predict(everywhere, stock).images_per_second, best.plan, rate)


def make_case(predicted: ModelPrediction) -> Case:
    """The comparison that measures a prediction."""
    plan = predicted.plan
    workload = Workload(
        predicted.model,
        format_placement(plan.placement),
        predicted.batch,
        plan.microbatches,
        (3, 224, 224),
        1000,
        cut=",".join(plan.cuts) or None,
        setting=Execution("cuda", PRECISION),
        versions=",".join(str(stage.versions) for stage in plan.stages) if plan.mode is Mode.STALE else None,
        depths=",".join(str(stage.depth) for stage in plan.stages),
    )
    ours = Side(f"{plan.mode} {plan.shape}, predicted {predicted.chosen:,.0f}", Kind.STAGEWRIGHT, str(plan.mode))
    theirs = Side(
        f"torch DDP, predicted {predicted.parallel:,.0f}", Kind.DDP, "dp", microbatches=RANKS, steps=_DDP_STEPS
    )
    return Case(workload, _STEPS, (Pairing(ours, theirs, not_slower()),))


def measure(
    repeats: int,
    folder: Path,
    voice: Voice,
    keep: Callable[[Outcome], None],
    *,
    reuse: Sequence[str] = (),
    simulate: bool = False,
    only: str | None = None,
) -> Outcome:
    """Predict every model, or those whose name contains `only`, write the predictions, then measure them.

    Profiles and predictions are in the folder.
    """
    if reuse:
        known = models(only)
        predicted = [one for one in read_predictions(Path(reuse[0]) / PREDICTIONS) if one.model in known]
    else:
        predicted = []
        with shared_gpu(voice):
            for model in models(only):
                voice.progress(f"profiling {model}")
                take_profile(model, folder / f"{model}.json")
        for model in models(only):
            predicted.append(predict_model(model, read_profile(folder / f"{model}.json")))
            voice.progress(f"predicted: {predicted[-1]}")
    write_predictions(predicted, folder)
    suite = PeerSuite("shared", "Eight ranks on one GPU, predicted and measured", tuple(map(make_case, predicted)))
    if simulate:
        figures = {f"{one.model}: torch DDP, images/s": one.parallel for one in predicted}
        figures |= {f"{one.model}: {one.plan.mode} {one.plan.shape}, images/s": one.chosen for one in predicted}
        return new_outcome(suite.name, suite.title, 1, figures=figures)
    return run_cases(suite, repeats, 0, voice, keep)


def models(only: str | None = None) -> list[str]:
    """The models to compare: all, or those whose name contains a text."""
    found = [model for model in BATCHES if model in ZOO and (only is None or only.lower() in model)]
    if not found:
        raise UserError(f"--only '{only}' matches none of {len(BATCHES)} models: {', '.join(BATCHES)}")
    return found


def write_predictions(predicted: Sequence[ModelPrediction], folder: Path) -> None:
    write_text(folder / PREDICTIONS, json.dumps([one.describe() for one in predicted], indent=1))


def read_predictions(path: Path) -> list[ModelPrediction]:
    """The predictions that an earlier run wrote."""
    try:
        entries = json.loads(read_text(path))
        return [
            ModelPrediction(
                *(entry["model"], entry["batch"], entry["images_per_second"]["ddp"]),
                *(read_plan(json.dumps(entry["plan"]), str(path)), entry["images_per_second"]["chosen"]),
            )
            for entry in entries
        ]
    except OSError as error:
        raise UserError(f"--reuse {path.parent}: {path.name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--reuse {path.parent}: {path.name} has no predictions of shared ({error})") from error
