"""Open a run: resolve its options, and open its data and its model, once for all that comes after.

An `Opening` is handed on: to the planner, the proof, the dry run and the job.
Further down: which fields of a sample the model takes and how, and which loss is computed from the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor, nn

from stagewright.config.groups import Group
from stagewright.config.losses import LOSS_OPTIONS
from stagewright.config.rules import check_rules
from stagewright.config.sections import AUTO, Config
from stagewright.config.toml import flag_values
from stagewright.data.order import Indices, Order
from stagewright.data.own import DatasetSource
from stagewright.data.sources import Fields, Source, cast
from stagewright.errors import UserError, did_you_mean, within_memory
from stagewright.hardware.devices import with_devices
from stagewright.model.call import Inputs
from stagewright.model.chain import Chain, Way
from stagewright.model.load import is_ours, start_model
from stagewright.model.loss import IGNORED, LossOptions
from stagewright.model.networks.weights import Start
from stagewright.model.probe import Given
from stagewright.model.prove import SAMPLES
from stagewright.objects import shown
from stagewright.plan.plan import Plan
from stagewright.run.defaults import few_images, is_open, resolve_model, with_sizes, with_split
from stagewright.run.groups import resolve_groups
from stagewright.run.resume import Resume, find_checkpoint
from stagewright.runtime.job import criterion_of
from stagewright.runtime.precision import precision_of
from stagewright.runtime.process.assemble import open_data, open_model
from stagewright.runtime.process.object_pipe import require_portable
from stagewright.runtime.stage.scores import load_metrics
from stagewright.voice import SILENT, Voice

_SHORT_LINE = 100  # characters
_OWN_LOSS = "model"


@dataclass(frozen=True, slots=True)
class Binding:
    """How a model takes a sample: the fields it gets, and the names of forward's parameters for the last of them."""

    fields: tuple[str, ...]
    names: tuple[str, ...] = ()

    def given(self, fields: Mapping[str, Tensor]) -> Given:
        return Given(Inputs(tuple(fields[name] for name in self.fields), self.names), self.fields, fields)


@dataclass(frozen=True, slots=True)
class Launch:
    """By whom a run is started, and as what."""

    world: int | None = None  # processes that another launcher has started for it
    is_host: bool = True  # this machine collects events and resumes in the run's folder; others always get a new one
    is_scripted: bool = False  # a script's own loop drives it, which has no end
    keeps_weights: bool = False  # without --export they are left in the run folder, where a file can hold them


@dataclass(frozen=True, slots=True)
class Opening:
    """What is trained: everything that is known before there is a plan."""

    config: Config  # resolved but for its plan, and without --resume
    source: Source
    val: Source  # what evaluations run on: of its own, or the training data
    binding: Binding
    loss: LossOptions
    chain: Chain
    weights: Start | None  # where the first weights came from, if they are not new
    groups: tuple[Group, ...]
    resume: Resume | None
    launch: Launch

    @property
    def steps(self) -> int | None:
        """Batches to train; None where a script or the plan decides that."""
        run, batch = self.config.run, self.config.plan.batch
        if self.launch.is_scripted or batch is None:
            return None
        return (run.epochs or 1) * (len(self.source) // batch) if run.steps is None else run.steps

    @property
    def sources(self) -> tuple[tuple[str, Source], ...]:
        """The data to train and to evaluate on, by their names."""
        return ((self.config.data.source, self.source), (self.config.data.val or "", self.val))

    def order(self, plan: Plan) -> Order:
        return Order(len(self.source), plan.batch, self.config.run.seed, self.config.data.shuffle)

    def fields(self, source: Source, indices: Indices) -> Fields:
        """Samples as ranks get them."""
        return cast(source.batch(indices), source.targets, precision_of(self.config).weights)

    def build(self) -> nn.Module:
        """The model as its author's factory builds it, in single precision on the CPU."""
        return open_model(replace(self.config, run=replace(self.config.run, precision="fp32", device="cpu")))


def open_run(config: Config, voice: Voice = SILENT, launch: Launch | None = None) -> Opening:
    """Resolve the device, the data, the model and the batch, and open data and model.

    What was assumed is a note.
    """
    config, launch = with_devices(config), launch or Launch()
    if not (config.run.emulate or launch.is_scripted):  # a script makes its objects on every rank
        require_portable(config)
    load_metrics(config.run.metrics)  # reports an unknown one at once
    criterion_of(config)  # so does this
    assumed: list[str] = []
    assuming = replace(voice, note=assumed.append)
    config = resolve_model(with_split(config, assuming), assuming)
    resume = find_checkpoint(config.run.resume) if config.run.resume else None
    opening = _opened(replace(config, run=replace(config.run, resume=None)), resume, voice, launch)
    config, samples = opening.config, len(opening.source)
    if not launch.is_scripted:
        config = with_sizes(config, samples, assuming)
    for line in _assumptions(assumed):
        voice.note(line)
    if not launch.is_scripted and resume is None and (advice := few_images(config, samples)):
        voice.note(advice)
    threads = config.run.threads if config.run.threads or is_open(config) else 1
    return replace(opening, config=replace(config, run=replace(config.run, threads=threads)))


def _opened(config: Config, resume: Resume | None, voice: Voice, launch: Launch) -> Opening:
    """Open the data and build the model, traced on a few samples."""
    precision = precision_of(config)
    with within_memory(**memory_options(config), samples=config.data.samples):
        voice.progress(f"opening {config.data.source}")
        source = open_data(config, config.data.source)
        val = open_data(config, config.data.val) if config.data.val else source
        voice.progress(f"building and tracing {shown(config.model.name)}")
        model, weights = start_model(
            config.model.name,
            config.run.seed,
            config.model.classes,
            precision.weights,
            image=config.data.image,
            init=None if resume else config.model.init,  # a checkpoint has all weights
            frozen=config.model.freeze,
        )
        few = cast(source.batch(np.arange(SAMPLES) % len(source)), source.targets, precision.weights)
        binding = bind(model, tuple(few), source, config)
        loss = loss_options(config, source, val, few)
        way = None if resume or not _is_uncut(config) else Way.WHOLE
        chain = Chain(
            model,
            binding.given(few).inputs,
            context=precision.forward_context,
            device=config.run.device,
            way=way,
            build=partial(open_model, config),
            is_plain=is_ours(config.model.name),
        )
        groups = resolve_groups(model, config.optimizer)
    return Opening(config, source, val, binding, loss, chain, weights, groups, resume, launch)


def _is_uncut(config: Config) -> bool:
    """Whether one of our own models is not cut, which the options tell before there is a plan."""
    plan = config.plan
    is_one = plan.placement != AUTO and "." not in plan.placement
    return is_ours(config.model.name) and is_one and not (plan.file or plan.cut or plan.shares or plan.profile)


def memory_options(config: Config) -> dict[str, int | None]:
    """The options that decide how much memory preparing takes."""
    return {"image": config.data.image, "classes": config.model.classes, "batch": config.plan.batch}


def _assumptions(assumed: Sequence[str]) -> list[str]:
    """What was assumed, in as few lines as are short."""
    lines: list[str] = []
    for words in assumed:
        longer = f"{lines[-1]}; {words}" if lines else f"assumed: {words}"
        if lines and len(longer) > _SHORT_LINE:
            lines.append(f"  {words}")
        else:
            lines[-1:] = [longer]
    return lines


# --- What of a sample goes where --------------------------------------------------------------------------------------


def bind(model: nn.Module, fields: Sequence[str], source: Source, config: Config) -> Binding:
    """How the model takes samples with these fields: as --inputs says, or all fields that are no targets.

    One input goes by position, unless another parameter than the first has its name; so do those of tuples, which have
    no names. Several named ones go by name, so that data names its fields as forward names its parameters. A model that
    computes its own loss also gets the targets that it has parameters for.
    """
    parameters, takes_any = _parameters(model)
    if config.model.inputs is not None:
        return _as_asked(config.model.inputs, fields, parameters, takes_any=takes_any)
    inputs = [name for name in fields if name not in source.targets]
    own = [name for name in fields if name in source.targets and name in parameters]
    own = own if config.loss.name == _OWN_LOSS else []
    if has_pairs(source):
        return Binding((*inputs, *own), tuple(own))
    inputs += own
    if len(inputs) == 1:
        return Binding((inputs[0],), (inputs[0],) if inputs[0] in parameters[1:] else ())
    foreign = [name for name in inputs if name not in parameters and not takes_any]
    if foreign:
        raise UserError(
            f"the samples have a field '{foreign[0]}' but forward of {type(model).__name__} takes "
            f"{', '.join(parameters) or 'nothing'}; name the fields that it takes by --inputs "
            f"(for example --inputs {','.join(name for name in inputs if name != foreign[0])})"
        )
    return Binding(tuple(inputs), tuple(inputs))


def _parameters(model: nn.Module) -> tuple[list[str], bool]:
    """The names of forward's parameters, and whether it takes any others."""
    try:
        kinds = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return [], True
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in kinds if parameter.kind in plain]
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in kinds)


def _as_asked(text: str, fields: Sequence[str], parameters: Sequence[str], *, takes_any: bool) -> Binding:
    """`a,b` by position or, where forward has parameters of those names, by name; `parameter=field` by name."""
    by_position: list[str] = []
    by_name: dict[str, str] = {}
    parts = [part.strip() for part in text.split(",")]
    is_named = any("=" in part for part in parts) or (len(parts) > 1 and all(part in parameters for part in parts))
    for part in parts:
        parameter, equals, field = part.partition("=")
        field = field if equals else parameter
        if parameter in by_name:
            raise UserError(f"--inputs {text} gives '{parameter}' twice; give each parameter of forward one field")
        if field not in fields:
            raise UserError(
                f"--inputs {text}: the samples have no field '{field}'; they have {', '.join(fields)}; "
                f"{did_you_mean(field, fields)}"
            )
        if not is_named:
            by_position.append(field)
            continue
        if parameter not in parameters and not takes_any:
            raise UserError(
                f"--inputs {text}: forward has no parameter '{parameter}'; it has {', '.join(parameters)}; "
                f"{did_you_mean(parameter, parameters)}"
            )
        by_name[parameter] = field
    return Binding((*by_position, *by_name.values()), tuple(by_name))


def loss_options(config: Config, source: Source, val: Source, fields: Mapping[str, Tensor]) -> LossOptions:
    """The loss that --loss names; `auto` is the one that suits the target."""
    name = config.loss.name
    if name == "auto":
        name = _suitable(source, fields)
        check_rules({**flag_values(config), "--loss": name}, LOSS_OPTIONS)
    ignored = config.loss.ignore_index
    if ignored is None and (source.has_ignored or val.has_ignored):
        ignored = IGNORED
    return LossOptions(name, config.optimizer.label_smoothing, ignored, _class_weights(config), has_pairs(source))


def has_pairs(source: Source) -> bool:
    """Whether samples are pairs or tuples that end with their target, without names of their own."""
    return isinstance(source, DatasetSource) and source.is_paired


def _suitable(source: Source, fields: Mapping[str, Tensor]) -> str:
    if source.unit.name == "tokens":
        return "next-token"
    target = next((fields[name] for name in source.targets), None)
    if target is None:
        raise UserError(
            f"the samples have {', '.join(fields)} and no label, labels, target or targets; name what to minimise by "
            "--loss (model: the loss that the model returns)"
        )
    return "mse" if target.is_floating_point() else "cross-entropy"


def _class_weights(config: Config) -> tuple[float, ...]:
    text = config.loss.class_weights
    if text is None:
        return ()
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if not weights or not all(np.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise UserError(f"--class-weights {text[:80]}: give one number of at least 0 for each class: 1,2.5,1")
    return weights
