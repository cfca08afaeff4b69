"""Plan a model for this machine, which is profiled first, and simulate a plan; both take a `Question`.

Further down: `find_plan`, what `--placement auto` comes to for `train`, `run`, `stagewright.train` and `Engine`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace

from stagewright.cluster.catalog import shipped
from stagewright.cluster.placement import format_placement
from stagewright.cluster.topology import Cluster, Device, Machine
from stagewright.config.modes import Mode
from stagewright.config.sections import AUTO, Config, PlanConfig
from stagewright.config.toml import make_config
from stagewright.errors import UserError, counted, first_line
from stagewright.hardware.devices import num_devices, with_devices
from stagewright.hardware.host import num_cores
from stagewright.metrics import format_rate
from stagewright.model.chain import Chain
from stagewright.plan.estimate import Setting
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Plan
from stagewright.planning import question as questions
from stagewright.planning.build import build_plan, resolved_options
from stagewright.planning.compare import Comparison, Interval, compare
from stagewright.planning.planner import Candidate, Choice, choose
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.question import Asked, Question, run_words, search
from stagewright.planning.run_setting import in_single
from stagewright.planning.setting import setting_of
from stagewright.planning.traced import chain_of_config, trace_config
from stagewright.run.profile import CORE_RATE, profile_here
from stagewright.voice import SILENT, Voice

_WORTH_PROFILING = 30.0  # seconds of work: a shorter run is over before a profile of it has paid
_GAIN = 1.05  # a lagging plan that is faster by less is not mentioned
_SIMULATED = ("cut", "shares", "batch", "microbatches", "staleness")  # what `simulate` may be given of a plan


def ask(question: Question, voice: Voice = SILENT) -> Asked:
    """A question with all that it leaves open filled in: where no cluster is named, by a profile of this machine."""
    if question.has_place:
        return questions.ask(question, trace_config(question.config, question.form))
    config = with_devices(question.config)
    model = trace_config(config, question.form)  # what is wrong with a model is said before it is profiled
    here = profile_here(config, voice, question.form)
    batch = config.plan.batch or here.profile.covered(config.run.precision)[1] * here.devices
    setting = setting_of(config, None, here.cluster, here.profile.reaching(batch), catalog=here.catalog)
    setting = replace(setting, cluster=replace(setting.cluster, name="this machine"), tied=model.tied)
    ranks = counted(len(setting.cluster.devices), "GPU" if here.device == "cuda" else "CPU rank")
    return Asked(
        question,
        setting,
        here.catalog or shipped(),
        batch,
        here.device,
        is_measured=True,
        profile=str(here.file),
        rate=model.rate,
        note=f"{ranks}, profile {here.file}",
        threads=here.threads,
    )


def simulate(question: Question, voice: Voice = SILENT, *, draws: bool = False) -> tuple[Prediction, Asked]:
    """What the plan of a question would do in its setting."""
    config = question.config
    asked = questions.ask(question, trace_config(config, question.form))
    chain = None if asked.setting.tied is None else chain_of_config(config, question.form)  # else it has own units
    return predict(_simulated(question, chain, asked.setting, voice), asked.setting, draws=draws), asked


def _simulated(question: Question, chain: Chain | None, setting: Setting, voice: Voice) -> Plan:
    """The plan of a plan file or of the options: on all devices by default; mode stale if there are several stages."""
    options = question.config.plan
    if options.file:
        return build_plan(PlanConfig(file=options.file), setting.cluster, chain, voice=voice)
    everywhere = format_placement((setting.cluster.devices,))
    placement = everywhere if options.placement == AUTO else options.placement
    mode = options.mode or (Mode.STALE if "." in placement else Mode.DP)
    if options.batch is None:
        raise UserError("no batch: give --batch, the samples per update")
    given = {name: value for name in _SIMULATED if (value := getattr(options, name)) is not None}
    return build_plan(
        make_config({"plan": given | {"placement": placement, "mode": mode}}).plan,
        setting.cluster,
        chain,
        lambda placement: setting,
        one_each=setting.software.whole_batches,
        voice=voice,
    )


# --- What --placement auto comes to -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Searched:
    """The candidates on this machine, and the fastest plan whose weights lag, where none was asked for."""

    asked: Asked
    choice: Choice
    comparison: Comparison
    lagging: Candidate | None = None


@dataclass(frozen=True, slots=True)
class AutoPlan:
    """A plan that was chosen for this machine, how many threads its ranks have, and why it was chosen."""

    plan: Plan
    device: str
    precision: str
    threads: int
    why: str
    searched: Searched | None = None

    @property
    def prediction(self) -> Prediction | None:
        return None if self.searched is None else self.searched.choice.best.prediction

    @property
    def interval(self) -> Interval | None:
        if self.searched is None:
            return None
        candidates = self.searched.choice.candidates
        return self.searched.comparison.intervals[candidates.index(self.searched.choice.best)]


def find_plan(
    question: Question, units: Collection[str], steps: int | None, voice: Voice = SILENT, *, always: bool = False
) -> AutoPlan:
    """The fastest plan for this machine, of a configuration whose device, precision and batch are resolved.

    `units`: of the model as it will be cut; plans with other cuts are discarded. `steps`: batches to train, if known: a
    run of seconds on a CPU is not worth a profile, unless `always`. Where no profile can be made: data parallel on all
    GPUs, or one process on a CPU.
    """
    config = question.config
    run = config.run
    if run.emulate:
        return _unmeasured(config, 1, 1, "emulated ranks take turns, so more of them are not faster")
    if num_devices(run.device) == 1 or _own_ranks(config) == 1:
        kind = "GPU" if run.device == "cuda" else "core"
        why = f"this machine has one {kind}" if run.threads is None else f"--threads {run.threads} takes its cores"
        return _unmeasured(config, 1, run.threads or 1, why)
    question = replace(question, form=None if question.form is None else in_single(question.form))
    try:
        seconds = _guessed_seconds(question, steps)
        if run.device == "cpu" and not always and seconds is not None and seconds < _WORTH_PROFILING:
            about = f"about {max(1, round(seconds))} s of training"
            why = f"{about} is too short to profile first (--explain profiles anyway)"
            return _unmeasured(config, 1, run.threads or 1, why)
        return _searched(question, units, voice)
    except UserError as error:
        if always:
            raise
        why = f"not profiled: {first_line(error, 200)}"
        if run.device == "cuda":
            return _unmeasured(config, num_devices("cuda"), 1, why)
        return _unmeasured(config, 1, run.threads or num_cores(), why)


def one_device(config: Config, why: str) -> AutoPlan:
    """The plan of a model that can't be trained by more than one rank."""
    return _unmeasured(config, 1, config.run.threads or num_cores(), why)


def _own_ranks(config: Config) -> int:
    """Ranks of a CPU with the threads that were asked for."""
    asked = config.run.threads
    return 2 if config.run.device == "cuda" or asked is None else max(1, num_cores() // asked)


def _guessed_seconds(question: Question, steps: int | None) -> float | None:
    """How long a run would take on one core, by its operations; None where it has no end."""
    batch = question.config.plan.batch
    if steps is None or batch is None:
        return None
    shapes = trace_config(question.config, question.form).shapes
    return 3 * sum(shape.operations for shape in shapes) * batch * steps / CORE_RATE


def _unmeasured(config: Config, ranks: int, threads: int, why: str) -> AutoPlan:
    """Data parallel on the first ranks."""
    devices = tuple(Device(0, index) for index in range(ranks))
    batch = config.plan.batch
    assert batch is not None
    plan = make_plan((devices,), batch=batch, microbatches=config.plan.microbatches, mode=Mode.DP)
    threads = threads if config.run.device == "cpu" else 1
    return AutoPlan(plan, config.run.device, config.run.precision, threads, why)


def _searched(question: Question, units: Collection[str], voice: Voice) -> AutoPlan:
    """The best plan by a search in a short profile of this machine: without lag, unless the options ask for some."""
    config, given = question.config, question.config.plan.mode
    lags = config.plan.staleness is not None or config.optimizer.predict
    mode = given or (Mode.STALE if lags else Mode.SYNC)
    modes = {Mode.DP: (), Mode.STALE: (Mode.STALE, Mode.SYNC)}.get(mode, (mode,))
    asked = ask(replace(question, modes=modes), replace(voice, progress=SILENT.progress))
    choice = _cuttable(search(asked, modes=modes), units)
    threads = {id(candidate): asked.threads for candidate in choice.candidates}
    if asked.device == "cpu" and config.run.threads is None and mode.preset.is_per_batch:
        alone = _alone(asked, choice)
        staying = tuple(one for one in choice.candidates if one.plan.world > 1)
        ordered = sorted((*staying, alone), key=lambda one: -one.prediction.images_per_second)
        choice, threads[id(alone)] = replace(choice, candidates=tuple(ordered)), num_cores()
    comparison = compare(choice, asked.setting, asked.catalog, measured=asked.is_measured)
    lagging = None
    if given is None and not lags:
        found = _cuttable(search(asked, modes=(Mode.STALE,)), units).best
        if found.prediction.images_per_second > _GAIN * choice.best.prediction.images_per_second:
            lagging = found
    searched = Searched(asked, choice, comparison, lagging)
    best = choice.best
    return AutoPlan(best.plan, asked.device, config.run.precision, threads[id(best)], _reason(searched), searched)


def _cuttable(choice: Choice, units: Collection[str]) -> Choice:
    """The choice without plans that cut the model where it can't be cut; plain data parallel always stays."""
    kept = tuple(one for one in choice.candidates if set(one.plan.cuts) <= set(units))
    return choice if len(kept) == len(choice.candidates) else replace(choice, candidates=kept, lags=())


def _alone(asked: Asked, choice: Choice) -> Candidate:
    """One process with all cores of a CPU, as a candidate beside those of several ranks."""
    config = asked.question.config
    here = profile_here(config, form=asked.question.form, is_alone=True)
    where = Cluster((Machine(1, "cpu"),), "one process")
    setting = replace(setting_of(config, None, where, here.profile.reaching(asked.batch)), tied=asked.setting.tied)
    best = choose(setting, asked.batch, modes=(), microbatches=config.plan.microbatches).best.prediction
    plain = [one for one in choice.candidates if one.plan.mode is Mode.DP and one.plan.world > 1]
    speedup = best.images_per_second / plain[0].prediction.images_per_second if plain else math.nan
    return Candidate(best, speedup, f"one process with {counted(num_cores(), 'thread')}")


def _reason(searched: Searched) -> str:
    """Why the best candidate was chosen: what the next best kind of plan would reach."""
    choice, asked = searched.choice, searched.asked
    best = choice.best

    def kind(candidate: Candidate) -> tuple[bool, bool]:
        return candidate.plan.world == 1, len(candidate.plan.stages) > 1

    others = [one for one in choice.candidates if kind(one) != kind(best)]
    others.sort(key=lambda one: len(one.plan.stages))  # the plain ones first, each kind by its speed
    words = []
    for one in others[:1]:
        what, speed = _plan_words(one.plan, asked.device), format_rate(one.prediction.images_per_second)
        words.append(f"{what} would reach {speed} {asked.rate}")
    if searched.lagging is not None:
        plan, speed = searched.lagging.plan, format_rate(searched.lagging.prediction.images_per_second)
        words.append(f"--mode stale {speed} {asked.rate} with weights {counted(plan.lag, 'update')} behind")
    return ", ".join(words) or "nothing else fits"


def _plan_words(plan: Plan, device: str) -> str:
    """A plan in a few words: `dp on 2 CPU ranks`."""
    if plan.world == 1:
        return "one GPU" if device == "cuda" else "one process"
    kind = "GPUs" if device == "cuda" else "CPU ranks"
    return f"{plan.mode}{'' if len(plan.stages) == 1 else f' {plan.shape}'} on {plan.world} {kind}"


def auto_plan_lines(auto: AutoPlan) -> tuple[str, ...]:
    """What was chosen, why, and the options that ask for the same, a line each."""
    plan, device = auto.plan, auto.device
    what = _plan_words(plan, device)
    if device == "cpu" and auto.threads > 1:
        what += f", {counted(auto.threads, 'thread')}{' each' if plan.world > 1 else ''}"
    cuts = f", cut before {', '.join(plan.cuts)}" if plan.cuts else ""
    own = Config(plan=resolved_options(PlanConfig(), plan))
    keep = f"  to keep it: {shlex.join(run_words(own, device, auto.precision, auto.threads))}"
    if auto.searched is None or auto.interval is None or auto.prediction is None:
        return f"placement auto: {what}; {auto.why}", keep
    speed = f"{format_rate(auto.prediction.images_per_second)} {auto.searched.asked.rate}"
    about = f"{speed} predicted ({auto.interval}, {auto.searched.comparison.evidence})"
    return f"placement auto: {what}{cuts}: {about}", f"  instead: {auto.why}", keep
