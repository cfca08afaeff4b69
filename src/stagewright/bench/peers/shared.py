"""`bench shared`: eight ranks that share one GPU, predicted from a profile and then measured: stock DDP and a plan.

The profile is taken by eight processes at once, the plan is chosen from it on the cluster `h200-shared-8`, and both
predictions are printed before anything trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

from stagewright.bench.peers.cases import IMAGES, Case, Execution, Kind, Pairing, PeerSuite, Side, Workload
from stagewright.bench.peers.run import run_cases
from stagewright.bench.result import Outcome
from stagewright.bench.statistics import not_slower
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import format_placement
from stagewright.model.zoo import ZOO
from stagewright.plan.estimate import Setting
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.planner import choose
from stagewright.planning.predict import predict
from stagewright.planning.setting import make_setting, trace_model
from stagewright.run.profile import measure_profile

Progress = Callable[[str], None]
CLUSTER = "h200-shared-8"
RANKS = 8
PRECISION = "bf16"
BATCHES = {"vgg16": 224, "resnet152": 256, "vit_b_16": 256}
_SAMPLES = "4,8,28,56"
_STEPS = 8


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What is predicted of one model: stock DDP, and the plan that is chosen."""

    model: str
    batch: int
    parallel: float  # images per second
    plan: Plan
    chosen: float

    def __str__(self) -> str:
        shape = f"{self.plan.mode} {self.plan.shape}, {self.plan.microbatches} microbatches"
        return f"{self.model}, batch {self.batch}: DDP {self.parallel:,.0f} images/s; {shape} {self.chosen:,.0f}"


def catalog_setting(model: str) -> Setting:
    """Eight ranks on one GPU by the catalog, for a machine that has none."""
    return make_setting(trace_model(model).shapes, shipped().cluster(CLUSTER), PRECISION)


def profiled_setting(model: str, progress: Progress) -> Setting:
    """The same by a profile of eight processes at once."""
    options = SimpleNamespace(
        model=model,
        together=RANKS,
        device="cuda",
        samples=_SAMPLES,
        precision=PRECISION,
        threads=1,
        image=None,
        classes=None,
    )
    return make_setting(measure_profile(options, progress), shipped().cluster(CLUSTER), PRECISION)


def foresee(model: str, setting: Setting) -> Foreseen:
    """Predict stock DDP, and choose a plan."""
    batch = BATCHES[model]
    stock = replace(setting, software=replace(shipped().system("pytorch"), channels_last=True))
    everywhere = make_plan((setting.cluster.devices,), batch=batch, microbatches=RANKS, mode=Mode.DP)
    best = choose(setting, batch).fastest
    rate = best.prediction.images_per_second
    return Foreseen(model, batch, predict(everywhere, stock).images_per_second, best.plan, rate)


def make_case(foreseen: Foreseen) -> Case:
    """The comparison that measures a prediction."""
    plan = foreseen.plan
    workload = Workload(
        foreseen.model,
        format_placement(plan.placement),
        foreseen.batch,
        plan.microbatches,
        (3, 224, 224),
        1000,
        cut=",".join(plan.cuts) or None,
        setting=Execution("cuda", PRECISION),
    )
    ours = Side(f"{plan.mode} {plan.shape}, predicted {foreseen.chosen:,.0f}", Kind.STAGEWRIGHT, str(plan.mode))
    theirs = Side(f"torch DDP, predicted {foreseen.parallel:,.0f}", Kind.DDP, "dp", microbatches=RANKS)
    return Case(workload, _STEPS, (Pairing(ours, theirs, not_slower()),))


def measure(repeats: int, progress: Progress, keep: Callable[[Outcome], None]) -> Outcome:
    """Predict every model, print the predictions, then measure them."""
    cases = tuple(_cases(progress))
    suite = PeerSuite("shared", "Eight ranks on one GPU, predicted and measured", IMAGES, cases)
    return run_cases(suite, repeats, 0, progress, keep)


def _cases(progress: Progress) -> Iterator[Case]:
    for model in BATCHES:
        if model in ZOO:
            foreseen = foresee(model, profiled_setting(model, progress))
            progress(f"predicted: {foreseen}")
            yield make_case(foreseen)
