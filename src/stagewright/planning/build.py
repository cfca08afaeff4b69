"""From options to a plan: `build_plan` is the only way, for every command and the Python interface.

In this order: the placement, the batch and its microbatches, the cuts, the plan itself, its lag, and warnings about
idle ranks. Every default (cuts, microbatches, lag, depths) is chosen here. A plan file has them all and is only read.
`with_agreement` and `warn_about_lag` are for plans that are trained. Imports no torch: the caller traces the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from stagewright.cluster.placement import Placement, format_placement, parse_placement
from stagewright.cluster.topology import Cluster
from stagewright.config.optimizers import has_stable_rate
from stagewright.config.sections import AUTO, DEFAULT_BATCH, Config, PlanConfig
from stagewright.errors import UserError, counted
from stagewright.files import read_text
from stagewright.plan.estimate import Setting
from stagewright.plan.make import (
    MOST_MICROBATCHES,
    as_one_stage,
    default_microbatches,
    divisors,
    make_plan,
    read_plan,
    require_divisible,
    with_ties,
)
from stagewright.plan.plan import Mode, Plan, TiedParameter
from stagewright.plan.search import best_cuts
from stagewright.plan.stability import Motion, stability_warning
from stagewright.planning.climb import bubble_in, every_lag, least_lag
from stagewright.planning.simulate import Costs, steady
from stagewright.profile.profile import NotProfiled
from stagewright.voice import SILENT, Voice

if TYPE_CHECKING:
    from stagewright.model.chain import Chain  # imports torch

BUBBLE_GOAL = 0.05
_MOST_TRIALS = 8
FIRST_DEVICE = "0:0"
Bubble = Callable[[Plan], float]  # the share of time that a plan's ranks wait
SettingOf = Callable[[Placement], Setting | None]  # None: the model's shapes can't be traced


def build_plan(
    options: PlanConfig,
    cluster: Cluster,
    chain: Chain | None = None,
    setting: SettingOf = lambda placement: None,
    *,
    costs: Callable[[Plan], Costs] | None = None,
    one_each: bool = False,
    never_waits: bool = False,
    voice: Voice = SILENT,
) -> Plan:
    """The plan of a plan file, or the one that the options describe, on the machines of a cluster.

    Cuts and a lag that the options leave open are chosen in the setting, which is asked for only then. Without one the
    model is divided by operations, and the lag is chosen by `costs` or, without these either, the largest.
    `chain` is the model's; None where there is no model, or where the setting has its own names for units.
    `one_each`: a batch has one microbatch per replica of
    the widest stage, if it can be divided so. `never_waits`: ranks never wait, so no warning says how long they would.
    """
    if options.file is not None:
        plan = _read_file(options, cluster, chain)
    else:
        mode, placement = _mode_and_placement(options, cluster)
        batch, microbatches = _sizes(options, [len(devices) for devices in placement], one_each)
        setting = cache(setting)
        plan = make_plan(
            placement,
            batch=batch,
            microbatches=microbatches,
            mode=mode,
            staleness=options.staleness,
            versions=stage_numbers(options.versions, "versions", ",") if mode.preset.has_staleness else None,
            depths=stage_numbers(options.depths, "depths", ","),
            cuts=(cuts := _cuts(options, mode, placement, chain, setting, batch, microbatches)),
            tied=[] if chain is None else [TiedParameter(*tied) for tied in chain.tied(cuts)],
        )
        if options.policy == "gpipe":
            stages = (replace(stage, depth=-(-microbatches // stage.replicas)) for stage in plan.stages)
            plan = replace(plan, stages=tuple(stages))  # all forwards of a batch before its first backward
        if mode.preset.has_staleness and (options.staleness, options.versions) == (None, None) and len(plan.stages) > 1:
            bubble_of = _bubble(plan, setting(placement), costs)
            plan = plan if bubble_of is None else least_lag(plan, bubble_of)
            if bubble_of is not None and not one_each and not never_waits:
                warn_about_waiting(plan, bubble_of, voice)
    if warning := idle_warning(plan):
        voice.warn(warning)
    return plan


def _mode_and_placement(options: PlanConfig, cluster: Cluster) -> tuple[Mode, Placement]:
    """The devices of each stage, the first one where nobody has chosen; and the mode: of one stage without lag, dp."""
    text = FIRST_DEVICE if options.placement == AUTO else options.placement
    placement, mode = parse_placement(text, cluster), Mode(options.mode or Mode.STALE)
    is_lagging = not mode.preset.is_per_batch or stage_numbers(options.versions, "versions", ",") not in (None, [1])
    if not mode.preset.has_stages or (len(placement) == 1 and not is_lagging):
        return Mode.DP, as_one_stage(placement)
    return mode, placement


# --- Plan files -------------------------------------------------------------------------------------------------------


def _read_file(options: PlanConfig, cluster: Cluster, chain: Chain | None) -> Plan:
    """The plan of a plan file, with its cuts as units of the model."""
    file = str(options.file)
    try:
        plan = read_plan(read_text(file), file, cluster)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"plan {file}: {reason}; give a file that stagewright plan -o wrote") from error
    if chain is None:
        return plan
    try:
        cuts = chain.by_names(plan.cuts)
    except UserError as error:
        raise UserError(f"plan {file} is of another model: {error}") from error
    bounds = [0, *map(chain.units.index, cuts)]
    if len(bounds) != len(plan.stages) or bounds != sorted(set(bounds)):
        raise UserError(
            f"plan {file} has {len(plan.stages)} stages, but its cuts ({', '.join(plan.cuts) or 'none'}) divide this "
            "model otherwise; make a plan for it again: stagewright plan MODEL -o FILE"
        )
    tied = [TiedParameter(*tied) for tied in chain.tied(cuts)]
    return with_ties(replace(plan, cuts=cuts), tied, are_given=True)


def resolved_options(options: PlanConfig, plan: Plan) -> PlanConfig:
    """The options that stand for a plan file, as config.toml and checkpoints hold them, so that they need no file."""
    return replace(
        options,
        file=None,
        placement=format_placement(plan.placement),
        cut=",".join(plan.cuts) or None,
        mode=plan.mode,
        versions=",".join(str(stage.versions) for stage in plan.stages) if plan.mode.preset.has_staleness else None,
        depths=",".join(str(stage.depth) for stage in plan.stages) if plan.cuts else None,
        batch=plan.batch,
        microbatches=plan.microbatches,
    )


# --- Sizes, cuts and lag ----------------------------------------------------------------------------------------------


def stage_numbers(text: str | None, name: str, separator: str) -> list[int] | None:
    """The integers of an option that has one per stage."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(separator)]
    except ValueError:
        kind = "comma-separated" if separator == "," else f"'{separator}'-separated"
        raise UserError(f"--{name} must be {kind} integers such as 3{separator}1, got '{text}'") from None


def _sizes(options: PlanConfig, replicas: Sequence[int], one_each: bool) -> tuple[int, int]:
    """The samples of a batch, and its microbatches."""
    batch, count = options.batch or DEFAULT_BATCH, options.microbatches
    if count is None:
        widest = max(replicas)
        count = widest if one_each and batch % widest == 0 else default_microbatches(batch, replicas)
    require_divisible(batch, count)
    return batch, count


def _cuts(
    options: PlanConfig,
    mode: Mode,
    placement: Placement,
    chain: Chain | None,
    setting: SettingOf,
    batch: int,
    microbatches: int,
) -> tuple[str, ...]:
    """The first unit of each later stage: by --cut, by --shares, or those that make the slowest stage fastest.

    A model whose shapes can't be traced is divided by operations, in proportion to the stages' replicas.
    """
    if options.mode is Mode.DP:
        return ()
    if chain is not None and (given := _given_cuts(chain, len(placement), options.cut, options.shares)) is not None:
        return given
    if len(placement) == 1:
        return ()
    found = setting(placement)
    if found is not None:
        cuts = best_cuts(found, placement, mode, batch, microbatches)
        if chain is None or set(cuts) <= set(chain.units):
            return cuts
    return () if chain is None else chain.by_shares([len(devices) for devices in placement])


def _given_cuts(chain: Chain, stages: int, cut: str | None, shares: str | None) -> tuple[str, ...] | None:
    """The first unit of each later stage, by --cut or --shares; None where neither is given."""
    if cut is not None:
        names = [name.strip() for name in cut.split(",")]
        if len(names) != stages - 1:
            raise UserError(
                f"--cut {cut} makes {len(names) + 1} stages but the placement has {stages}; "
                "name the first unit of each later stage"
            )
        return chain.by_names(names)
    numbers = stage_numbers(shares, "shares", ":")
    if numbers is not None and len(numbers) != stages:
        raise UserError(
            f"--shares {shares} names {len(numbers)} stages but the placement has {stages}; give one number per stage"
        )
    return None if numbers is None else chain.by_shares(numbers)


def _bubble(plan: Plan, setting: Setting | None, costs: Callable[[Plan], Costs] | None) -> Bubble | None:
    """How to compute the bubble: in the setting, or by the costs where it does not have the plan's units."""
    if setting is not None:
        kind = setting.cluster.kind_of(plan.devices[0])
        if set(plan.cuts) <= {unit.name for unit in setting.tables(kind, plan.samples).units}:
            return bubble_in(setting)
    return None if costs is None else cache(lambda plan: steady(plan, costs(plan)).bubble)


# --- Plans that are trained -------------------------------------------------------------------------------------------


def with_agreement(config: Config, plan: Plan) -> Plan:
    """The plan with what stages exchange before an update: norms to clip by, and overflow flags of fp16."""
    scaled = config.run.precision == "fp16"
    if scaled and not plan.mode.preset.is_per_batch:
        known = ", ".join(Mode.where(lambda preset: preset.is_per_batch))
        raise UserError(f"precision fp16 supports modes {known}, but the mode is {plan.mode}; use bf16")
    if scaled and plan.microbatches < plan.widest:
        raise UserError(
            f"precision fp16 needs a microbatch for each of the {plan.widest} replicas, but a batch has "
            f"{plan.microbatches}; raise --microbatches"
        )
    if len(plan.stages) == 1:
        return plan
    clip = config.optimizer.clip is not None
    if plan.ties and scaled and not plan.is_synchronous:
        raise UserError(f"precision fp16 needs mode sync where {plan.ties[0]}, but stages lag; use --mode sync or bf16")
    return replace(
        plan,
        agree=(clip or scaled) and plan.is_synchronous,
        flags=scaled and not plan.is_synchronous,
        ties_agree=clip and bool(plan.ties) and not plan.is_synchronous,
    )


# --- Warnings ---------------------------------------------------------------------------------------------------------


def idle_warning(plan: Plan) -> str | None:
    """A warning if a batch has too few microbatches to give every replica one."""
    if plan.microbatches >= plan.widest:
        return None
    microbatches = counted(plan.microbatches, "microbatch", "es")
    return f"{microbatches} for {plan.widest} replicas: some have nothing to do in each batch; raise --microbatches"


def warn_about_waiting(plan: Plan, bubble_of: Bubble, voice: Voice) -> None:
    """Warn if ranks wait at every lag: for how long, and what would fill the pipeline."""
    if min(bubble_of(candidate) for candidate in every_lag(plan)) > BUBBLE_GOAL:
        voice.warn(f"ranks would wait {bubble_of(plan):.0%} of the time; {_remedy(plan, bubble_of)}")


def _remedy(plan: Plan, bubble_of: Bubble) -> str:
    """The fewest microbatches that fill the pipeline at the fullest lag, as far as the profile covers them."""

    def with_default_depths(microbatches: int) -> Plan:
        return make_plan(
            plan.placement, batch=plan.batch, microbatches=microbatches, mode=plan.mode, cuts=plan.cuts, tied=plan.tied
        )

    defaults = with_default_depths(plan.microbatches)
    if any(stage.depth < default.depth for stage, default in zip(plan.stages, defaults.stages, strict=True)):
        return f"depths {','.join(str(stage.depth) for stage in plan.stages)} hold stages back: leave --depths out"
    more = [number for number in divisors(plan.batch) if plan.microbatches < number <= MOST_MICROBATCHES]
    for microbatches in more[:_MOST_TRIALS]:
        candidate = with_default_depths(microbatches)
        try:
            if bubble_of(candidate) <= BUBBLE_GOAL:
                return f"--microbatches {microbatches} would fill the pipeline"
        except NotProfiled:
            return f"more --microbatches may fill the pipeline: profile with --samples {candidate.samples} to know"
    return "stages take unequally long: stagewright plan finds better cuts"


def warn_about_lag(config: Config, plan: Plan, voice: Voice) -> None:
    """Warn about what a lag changes: clipping, --predict, and which learning rates are stable."""
    options = config.optimizer
    if options.clip is not None and not plan.is_synchronous:
        voice.warn("stages lag, so each stage clips by its own gradient norm, not by the whole model's")
    for tie in plan.ties:
        if (own := plan.stages[tie.stages[0]].versions) > 1:
            voice.warn(f"{tie}, so each of them lags {counted(own - 1, 'update')}")
    if options.predict and plan.lag == 0:
        voice.warn("--predict changes nothing: no stage lags")
    if has_stable_rate(options.name):
        motion = Motion(options.momentum, plan.lag, options.predict, options.nesterov)
        takes_staleness = plan.mode.preset.has_staleness and config.plan.versions is None
        if warning := stability_warning(motion, options.lr, takes_staleness=takes_staleness):
            voice.warn(warning)
