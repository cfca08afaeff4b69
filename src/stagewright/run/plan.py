"""Plan a model for a cluster or for this machine: the setting that options describe, a search in it, and a simulation.

The options are those of `stagewright plan`, `value` and `simulate`, as their commands and `stagewright.plan` and
`simulate` have them. `form` is what a model takes, where that is neither the zoo's input nor an image.

Further down: `find_plan`, what `--placement auto` comes to for `train`, `run`, `stagewright.train` and `Engine`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from stagewright.cluster.catalog import open_cluster, shipped
from stagewright.cluster.placement import format_placement
from stagewright.cluster.specs import Catalog
from stagewright.cluster.topology import Cluster, Device, Machine
from stagewright.config.sections import AUTO, Config, PlanConfig
from stagewright.config.toml import make_config
from stagewright.errors import UserError, counted, first_line
from stagewright.hardware.devices import default_device, default_precision, num_devices
from stagewright.hardware.host import num_cores
from stagewright.metrics import format_rate
from stagewright.model.call import Form
from stagewright.model.chain import Chain
from stagewright.plan.estimate import Setting
from stagewright.plan.make import make_plan, require_divisible
from stagewright.plan.plan import Mode, Plan
from stagewright.planning.build import Warn, build_plan
from stagewright.planning.compare import Comparison, Interval, compare
from stagewright.planning.planner import Candidate, Choice, choose
from stagewright.planning.predict import Prediction, predict
from stagewright.planning.setting import in_single, make_setting
from stagewright.planning.traced import TracedModel, form_of, rate_of, trace_model
from stagewright.profile.profile import Profile, read_profile
from stagewright.profile.shapes import Shape
from stagewright.run.profile import CORE_RATE, Subject, profile_here
from stagewright.voice import Voice

Progress = Callable[[str], None]
USUAL_SAMPLES = 32  # of a batch, a device
_WORTH_PROFILING = 30.0  # seconds of work: a shorter run is over before a profile of it has paid
_GAIN = 1.05  # a lagging plan that is faster by less is not mentioned


@dataclass(frozen=True)
class Asked:
    """What is asked about, with everything that the options leave out filled in."""

    setting: Setting
    catalog: Catalog
    batch: int
    device: str  # to train on
    is_measured: bool  # by a profile of the machine itself
    profile: str | None  # file
    note: str = ""  # how what was left out was filled in
    threads: int = 1  # of each rank on a CPU


def ask(options: Any, progress: Progress, form: Form | None = None, announce: Progress | None = None) -> Asked:
    """The setting and the batch to search plans for: of a cluster, of a profile, or of this machine, profiled once.

    `announce`: is told instead of `progress` that a profile is made.
    """
    if options.microbatches is not None and options.batch is not None:
        require_divisible(options.batch, options.microbatches)
    if options.cluster is None and options.profile is None:
        device = getattr(options, "device", None) or default_device()
        precision = default_precision(device) if options.precision == AUTO else options.precision
        options = SimpleNamespace(**(vars(options) | {"device": device, "precision": precision}))
        # What is wrong with a model is said before it is profiled.
        model = trace_model(options.model, options.classes, options.image, form, options.freeze)
        here = profile_here(options.model, Subject.of(options), progress, form, announce=announce)
        batch = options.batch or here.profile.covered(options.precision)[1] * here.devices
        setting = make_setting(
            here.profile.reaching(batch),
            here.cluster,
            options.precision,
            optimizer=options.optimizer,
            is_averaged=options.ema is not None,
            catalog=here.catalog,
            tied=model.tied,
        )
        setting = replace(setting, cluster=replace(setting.cluster, name="this machine"))
        catalog = here.catalog or shipped()
        ranks = counted(len(setting.cluster.devices), "GPU" if here.device == "cuda" else "CPU rank")
        note = f"{ranks}, profile {here.file}"
        return Asked(setting, catalog, batch, here.device, True, str(here.file), note, here.threads)
    catalog, setting = read_setting(options, options.cluster, form)[1:]
    batch = options.batch or _suitable_batch(setting)
    kinds = {machine.kind for machine in setting.cluster.machines}
    is_measured = options.profile is not None and options.cluster is None
    return Asked(setting, catalog, batch, "cpu" if kinds == {"cpu"} else "cuda", is_measured, options.profile)


def is_for_train(options: Any, asked: Asked) -> bool:
    """Whether `train` would choose from the plans of these options: on GPUs of one machine; on CPUs it tries more."""
    has_modes = not options.mode or "sync" in options.mode
    return has_modes and asked.device == "cuda" and len(asked.setting.cluster.machines) == 1


def search(options: Any, asked: Asked, progress: Progress, modes: Sequence[str] | None = None) -> Choice:
    """The best plans in the setting that is asked about; `modes` beside dp, instead of those of the options.

    Of the options' modes the best plan without lag is among them where `train` would choose it.
    """
    tried = options.mode or ("stale", "sync") if modes is None else modes
    return choose(
        asked.setting,
        asked.batch,
        modes=tuple(Mode(mode) for mode in tried),
        microbatches=options.microbatches,
        staleness=options.staleness,
        synchronous=modes is None and is_for_train(options, asked),
        voice=Voice(progress=progress),
    )


def simulate(
    options: Any, warn: Warn, form: Form | None = None, *, draws: bool = False
) -> tuple[Prediction, Catalog, Setting]:
    """What the plan of the options would do in their setting."""
    model, catalog, setting = read_setting(options, options.cluster, form)
    plan = _asked_plan(options, None if model is None else model.chain, setting, warn)
    return predict(plan, setting, draws=draws), catalog, setting


def _asked_plan(options: Any, chain: Chain | None, setting: Setting, warn: Warn) -> Plan:
    """The plan of a plan file or of the options: on all devices by default; mode stale if there are several stages."""
    if options.plan:
        return build_plan(PlanConfig(file=options.plan), setting.cluster, chain, warn=warn)
    everywhere = format_placement((setting.cluster.devices,))
    placement = everywhere if options.placement is None else options.placement
    mode = options.mode or ("stale" if "." in placement else "dp")
    if options.batch is None and options.microbatch is None:
        raise UserError("give either --batch (samples per update) or --microbatch (samples per microbatch)")
    given = {name: getattr(options, name) for name in ("cut", "shares", "batch", "microbatches", "staleness")}
    given = {name: value for name, value in given.items() if value is not None}
    return build_plan(
        make_config({"plan": given | {"placement": placement, "mode": mode}}).plan,
        setting.cluster,
        chain,
        lambda placement: setting,
        microbatch=options.microbatch,
        one_each=setting.software.whole_batches,
        warn=warn,
    )


def _suitable_batch(setting: Setting) -> int:
    """Thirty-two samples a device, or as many as a profile covers."""
    devices = len(setting.cluster.devices)
    most = USUAL_SAMPLES if setting.covered is None else min(USUAL_SAMPLES, setting.covered[1])
    return most * devices


def read_setting(
    options: Any, cluster: str | None, form: Form | None = None
) -> tuple[TracedModel | None, Catalog, Setting]:
    """The model, the catalog, and the setting that the options describe.

    There is no model where the profile has its own names for its units.
    """
    model = trace_model(options.model, options.classes, options.image, form, options.freeze)
    if cluster is None and options.profile is None:
        raise UserError(f"no cluster: give --cluster NAME ({', '.join(sorted(shipped().clusters))}) or --profile FILE")
    catalog, where = open_cluster(cluster) if cluster is not None else (shipped(), None)
    if where is not None and options.devices is not None:
        where = where.first(options.devices)
    traced: TracedModel | None = model
    units: Sequence[Shape] | Profile = model.shapes
    default = "fp32"  # or what the profile has
    if options.profile is not None:
        units = read_profile(options.profile)
        own = dict.fromkeys(table.precision for table in units.tables)
        default = default if default in own else next(iter(own))
        if units.is_imported:
            _require_own_names(options, units)
            traced = None
        else:
            units.require(options.model, model.chain.units)
    return (
        traced,
        catalog,
        make_setting(
            units,
            where,
            default if options.precision == AUTO else options.precision,
            optimizer=options.optimizer,
            is_averaged=options.ema is not None,
            catalog=catalog,
            software=options.software,
            loads=options.data != "synthetic",
            tied=None if traced is None else traced.tied,
        ),
    )


def _require_own_names(options: Any, profile: Profile) -> None:
    """Raise for options with units of the model: an imported profile has its own names for units."""
    if profile.model != options.model:
        raise UserError(
            f"the profile was imported as {profile.model} but the model is {options.model}; "
            f"import one with stagewright profile {options.model} --pipedream FILE"
        )
    for name in ("shares", "cut", "plan", "output"):
        if (value := getattr(options, name, None)) is not None:
            raise UserError(
                f"--{name} {value} needs the units of {options.model} but the imported profile has PipeDream's nodes; "
                "leave it out"
            )


# --- What --placement auto comes to -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Searched:
    """The candidates on this machine, and the fastest plan whose weights lag, where none was asked for."""

    options: Any
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
    config: Config, form: Form, units: Collection[str], steps: int | None, announce: Progress, *, always: bool = False
) -> AutoPlan:
    """The fastest plan for this machine, of a configuration whose device, precision and batch are resolved.

    `units`: of the model as it will be cut; plans with other cuts are discarded. `steps`: batches to train, if known: a
    run of seconds on a CPU is not worth a profile, unless `always`. Where no profile can be made: data parallel on all
    GPUs, or one process on a CPU.
    """
    run = config.run
    if run.emulate:
        return _unmeasured(config, 1, 1, "emulated ranks take turns, so more of them are not faster")
    if num_devices(run.device) == 1 or _own_ranks(config) == 1:
        kind = "GPU" if run.device == "cuda" else "core"
        why = f"this machine has one {kind}" if run.threads is None else f"--threads {run.threads} takes its cores"
        return _unmeasured(config, 1, run.threads or 1, why)
    form = in_single(form)
    try:
        seconds = _guessed_seconds(config, form, steps)
        if run.device == "cpu" and not always and seconds is not None and seconds < _WORTH_PROFILING:
            about = f"about {max(1, round(seconds))} s of training"
            why = f"{about} is too short to profile first (--explain profiles anyway)"
            return _unmeasured(config, 1, run.threads or 1, why)
        return _searched(config, form, units, announce)
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


def _guessed_seconds(config: Config, form: Form, steps: int | None) -> float | None:
    """How long a run would take on one core, by its operations; None where it has no end."""
    if steps is None or config.plan.batch is None:
        return None
    traced = trace_model(config.model.name, config.model.classes, config.data.image, form, config.model.freeze)
    operations = 3 * sum(shape.operations for shape in traced.shapes) * config.plan.batch * steps
    return operations / CORE_RATE


def _unmeasured(config: Config, ranks: int, threads: int, why: str) -> AutoPlan:
    """Data parallel on the first ranks."""
    devices = tuple(Device(0, index) for index in range(ranks))
    batch = config.plan.batch
    assert batch is not None
    plan = make_plan((devices,), batch=batch, microbatches=config.plan.microbatches, mode=Mode.DP)
    threads = threads if config.run.device == "cpu" else 1
    return AutoPlan(plan, config.run.device, config.run.precision, threads, why)


def _searched(config: Config, form: Form, units: Collection[str], announce: Progress) -> AutoPlan:
    """The best plan by a search in a short profile of this machine."""
    options = _search_options(config)
    known = None if form == form_of(config.model.name, config.data.image) else form
    asked = ask(options, _quiet, known, announce)
    choice = _cuttable(search(options, asked, _quiet, options.mode), units)
    threads = {id(candidate): asked.threads for candidate in choice.candidates}
    if asked.device == "cpu" and config.run.threads is None and options.mode != ("pipedream",):
        alone = _alone(options, asked, choice, known)
        staying = tuple(one for one in choice.candidates if one.plan.world > 1)
        ordered = sorted((*staying, alone), key=lambda one: -one.prediction.images_per_second)
        choice, threads[id(alone)] = replace(choice, candidates=tuple(ordered)), num_cores()
    comparison = compare(choice, asked.setting, asked.catalog, measured=asked.is_measured)
    lagging = None
    if config.plan.mode is None and options.mode == ("sync",):
        found = _cuttable(search(options, asked, _quiet, ("stale",)), units).best
        if found.prediction.images_per_second > _GAIN * choice.best.prediction.images_per_second:
            lagging = found
    searched = Searched(options, asked, choice, comparison, lagging)
    best = choice.best
    return AutoPlan(best.plan, asked.device, options.precision, threads[id(best)], _reason(searched), searched)


def _search_options(config: Config) -> SimpleNamespace:
    """The options of `stagewright plan` that a configuration stands for: without lag, unless it asks for some."""
    lags = config.plan.staleness is not None or config.optimizer.predict
    mode = config.plan.mode or ("stale" if lags else "sync")
    return SimpleNamespace(
        model=config.model.name,
        classes=config.model.classes,
        image=config.data.image,
        freeze=config.model.freeze,
        device=config.run.device,
        threads=config.run.threads,
        precision=config.run.precision,
        optimizer=config.optimizer.name,
        ema=config.optimizer.ema,
        batch=config.plan.batch,
        microbatches=config.plan.microbatches,
        staleness=config.plan.staleness if mode == "stale" else None,
        mode={"dp": (), "stale": ("stale", "sync")}.get(mode, (mode,)),
        profile=config.plan.profile,
        cluster=None,
        devices=None,
        software="stagewright",
        data="synthetic",
        output=None,
        lr=None,
    )


def _cuttable(choice: Choice, units: Collection[str]) -> Choice:
    """The choice without plans that cut the model where it can't be cut; plain data parallel always stays."""
    kept = tuple(one for one in choice.candidates if set(one.plan.cuts) <= set(units))
    return choice if len(kept) == len(choice.candidates) else replace(choice, candidates=kept, lags=())


def _alone(options: Any, asked: Asked, choice: Choice, form: Form | None) -> Candidate:
    """One process with all cores of a CPU, as a candidate beside those of several ranks."""
    here = profile_here(options.model, Subject.of(options), _quiet, form, is_alone=True)
    setting = make_setting(
        here.profile.reaching(asked.batch),
        Cluster((Machine(1, "cpu"),), "one process"),
        options.precision,
        optimizer=options.optimizer,
        is_averaged=options.ema is not None,
        tied=asked.setting.tied,
    )
    best = choose(setting, asked.batch, modes=(), microbatches=options.microbatches).best.prediction
    plain = [one for one in choice.candidates if one.plan.mode is Mode.DP and one.plan.world > 1]
    speedup = best.images_per_second / plain[0].prediction.images_per_second if plain else math.nan
    return Candidate(best, speedup, f"one process with {counted(num_cores(), 'thread')}")


def _quiet(text: str) -> None:
    """Progress that nobody sees."""


def _reason(searched: Searched) -> str:
    """Why the best candidate was chosen: what the next best kind of plan would reach."""
    choice, unit = searched.choice, rate_of(searched.options.model)
    best = choice.best

    def kind(candidate: Candidate) -> tuple[bool, bool]:
        return candidate.plan.world == 1, len(candidate.plan.stages) > 1

    others = [one for one in choice.candidates if kind(one) != kind(best)]
    others.sort(key=lambda one: len(one.plan.stages))  # the plain ones first, each kind by its speed
    words = []
    for one in others[:1]:
        what, rate = _plan_words(one.plan, searched.asked.device), one.prediction.images_per_second
        words.append(f"{what} would reach {format_rate(rate)} {unit}")
    if searched.lagging is not None:
        plan, rate = searched.lagging.plan, searched.lagging.prediction.images_per_second
        lag = max(stage.versions for stage in plan.stages) - 1
        words.append(f"--mode stale {format_rate(rate)} {unit} with weights {counted(lag, 'update')} behind")
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
    keep = f"  to keep it: {shlex.join(plan_options(plan, device, auto.precision, auto.threads))}"
    if auto.searched is None or auto.interval is None or auto.prediction is None:
        return f"placement auto: {what}; {auto.why}", keep
    evidence, unit = auto.searched.comparison.evidence, rate_of(auto.searched.options.model)
    rate = f"{format_rate(auto.prediction.images_per_second)} {unit} predicted ({auto.interval}, {evidence})"
    return f"placement auto: {what}{cuts}: {rate}", f"  instead: {auto.why}", keep


def plan_options(plan: Plan, device: str, precision: str, threads: int = 1) -> list[str]:
    """The options of `train` that ask for a plan on this device."""
    words = ["--device", device, "--precision", precision, "--mode", str(plan.mode)]
    words += ["--placement", format_placement(plan.placement), "--batch", str(plan.batch)]
    words += ["--microbatches", str(plan.microbatches)]
    if len(plan.stages) > 1:
        words += ["--cut", ",".join(plan.cuts), "--depths", ",".join(str(stage.depth) for stage in plan.stages)]
    if plan.mode is Mode.STALE:
        words += ["--versions", ",".join(str(stage.versions) for stage in plan.stages)]
    return words + (["--threads", str(threads)] if device == "cpu" and threads > 1 else [])
