"""Plan, predict and train both sides of the demo: stages by Stagewright, and torch's DistributedDataParallel.

Both have the same two ranks, the same initial weights, the same images in the same order, the same batch, optimizer and
number of steps, and one thread a rank. Their processes stay alive and train in turns; after each turn the weights of
both are evaluated in one process of plain PyTorch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stagewright.bench.demo.digits import CLASSES, SIDE, draw_digits
from stagewright.bench.demo.machines import Machines, bytes_passed, two_machines
from stagewright.bench.demo.ranks import Ranks, Segment
from stagewright.bench.statistics import Interval, median_interval, paired_ratio
from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import format_placement
from stagewright.cluster.topology import Cluster, Link, Machine
from stagewright.config.toml import make_config
from stagewright.metrics import Span, Timeline
from stagewright.model.networks.zoo import ZOO
from stagewright.plan.estimate import Setting
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.build import build_plan
from stagewright.planning.planner import choose
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.setting import make_setting
from stagewright.planning.traced import trace_model
from stagewright.profile.profile import Profile
from stagewright.run.prepare import prepare
from stagewright.run.profile import Subject, measure_profile
from stagewright.voice import SILENT, Voice

MODEL, BATCH, OPTIMIZER, LR = "vgg-small", 64, "adamw", 0.001
HELD_OUT = 1000  # images that nobody trains on
_SCRATCH = "stagewright-demo-"  # then the number of the process
_RANKS = 2
_TRAINING = 3072
_PROFILED = (8, 32)  # samples of a microbatch; the last is what DDP runs at once
_RUNNERS = {"stages": "stagewright.bench.demo.sides:Stagewright", "DDP": "stagewright.bench.demo.sides:Ddp"}
_CLEAR = 1.1  # predicted ratio from which stages without lag are worth showing
LINKS, BATCHES = ("net-1g", "net-10g", "net-25g"), (64, 256)  # of the table that says where stages stop winning


@dataclass(frozen=True, slots=True)
class Length:
    """How long the demo is: turns of both sides, the steps of each, and those before the first that are not timed."""

    turns: int = 6
    steps: int = 20
    warm: int = 6

    @property
    def total(self) -> int:
        return self.warm + self.turns * self.steps


@dataclass(frozen=True, slots=True)
class Measured:
    """One side: what was predicted, and what it did."""

    name: str
    prediction: Prediction
    rates: tuple[float, ...]  # images per second of each turn
    seconds: tuple[float, ...]  # of training after each evaluation
    accuracies: tuple[float, ...]  # on held-out images
    link_bytes: float | None  # of a step over the link, both directions together; None where it is not known
    timeline: Timeline
    others: float  # cores that other programs kept busy

    @property
    def rate(self) -> Interval:
        return median_interval(self.rates)

    def describe(self) -> dict[str, Any]:
        return {
            "plan": self.prediction.plan.describe(),
            "predicted": self.prediction.images_per_second,
            "images_per_second": self.rates,
            "seconds": self.seconds,
            "accuracies": self.accuracies,
            "link_bytes_per_step": self.link_bytes,
        }


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo found."""

    machines: Machines
    why_local: str  # why there are no namespaces
    length: Length
    ours: Measured
    theirs: Measured
    sweep: dict[tuple[str, int], float] = field(default_factory=dict)  # predicted ratio by link and batch

    @property
    def ratio(self) -> Interval:
        return paired_ratio(self.ours.rates, self.theirs.rates)

    @property
    def predicted_ratio(self) -> float:
        return self.ours.prediction.images_per_second / self.theirs.prediction.images_per_second

    @property
    def wins(self) -> bool:
        return self.ratio.low > 1

    @property
    def images(self) -> int:
        return self.length.total * BATCH

    def describe(self) -> dict[str, Any]:
        """Everything that was measured, as demo.json has it."""
        sides = {side.name: side.describe() for side in (self.ours, self.theirs)}
        ratio = self.ratio
        figures = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "predicted": self.predicted_ratio}
        return {"machines": self.machines.title, "images": self.images, **figures, "sides": sides}


def run_demo(voice: Voice = SILENT, length: Length | None = None, *, loopback: bool = False) -> Demo:
    """Train both sides in turns; `loopback`: without network namespaces."""
    length = length or Length()
    with two_machines(loopback) as (machines, why), scratch_folder() as folder:
        voice.progress(machines.title + (f" ({why})" if why else ""))
        profile = take_profile(voice)
        setting = setting_on(profile, machines.link)
        theirs = predict(_data_parallel(setting, BATCH), setting)
        ours = best_stages(setting, BATCH)
        if ours.images_per_second < _CLEAR * theirs.images_per_second:  # a fast link: little to gain without lag
            ours = best_stages(setting, BATCH, Mode.STALE)
        rates = f"DDP {theirs.images_per_second:,.0f}, {ours.plan.shape} stages {ours.images_per_second:,.0f}"
        voice.progress(f"predicted images/s: {rates}; {length.total} steps of {BATCH} images each")
        sweep = predicted_ratios(profile, ours.plan.mode)
        found = _train(machines, {"DDP": theirs, "stages": ours}, length, folder, voice)
    return Demo(machines, why, length, found["stages"], found["DDP"], sweep)


# --- Predict ----------------------------------------------------------------------------------------------------------


def take_profile(voice: Voice) -> Profile:
    """How long the model's units take on this machine with both cores at work, and the link between processes."""
    voice.progress(f"profiling {MODEL}: two processes at once, one thread each")
    subject = Subject(MODEL, _PROFILED, ("fp32",), "cpu", together=_RANKS, image=SIDE, classes=CLASSES)
    return measure_profile(subject)


def setting_on(profile: Profile, link: Link | None) -> Setting:
    """Two machines with a link, or two processes of the machine that was profiled.

    The only side that sums gradients is stock PyTorch.
    """
    cluster = None if link is None else Cluster((Machine(1, "cpu"),) * _RANKS, "two machines", link)
    return make_setting(profile.over_gloo(), cluster, "fp32", optimizer=OPTIMIZER)


def _data_parallel(setting: Setting, batch: int) -> Plan:
    return make_plan((setting.cluster.devices,), batch=batch, microbatches=batch // _PROFILED[-1], mode=Mode.DP)


def best_stages(setting: Setting, batch: int, mode: Mode = Mode.SYNC) -> Prediction:
    """The fastest plan of two stages: one that makes the same updates as data parallel, or one with lag 1."""
    choice = choose(setting, batch, modes=(mode,), whole=True)
    for candidate in choice.candidates:
        if len(candidate.plan.stages) == _RANKS:
            return candidate.prediction
    placement = format_placement(tuple((device,) for device in setting.cluster.devices))
    given = {"placement": placement, "mode": str(mode), "batch": batch, "microbatches": batch // _PROFILED[-1]}
    options = make_config({"plan": given}).plan
    return predict(build_plan(options, setting.cluster, None, lambda placement: setting), setting)


def predicted_ratios(profile: Profile, mode: Mode) -> dict[tuple[str, int], float]:
    """The predicted ratio on faster networks and at larger batches."""
    found = {}
    for name in LINKS:
        setting = setting_on(profile, shipped().links[name])
        for batch in BATCHES:
            parallel = predict(_data_parallel(setting, batch), setting).images_per_second
            found[name, batch] = best_stages(setting, batch, mode).images_per_second / parallel
    return found


def simulated_win() -> str:
    """A case that would win, in one line, for a machine that can't show one."""
    model, cluster, batch = "vgg16", "titan-v-8", 224
    best = choose(make_setting(trace_model(model).shapes, shipped().cluster(cluster), "fp32"), batch).best
    return (
        f"By simulation, not measured here: {model} on {cluster} as {best.plan.mode} {best.plan.shape} has "
        f"{best.speedup:.2f} times the speed of data parallel (stagewright plan {model} --cluster {cluster} "
        f"--batch {batch})."
    )


# --- Train ------------------------------------------------------------------------------------------------------------


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for data and weights, removed at the end; those of runs that were killed are removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        owner = left.name.removeprefix(_SCRATCH).partition("-")[0]
        if left.lstat().st_uid == os.geteuid() and owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)  # a link is left alone
    with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder:
        yield Path(folder)


def _train(
    machines: Machines, predictions: dict[str, Prediction], length: Length, folder: Path, voice: Voice
) -> dict[str, Measured]:
    """Train both sides in turns; after each turn the weights of a side are evaluated."""
    images, labels = draw_digits(_TRAINING, seed=0)
    save_file({"images": images, "labels": labels}, folder / "data.safetensors")
    held_out = draw_digits(HELD_OUT, seed=1)
    voice.progress("starting two ranks of each side")
    with ExitStack() as stack:
        sides: dict[str, Ranks] = {}
        for name, one in predictions.items():
            job = _save_job(name, one.plan, machines, length.total, folder)
            sides[name] = stack.enter_context(Ranks(name, _RUNNERS[name], job, folder / name, machines.places))
        for ranks in sides.values():
            ranks.wait_ready()
            ranks.train(length.warm)
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for number in range(1, length.turns + 1):
            for name, ranks in sides.items():
                turns[name].append(_take_turn(ranks, machines, length.steps, folder / name, held_out))
            words = ", ".join(f"{name} {taken[-1]}" for name, taken in turns.items())
            voice.progress(f"turn {number} of {length.turns}: {words}")
    return {
        name: Measured(
            name=name,
            prediction=predictions[name],
            rates=tuple(turn.rate for turn in taken),
            seconds=tuple(accumulate(turn.segment.seconds for turn in taken)),
            accuracies=tuple(turn.accuracy for turn in taken),
            link_bytes=None if machines.link is None else fmean(turn.link_bytes for turn in taken),
            timeline=_last_turn(folder / name, taken[-1].segment.seconds),
            others=fmean(turn.segment.others for turn in taken),
        )
        for name, taken in turns.items()
    }


@dataclass(frozen=True, slots=True)
class Turn:
    """What a side did in one turn."""

    segment: Segment
    rate: float  # images per second
    link_bytes: float  # of a step
    accuracy: float

    def __str__(self) -> str:
        return f"{self.rate:,.0f} images/s, {self.accuracy:.1%}"


def _take_turn(ranks: Ranks, machines: Machines, steps: int, folder: Path, held_out: tuple[Tensor, Tensor]) -> Turn:
    """Train, time and evaluate a segment."""
    before = bytes_passed(machines, ranks.first_process) or 0
    segment = ranks.train(steps)
    passed = (bytes_passed(machines, ranks.first_process) or 0) - before
    ranks.call("save", str(folder))
    return Turn(segment, steps * BATCH / segment.seconds, passed / steps, _accuracy(folder, held_out))


def _save_job(name: str, plan: Plan, machines: Machines, steps: int, folder: Path) -> Path:
    """Write a side's job for its ranks; their folder is made by them."""
    planned, saved = folder / f"{name}-plan.json", folder / f"{name}.json"
    planned.write_text(json.dumps(plan.describe()))
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": MODEL},
        "data": {"source": f"tensors:{folder / 'data.safetensors'}", "shuffle": False},
        "plan": {"file": str(planned)},
        "optimizer": {"name": OPTIMIZER, "lr": LR},
        "schedule": {"kind": "cosine"},
        "run": {"threads": 1, "device": "cpu", "precision": "fp32", "steps": steps, "runs": str(folder / "runs")},
        "nodes": {} if machines.nodes is None else {"list": machines.nodes, "index": 0},
    }
    prepare(make_config(tables)).job.save(saved)
    return saved


def _accuracy(folder: Path, held_out: tuple[Tensor, Tensor]) -> float:
    """Of the weights that the ranks wrote, in the plain model."""
    model, (images, labels) = ZOO[MODEL].build(CLASSES).eval(), held_out
    model.load_state_dict(
        {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    )
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def _last_turn(folder: Path, seconds: float) -> Timeline:
    """The spans that the ranks wrote of the last turn, from its start."""
    spans = [Span(**entry) for path in sorted(folder.glob("*.json")) for entry in json.loads(path.read_text())]
    start = max((span.end for span in spans), default=0.0) - seconds
    return Timeline(tuple(replace(s, start=s.start - start, end=s.end - start) for s in spans if s.start >= start))
