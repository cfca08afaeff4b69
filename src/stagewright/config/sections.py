"""Every option of a run, section by section: its default, its flag, its help and its bounds.

The command line, configuration files and `stagewright.train` all read this one table (`options`). Imports neither torch
nor pydantic, so that `stagewright --help` starts quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import EnumType
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from stagewright.config.losses import LOSSES
from stagewright.config.modes import Mode
from stagewright.config.optimizers import OPTIMIZERS, titles
from stagewright.config.sources import KINDS
from stagewright.errors import UserError, either_of

_YEAR = 365 * 86400.0  # seconds
_MOST_THREADS = 1024
_MOST_SAMPLES = 2**28  # an epoch's order is in memory, eight bytes per sample
_MOST_BATCH = 2**31 - 1
_MOST_CLASSES = 2**24
_MOST_SIDE = 2**16
_MOST_CONTEXT = 2**20
MOST_STEPS = 10**9
MOST_RUNS = 1000  # of one configuration
_MOST_EPOCHS = 10**6
_MOST_SEED = 2**63 - 1
_MOST_SCALE = 2.0**127  # of fp32
AUTO = "auto"  # chosen when a run starts, by its machine, model and data
DEFAULT_BATCH = 64
RENAMED = {"plan.weights": "plan.shares"}  # keys of older versions, which old run folders still have


def option(
    default: Any,
    flag: str,
    help: str,
    metavar: str = "",
    *,
    is_list: bool = False,
    is_joined: bool = False,
    is_repeated: bool = False,
    **bounds: float,
) -> Any:
    """A field that is also a command-line option; its bounds are `least`, `above`, `below` and `most`.

    `is_list`: a text of comma-separated integers from 0 on. `is_joined`: a text of comma-separated names; a command
    line may repeat the option instead. `is_repeated`: several values, for each of which a command line repeats it.
    """
    lists = {"is_list": is_list, "is_joined": is_joined, "is_repeated": is_repeated}
    return field(default=default, metadata={"flag": flag, "help": help, "metavar": metavar, "bounds": bounds, **lists})


@dataclass(frozen=True)
class Section:
    """A table of the configuration file; unknown keys are errors."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True)
class ModelConfig(Section):
    """What is trained."""

    name: str = option(
        "vgg-small",
        "--model",
        "a zoo name, timm:NAME, torchvision:NAME, hf:CONFIG, or package.module:factory",
        "MODEL",
    )
    classes: int | None = option(
        None, "--classes", "outputs of a model by name (default: the data's classes)", least=1, most=_MOST_CLASSES
    )
    init: str | None = option(
        None, "--init", "start from the weights of a .safetensors file, or of a folder with shards", "FILE"
    )
    freeze: str | None = option(
        None,
        "--freeze",
        "parameters that are not trained: 'trunk.*,stem', or all but some: '!head'",
        "PATTERNS",
    )
    inputs: str | None = option(
        None,
        "--inputs",
        "fields that the model takes: image, or input_ids,labels=input_ids (default: all but targets)",
        "FIELDS",
    )


@dataclass(frozen=True)
class DataConfig(Section):
    """What it is trained on."""

    source: str = option(
        "synthetic",
        "--data",
        either_of([kind.shown for kind in KINDS.values()]),
        "SOURCE",
    )
    val: str | None = option(
        None, "--val", "data to evaluate on (default: the val folder beside train, else the training data)", "SOURCE"
    )
    samples: int = option(4096, "--samples", "samples of synthetic data", least=1, most=_MOST_SAMPLES)
    image: int | None = option(
        None,
        "--image",
        "side of the images in pixels (default: the model's, or that of smaller data)",
        least=1,
        most=_MOST_SIDE,
    )
    shuffle: bool = option(True, "--shuffle", "shuffle the samples anew in every epoch")
    context: int = option(256, "--context", "tokens per sample of tokens:FILE", least=1, most=_MOST_CONTEXT)
    limit: int | None = option(None, "--limit", "train on only this many samples, evenly spread")
    class_names: str | None = option(None, "--class-names", "file with one class name per line, in label order", "FILE")
    learnable: bool = option(True, "--learnable", "synthetic images show their class")
    crop: Literal["auto", "resized", "padded"] = option("auto", "--crop", "random crop (auto: padded up to 64 pixels)")
    jitter: float = option(
        0.0, "--jitter", "largest change of brightness, contrast and saturation, as a fraction", least=0, below=1
    )
    cutout: int = option(0, "--cutout", "side of a black square at a random place in training images", least=0)
    normalize: str = option(
        "auto", "--normalize", "auto (the model's), imagenet, published, or MEAN,MEAN,MEAN/STD,STD,STD of 0-255"
    )
    decode: Literal["cpu", "gpu", "once"] = option(
        "cpu", "--decode", "where to decode JPEGs; gpu needs torchcodec; once keeps small images on the device"
    )
    loader_threads: int | None = option(
        None,
        "--loader-threads",
        "decoding threads per rank of the first stage, where --workers is 0 (default: 2)",
        least=1,
        most=_MOST_THREADS,
    )
    workers: int | None = option(
        None,
        "--workers",
        "processes per rank of the first stage that load images or python: data; 0: threads, or the rank itself "
        "(default: for images from 64 pixels on one less than the rank's share of the cores, at most 16, where that "
        "share is 4 or more; else 0)",
        least=0,
        most=256,
    )
    ahead: int = option(4, "--ahead", "microbatches to decode ahead", least=0, most=1024)
    max_bad: int = option(100, "--max-bad", "bad records that a rank replaces before the run stops", least=0)


@dataclass(frozen=True)
class PlanConfig(Section):
    """Which devices run which stage, and in which order."""

    placement: str = option(
        AUTO, "--placement", "devices of each stage, such as 0:0-6.0:7; auto: what is fastest on this machine"
    )
    shares: str | None = option(None, "--shares", "each stage's share of the operations: 11:7")
    cut: str | None = option(None, "--cut", "first unit of each later stage (default: the planner's choice)", "NAMES")
    file: str | None = option(None, "--plan", "a plan file of stagewright plan, instead of the options above", "FILE")
    profile: str | None = option(
        None, "--profile", "a profile of this machine, to plan with and to predict the speed", "FILE"
    )
    mode: Mode | None = option(  # noqa: RUF009
        None,
        "--mode",
        "how far weights may lag (default: one stage dp, a given --placement stale, else sync or dp)",
    )
    staleness: int | None = option(None, "--staleness", "most updates that a stage may lag in mode stale", least=0)
    versions: str | None = option(None, "--versions", "weight versions per stage: 3,1", "N,N")
    depths: str | None = option(None, "--depths", "microbatches in flight per replica, by stage: 3,1", "N,N")
    policy: Literal["1f1b", "gpipe"] = option("1f1b", "--policy", "order of forwards and backwards")
    batch: int | None = option(
        None,
        "--batch",
        "samples per update (the global batch) (default: 64; less for little data, more on several GPUs)",
        least=1,
        most=_MOST_BATCH,
    )
    microbatches: int | None = option(
        None,
        "--microbatches",
        "microbatches per batch (default: twice the replicas of the widest stage, or those of the only one)",
        least=1,
    )


@dataclass(frozen=True)
class GroupConfig(Section):
    """How the parameters move whose names match a pattern: as all others do, where a value is None."""

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    beta1: float | None = None
    beta2: float | None = None

    @property
    def settings(self) -> dict[str, float]:
        """What differs from the options of the optimizer, which have the same names."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "pattern"}
        return {name: value for name, value in own.items() if value is not None}

    def __str__(self) -> str:
        return f"{self.pattern}:{','.join(f'{name}={value:g}' for name, value in self.settings.items())}"


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """How weights move."""

    name: str = option(
        "sgd", "--optimizer", f"{', '.join(OPTIMIZERS)}, or package.module:factory (of parameters)", "OPTIMIZER"
    )
    lr: float = option(0.01, "--lr", "learning rate", least=0)
    momentum: float = option(0.9, "--momentum", f"{titles('momentum')}: momentum", least=0, below=1)
    nesterov: bool = option(False, "--nesterov", "use Nesterov momentum")
    weight_decay: float = option(0.0, "--weight-decay", "weight decay", least=0)
    beta1: float = option(0.9, "--beta1", f"{titles('beta1')}: decay of the first moment", least=0, below=1)
    beta2: float = option(0.999, "--beta2", f"{titles('beta2')}: decay of the second moment", least=0, below=1)
    eps: float = option(1e-8, "--eps", f"{titles('eps')}: added to the denominator", least=0)
    predict: bool = option(False, "--predict", "extrapolate stale weights along their momentum")
    clip: float | None = option(None, "--clip", "clip the gradient to this norm", above=0)
    ema: float | None = option(
        None, "--ema", "evaluate and export averaged weights; the decay per batch: 0.999", "DECAY", above=0, below=1
    )
    label_smoothing: float = option(
        0.0, "--label-smoothing", "fraction of the target spread over all classes", least=0, most=1
    )
    groups: tuple[GroupConfig, ...] = option(
        (),
        "--group",
        "lr, weight_decay, momentum, beta1 or beta2 of the parameters whose names match; may be repeated",
        "'head.*:lr=0.1,weight_decay=0'",
        is_repeated=True,
    )
    no_decay: bool = option(False, "--no-decay", "no weight decay of biases, norms and one-dimensional parameters")
    layer_decay: float | None = option(
        None, "--layer-decay", "factor of the learning rate of each layer for that of the one before", above=0, below=1
    )


@dataclass(frozen=True)
class LossConfig(Section):
    """What is minimised."""

    name: str = option("auto", "--loss", f"{', '.join(LOSSES)} (its own), or package.module:function", "LOSS")
    ignore_index: int | None = option(
        None,
        "--ignore-index",
        "a label that does not count (default: -100, where a sample has many)",
        least=-_MOST_CLASSES,
        most=_MOST_CLASSES,
    )
    class_weights: str | None = option(
        None, "--class-weights", "cross-entropy: the weight of each class: 1,2.5,1", "W,W"
    )


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """How the learning rate moves."""

    kind: Literal["constant", "step", "poly", "cosine", "one-cycle"] = option(
        "constant", "--lr-schedule", "learning rate over the run"
    )
    warmup: int = option(0, "--warmup", "batches of linear warm-up", least=0)
    steps: str = option("", "--lr-steps", "step: batches at which the rate drops: 100,200", "N,N", is_list=True)
    gamma: float = option(0.1, "--lr-gamma", "step: factor of each drop", least=0)
    power: float = option(2.0, "--lr-power", "poly: exponent", least=0)
    final: float = option(0.0, "--lr-final", "poly, cosine: rate at the end", least=0)
    peak: float = option(
        0.3, "--lr-peak", "one-cycle: share of the run in which the rate rises to --lr", least=0, most=1
    )
    start_div: float = option(25.0, "--lr-start-div", "one-cycle: --lr over the rate at the start", above=0)
    final_div: float = option(1e4, "--lr-final-div", "one-cycle: the rate at the start over that at the end", above=0)
    anneal: Literal["cosine", "linear"] = option("cosine", "--lr-anneal", "one-cycle: how the rate rises and falls")


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When checkpoints are made, and how many are kept."""

    every: int = option(0, "--checkpoint-every", "batches between checkpoints (0: only on request)", least=0)
    minutes: float = option(0.0, "--checkpoint-minutes", "minutes between checkpoints (0: none)", least=0)
    keep: int = option(2, "--keep", "newest checkpoints to keep (0: all)", least=0)
    best: str | None = option(
        None, "--best", "also keep the best one by an evaluation: loss, top1, ..., min:NAME or max:NAME", "METRIC"
    )


@dataclass(frozen=True)
class RunConfig(Section):
    """How long a run takes, where it runs, and what it writes."""

    steps: int | None = option(None, "--steps", "batches to train", most=MOST_STEPS)
    epochs: int | None = option(
        None, "--epochs", "epochs to train (default: 1, or as many as make 100 steps)", most=_MOST_EPOCHS
    )
    seed: int = option(0, "--seed", "seed of weights, sample order and dropout", least=-_MOST_SEED, most=_MOST_SEED)
    precision: str = option(
        AUTO, "--precision", "fp64, fp32, ieee, tf32, bf16 or fp16; auto: bf16 on GPUs that have it, else fp32"
    )
    loss_scale: float = option(65536.0, "--loss-scale", "fp16: initial scale of the loss", least=1, most=_MOST_SCALE)
    growth_interval: int = option(
        2000, "--growth-interval", "fp16: batches without overflow until the scale doubles", least=1
    )
    device: Literal["auto", "cpu", "cuda"] = option(AUTO, "--device", "kind of device (auto: GPUs where there are any)")
    share_gpu: bool = option(False, "--share-gpu", "let devices beyond the last GPU share the existing ones")
    backend: Literal["auto", "gloo", "nccl"] = option(
        "auto", "--backend", "auto: nccl on GPUs, gloo where ranks share one"
    )
    channels_last: bool = option(True, "--channels-last", "on GPUs: store images of convolutional models channels last")
    compile: bool = option(False, "--compile", "torch.compile each stage")
    cuda_graph: Literal["auto", "on", "off"] = option(
        AUTO, "--cuda-graph", "replay stages as CUDA graphs (auto: one rank, where faster)"
    )
    deterministic: bool = option(False, "--deterministic", "on GPUs: compute the same bits every time")
    threads: int | None = option(
        None,
        "--threads",
        "threads per CPU rank (default: 1, with --placement auto what is fastest)",
        least=1,
        most=_MOST_THREADS,
    )
    unproven: bool = option(
        False, "--unproven", "train a cut without proof that its stages compute what the model does"
    )
    dynamic: bool = option(False, "--dynamic", "let ranks choose between forward and backward at run time")
    emulate: bool = option(False, "--emulate", "run every rank in one process")
    eval_every: int | None = option(
        None,
        "--eval-every",
        "batches between evaluations (0: only at the end) (default: with --val, an epoch)",
        least=0,
    )
    metrics: str = option(
        "auto",
        "--metric",
        "top1, top5, accuracy, iou, mae, mse, perplexity, none or package.module:function; may be repeated",
        "NAME",
        is_joined=True,
    )
    early_stop: int | None = option(
        None,
        "--early-stop",
        "stop after N evaluations without a better --best (default metric: loss)",
        least=1,
    )
    log_every: int = option(10, "--log-every", "batches between log lines", least=1)
    monitor_every: float = option(1.0, "--monitor-every", "seconds between samples of memory, load and power (0: none)")
    track: Literal["none", "tensorboard", "wandb", "mlflow"] = option(
        "none", "--track", "also send metrics to a tracker"
    )
    export: str | None = option(None, "--export", "write the trained weights to a .safetensors file", "FILE")
    resume: str | None = option(
        None, "--resume", "resume a run from its newest checkpoint, or from a given one (RUN/best: its best)", "RUN"
    )
    runs: str = option("runs", "--runs", "folder that holds run folders", "DIR")
    bucket: int = option(25, "--bucket", "MiB of gradients per all-reduce (0: one parameter)", least=0, most=2**20)
    timeout: float = option(
        600.0, "--timeout", "seconds at one action after which a rank counts as hung", above=0, most=_YEAR
    )
    start_timeout: float = option(
        3600.0, "--start-timeout", "the same before the first update and while saving", above=0, most=_YEAR
    )
    max_restarts: int | None = option(
        None,
        "--max-restarts",
        "restarts after a fault (default: 3 where the run keeps checkpoints, 0 otherwise)",
        least=0,
    )


@dataclass(frozen=True)
class NodesConfig(Section):
    """Which machines take part, and how they meet."""

    list: str | None = option(
        None, "--nodes", "addresses or names of all machines, the host first, or slurm: 10.0.0.1,10.0.0.2", "LIST"
    )
    index: int | None = option(None, "--node-index", "index of this machine in --nodes (default: by its address)")
    token: str | None = option(
        None, "--token", "file with the secret that all machines share (default: $STAGEWRIGHT_TOKEN)", "FILE"
    )
    join_timeout: float = option(600.0, "--join-timeout", "seconds to wait for all machines", above=0, most=_YEAR)
    lost_timeout: float = option(
        60.0, "--lost-timeout", "seconds of silence after which a machine counts as lost", above=0, most=_YEAR
    )


@dataclass(frozen=True)
class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    plan: PlanConfig = PlanConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    nodes: NodesConfig = NodesConfig()


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line option, which may be a field of the configuration."""

    flag: str
    help: str
    metavar: str = ""  # what stands for the value in --help
    type: type = str
    choices: tuple[str, ...] = ()
    default: Any = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    key: str = ""  # section.field of the configuration
    is_repeated: bool = False  # it may be given several times
    is_joined: bool = False  # which joins its values by commas
    is_list: bool = False  # a text of integers from 0 on

    def of(self, config: Config) -> Any:
        """Its value in a configuration."""
        section, _, name = self.key.partition(".")
        return getattr(getattr(config, section), name)

    def put(self, config: Config, value: Any) -> Config:
        """The configuration with another value of it."""
        section, _, name = self.key.partition(".")
        return replace(config, **{section: replace(getattr(config, section), **{name: value})})

    @property
    def keyword(self) -> str:
        """Its name as a keyword of a function."""
        return self.flag.removeprefix("--").replace("-", "_")

    def check(self, value: float | None) -> None:
        """Raise if a number is outside the bounds."""
        if self.bounds and value is not None:
            require_within(self.flag, value, **self.bounds)


@cache
def options(*sections: str) -> tuple[Option, ...]:
    """Every option of the named sections, or of all sections."""
    hints = get_type_hints(Config)
    found = []
    for section in fields(Config):
        if not sections or section.name in sections:
            types = get_type_hints(hints[section.name])
            found += [_as_option(section.name, entry, types[entry.name]) for entry in fields(hints[section.name])]
    return tuple(found)


def _as_option(section: str, entry: Field[Any], hint: Any) -> Option:
    alternatives = get_args(hint)
    parts = (part if isinstance(part, EnumType) else get_args(part) for part in (hint, *alternatives))
    choices = tuple(str(choice) for part in parts for choice in part if isinstance(choice, str))
    about = entry.metadata
    is_text = bool(choices) or about["is_repeated"]
    kind = str if is_text else next((kind for kind in alternatives if kind is not type(None)), hint)
    metavar = about["metavar"] or ("" if choices else {int: "N", float: "FLOAT"}.get(kind, "TEXT"))
    key = f"{section}.{entry.name}"
    common = (about["flag"], about["help"], metavar, kind, choices, entry.default, about["bounds"], key)
    return Option(*common, about["is_joined"] or about["is_repeated"], about["is_joined"], about["is_list"])


def words_of(config: Config, flags: Iterable[str]) -> list[str]:
    """Some options as words of a command line, in this order, but for those that are their defaults."""
    known = {option.flag: option for option in options()}
    given = (known[flag] for flag in flags if known[flag].of(config) != known[flag].default)
    return [word for option in given for word in (option.flag, str(option.of(config)))]


def require_within(flag: str, value: float, **bounds: float) -> None:
    """An error unless a number is finite and within `least`, `above`, `below` and `most`, whichever are given."""
    is_within = {
        "least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "below": lambda bound: value < bound,
        "most": lambda bound: value <= bound,
    }
    is_finite = isinstance(value, int) or math.isfinite(value)
    if is_finite and all(is_within[name](bound) for name, bound in bounds.items()):
        return
    words = {"least": "at least", "above": "above", "below": "below", "most": "at most"}
    wanted = " and ".join(f"{words[name]} {_shown(bounds[name])}" for name in words if name in bounds)
    raise UserError(f"{flag} is {_shown(value)}; give {'' if is_finite else 'a finite number, '}{wanted}")


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.12g}"
