"""What excludes or needs what: one table for every command, over the plain values of options by their flags.

A `Rule` is about one option. It either says that the option changes nothing unless a condition holds, which only
matters if a user gave it, or that some values of it are impossible unless the condition holds, whoever chose them.
What depends on a plan, on files or on the machine is checked where those are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagewright.config.losses import LOSS_OPTIONS
from stagewright.config.modes import Mode
from stagewright.config.optimizers import OPTIMIZERS, Extrapolation, takers
from stagewright.config.sources import KINDS, OPTIONS_OF_KINDS, kind_of
from stagewright.errors import UserError, either_of

Values = Mapping[str, Any]  # of all options of a command, by flag; a condition on an option that it lacks holds

_SEARCHES = ("plan", "simulate", "value")  # commands that plan without training


@dataclass(frozen=True, slots=True)
class Condition:
    """What an option needs, and how a sentence about an option that lacks it ends."""

    holds: Callable[[Values], bool]
    otherwise: Callable[[Values], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """An option needs a condition.

    With `values`, those values of the option are errors without the condition. Otherwise giving the option at all is,
    except as `off`, which asks for what happens anyway.
    """

    flag: str
    needs: Condition
    values: tuple[Any, ...] = ()
    off: Any = False
    commands: tuple[str, ...] = ()  # that it applies to; if empty: to all that have the option
    excludes: str = ""  # the other option of an exclusive pair: of two values, the one that was given stays

    def is_broken(self, values: Values, given: Collection[str]) -> bool:
        value = values[self.flag]
        if self.values:
            asked = any(part in self.values for part in _parts(value))
        else:
            is_given = self.flag in given and value is not None and not _is_same(value, self.off)
            asked = is_set(value) if self.excludes else is_given
        return asked and not self.needs.holds(values)

    def error(self, values: Values) -> UserError:
        verb = "can't be used" if self.values or self.excludes else "changes nothing"
        return UserError(f"{_shown(self.flag, values[self.flag])} {verb} {self.needs.otherwise(values)}")


def check_rules(values: Values, given: Collection[str], command: str = "train") -> None:
    """Raise for the first rule that the options of a command break; `given` are the flags that the user gave."""
    for rule in _rules_of(values, command):
        if rule.is_broken(values, given):
            raise rule.error(values)


def replaced_options(values: Values, given: Collection[str]) -> set[str]:
    """The options that others replace: of each exclusive pair with two values, the one that the user did not give."""
    exclusive = (rule for rule in _rules_of(values, "train") if rule.excludes in given)
    return {rule.flag for rule in exclusive if rule.flag not in given and rule.is_broken(values, given)}


def unused_options(values: Values, given: Collection[str]) -> dict[str, UserError]:
    """Each given option that would change nothing, with the error that says so."""
    broken = (rule for rule in _rules_of(values, "train") if not rule.values and rule.is_broken(values, given))
    return {rule.flag: rule.error(values) for rule in broken}


def is_set(value: Any) -> bool:
    """Whether an option has a value; a number always is one, even 0."""
    return not (
        value is None or value is False or value in ([], ()) or (isinstance(value, str) and not value.strip(" ,"))
    )


def _rules_of(values: Values, command: str) -> Iterator[Rule]:
    return (rule for rule in RULES if rule.flag in values and command in (rule.commands or (command,)))


def _parts(value: Any) -> list[Any]:
    """A value as a list: of an option that may be repeated, or a text of several names."""
    if isinstance(value, list):
        return value
    return value.split(",") if isinstance(value, str) else [value]


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal and both or neither are switches: 0 is not off."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _shown(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {','.join(map(str, value)) if isinstance(value, list | tuple) else value}"


# --- Conditions -------------------------------------------------------------------------------------------------------


def _is(flag: str, *accepted: str) -> Condition:
    """An option has one of these values, or is left to its default."""
    return Condition(
        lambda values: not is_set(values.get(flag)) or any(part in accepted for part in _parts(values[flag])),
        lambda values: f"with {_shown(flag, values[flag])}; it needs {flag} {either_of(accepted)}",
    )


def _with(flag: str) -> Condition:
    return Condition(
        lambda values: flag not in values or is_set(values[flag]),
        lambda values: f"without {flag}; give it as well, or leave this out",
    )


def _without(flag: str) -> Condition:
    return Condition(
        lambda values: not is_set(values.get(flag)),
        lambda values: f"with {_shown(flag, values[flag])}; give one of them",
    )


def _above_zero(flag: str) -> Condition:
    return Condition(lambda values: values.get(flag) != 0, lambda values: f"with {flag} 0; it needs one above 0")


def _zero(flag: str) -> Condition:
    return Condition(
        lambda values: not values.get(flag), lambda values: f"with {flag} {values[flag]:g}; give one of them"
    )


def _group_above_zero(name: str) -> Condition:
    """Some group of parameters has a setting above 0."""
    return Condition(
        lambda values: any(getattr(group, name) for group in values.get("--group", ())),
        lambda values: f"without a --group that has {name}; give one",
    )


def _data(flag: str) -> Condition:
    """The training or the evaluation data is of a kind for which this option changes something."""
    kinds = [kind for kind in KINDS.values() if flag in kind.options]
    needed, names = either_of([kind.shown for kind in kinds]), ("--data", "--val")
    return Condition(
        lambda values: "--data" not in values or any(kind_of(values.get(name)) in kinds for name in names),
        lambda values: f"with --data {values['--data']}; it needs --data {needed}",
    )


def _no_data(kind: str, instead: str) -> Condition:
    """Neither the training nor the evaluation data is of this kind."""
    return Condition(
        lambda values: all((values.get(flag) or "").partition(":")[0] != kind for flag in ("--data", "--val")),
        lambda values: f"with {kind}: data; {instead}",
    )


def _has_motion(values: Values) -> bool:
    """Whether an optimizer's weights would move on without a gradient."""
    facts = OPTIMIZERS.get(values.get("--optimizer") or "")
    if facts is not None and facts.extrapolation is not Extrapolation.MOMENTUM:
        return facts.extrapolation is not None
    return values.get("--momentum") != 0 or any(group.momentum for group in values.get("--group", ()))


def _either(condition: Condition, *others: Condition) -> Condition:
    """At least one of several conditions; the sentence is about the first."""
    return Condition(lambda values: any(one.holds(values) for one in (condition, *others)), condition.otherwise)


# --- The table --------------------------------------------------------------------------------------------------------


def _unused(needs: Condition, *flags: str, off: Any = False, commands: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    return tuple(Rule(flag, needs, off=off, commands=commands) for flag in flags)


def _exclusive(first: str, second: str) -> tuple[Rule, Rule]:
    return Rule(first, _without(second), excludes=second), Rule(second, _without(first), excludes=first)


_CUDA = Condition(  # auto is checked again once it is known
    lambda values: values.get("--device") in (None, "auto", "cuda"),
    lambda values: f"with --device {values['--device']}; it needs --device cuda",
)
_CPU = Condition(
    lambda values: values.get("--device") in (None, "auto", "cpu"),
    lambda values: f"with --device {values['--device']}; it needs --device cpu",
)
_EVALUATES = Condition(
    lambda values: "--eval-every" not in values or is_set(values.get("--val")) or is_set(values["--eval-every"]),
    lambda values: "without an evaluation; give --val or --eval-every as well",
)
_USES_AVERAGE = Condition(
    lambda values: (
        _EVALUATES.holds(values)
        or any(values.get(flag) for flag in ("--export", "--checkpoint-every", "--checkpoint-minutes"))
    ),
    lambda values: (
        "without an evaluation, an export or a checkpoint; give --val, --export or --checkpoint-every as well"
    ),
)
_STAGES = _is("--mode", *Mode.where(lambda preset: preset.has_stages))
_STALE = _is("--mode", *Mode.where(lambda preset: preset.has_staleness))
_OPTIONS = _is("--optimizer", *OPTIMIZERS)  # a user's factory sets its own
_STABLE = _is("--optimizer", *(name for name, facts in OPTIMIZERS.items() if facts.has_stable_rate))
_MOVES_ON = Condition(
    _has_motion,
    lambda values: (
        "with --momentum 0; it needs one above 0"
        if values.get("--momentum") == 0
        else f"with --optimizer {values['--optimizer']}, which has no momentum to extrapolate along"
    ),
)
_DECAYS = _either(_above_zero("--weight-decay"), _group_above_zero("weight_decay"))
_ONE_CYCLE = _is("--lr-schedule", "one-cycle")
_NO_MASKS = _no_data("segmentation", "use --decode cpu, which draws masks too")
_NO_CHANGE = {"--workers": 0, "--normalize": "auto", "--jitter": 0, "--cutout": 0, "--decode": "cpu"}
_OF_PLAN_FILE = ("--placement", "--shares", "--cut", "--mode", "--staleness", "--versions", "--depths", "--policy")

RULES: tuple[Rule, ...] = (
    # Model
    *_unused(_without("--resume"), "--init"),
    # Data
    *(Rule(flag, _data(flag), off=_NO_CHANGE.get(flag, False)) for flag in OPTIONS_OF_KINDS),
    *_unused(_is("--decode", "cpu"), "--workers", off=0),
    *_unused(_zero("--workers"), "--loader-threads"),
    *_unused(_with("--data"), "--inputs", commands=("inspect",)),
    *_unused(_is("--decode", "cpu", "gpu"), "--ahead"),
    Rule("--decode", _CUDA, ("gpu",)),
    Rule("--decode", _zero("--jitter"), ("once",)),
    Rule("--decode", _NO_MASKS, ("gpu", "once")),
    # Plan
    *_unused(_without("--plan"), *_OF_PLAN_FILE, "--batch", "--microbatches"),
    *_unused(_STAGES, "--cut", "--shares", "--dynamic"),
    *_unused(_STALE, "--staleness", "--versions"),
    *_unused(_is("--policy", "1f1b"), "--depths"),
    *_exclusive("--cut", "--shares"),
    *_exclusive("--staleness", "--versions"),
    # Loss
    *(
        rule
        for flag, losses in LOSS_OPTIONS.items()
        for rule in _unused(_is("--loss", "auto", *losses), flag, off=0.0 if flag == "--label-smoothing" else False)
    ),
    # Optimizer and learning rate
    *_unused(_OPTIONS, "--lr", "--weight-decay", "--group", "--layer-decay", commands=("train",)),
    *(
        rule
        for option in dict.fromkeys(option for facts in OPTIMIZERS.values() for option in facts.options)
        for rule in _unused(_is("--optimizer", *takers(option)), f"--{option}")
    ),
    *_unused(_MOVES_ON, "--nesterov", "--predict"),
    *_unused(_DECAYS, "--no-decay"),
    *_unused(_is("--mode", *Mode.where(lambda preset: preset.has_lag)), "--predict"),
    *_unused(_USES_AVERAGE, "--ema"),
    *_unused(_STABLE, "--lr", commands=("plan",)),
    *_unused(_with("--lr"), "--momentum", "--nesterov", "--predict", commands=("plan",)),
    *_unused(_is("--lr-schedule", "step"), "--lr-steps", "--lr-gamma", off=""),
    *_unused(_is("--lr-schedule", "poly"), "--lr-power"),
    *_unused(_is("--lr-schedule", "poly", "cosine"), "--lr-final"),
    *_unused(_ONE_CYCLE, "--lr-peak", "--lr-start-div", "--lr-final-div", "--lr-anneal"),
    *_unused(_is("--lr-schedule", "constant", "step", "poly", "cosine"), "--warmup", off=0),
    Rule("--lr-schedule", _with("--lr-steps"), ("step",)),
    # Device, precision and speed
    *_unused(_CUDA, "--share-gpu", "--channels-last", "--deterministic"),
    *_unused(_is("--precision", "fp16"), "--loss-scale", "--growth-interval"),
    Rule("--precision", _CUDA, ("tf32", "fp16")),
    Rule("--precision", _CPU, ("fp64",)),
    Rule("--backend", _CUDA, ("nccl",)),
    Rule("--backend", _without("--share-gpu"), ("nccl",)),
    Rule("--cuda-graph", _CUDA, ("on",)),
    # Run
    *_exclusive("--steps", "--epochs"),
    *_unused(_EVALUATES, "--metric", off="auto"),
    *_unused(_EVALUATES, "--best", "--early-stop"),
    *_unused(_above_zero("--eval-every"), "--early-stop"),
    *_exclusive("--emulate", "--nodes"),
    *_unused(_without("--emulate"), "--share-gpu", "--timeout", "--start-timeout", "--max-restarts"),
    *_unused(_without("--emulate"), "--backend", off="auto"),
    *_unused(_with("--nodes"), "--node-index", "--token"),
    # Commands that plan
    *_unused(_without("--profile"), "--software", "--data", commands=_SEARCHES),
    *_unused(_with("--cluster"), "--devices", commands=_SEARCHES),
    *_unused(_with("--try"), "--minutes", commands=("plan",)),
    # Other commands
    *_unused(_without("--serve"), "--once", "--json", commands=("watch",)),
    *_exclusive("--here", "--topo"),
    *_exclusive("--here", "--smi"),
)
