"""The options of each function as typed keywords. Written by tests/make_options.py: not to be edited."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from stagewright.config.sections import Option

OWN: dict[str, str]

def options_of(command: str) -> dict[str, Option]: ...
def hint(option: Option) -> str: ...

class TrainOptions(TypedDict, total=False):
    """Those of `stagewright train`, as keywords of `stagewright.train`."""

    classes: int | None
    """outputs of a model by name (default: the data's classes)"""

    init: str | PathLike[str] | None
    """start from the weights of a .safetensors file, or of a folder with shards"""

    freeze: str | None
    """parameters that are not trained: 'trunk.*,stem', or all but some: '!head'"""

    inputs: str | None
    """fields that the model takes: image, or input_ids,labels=input_ids (default: all but targets)"""

    samples: int
    """samples of synthetic data (default: 4096)"""

    image: int | None
    """side of the images in pixels (default: the model's, or that of smaller data)"""

    shuffle: bool
    """shuffle the samples anew in every epoch (default: True)"""

    context: int
    """tokens per sample of tokens:FILE (default: 256)"""

    limit: int | None
    """train on only this many samples, evenly spread"""

    class_names: str | PathLike[str] | None
    """file with one class name per line, in label order"""

    learnable: bool
    """synthetic images show their class (default: True)"""

    crop: Literal["auto", "resized", "padded"]
    """random crop (auto: padded up to 64 pixels) (default: 'auto')"""

    jitter: float
    """largest change of brightness, contrast and saturation, as a fraction (default: 0.0)"""

    cutout: int
    """side of a black square at a random place in training images (default: 0)"""

    normalize: str
    """auto (the model's), imagenet, published, or MEAN,MEAN,MEAN/STD,STD,STD of 0-255 (default: 'auto')"""

    decode: Literal["cpu", "gpu", "once"]
    """where to decode JPEGs; gpu needs torchcodec; once keeps small images on the device (default: 'cpu')"""

    loader_threads: int | None
    """decoding threads per rank of the first stage, where --workers is 0 (default: 2)"""

    workers: int | None
    """processes per rank of the first stage that load images or python: data; 0: threads, or the rank itself
    (default: for images from 64 pixels on one less than the rank's share of the cores, at most 16, where that
    share is 4 or more; else 0)"""

    ahead: int
    """microbatches to decode ahead (default: 4)"""

    max_bad: int
    """bad records that a rank replaces before the run stops (default: 100)"""

    placement: str
    """devices of each stage, such as 0:0-6.0:7; auto: what is fastest on this machine (default: 'auto')"""

    shares: str | None
    """each stage's share of the operations: 11:7"""

    cut: str | None
    """first unit of each later stage (default: the planner's choice)"""

    mode: Literal["dp", "sync", "stale", "pipedream"] | None
    """how far weights may lag (default: one stage dp, a given --placement stale, else sync or dp)"""

    staleness: int | None
    """most updates that a stage may lag in mode stale"""

    versions: str | None
    """weight versions per stage: 3,1"""

    depths: str | None
    """microbatches in flight per replica, by stage: 3,1"""

    policy: Literal["1f1b", "gpipe"]
    """order of forwards and backwards (default: '1f1b')"""

    batch: int | None
    """samples per update (the global batch) (default: 64; less for little data, more on several GPUs)"""

    microbatches: int | None
    """microbatches per batch (default: twice the replicas of the widest stage, or those of the only one)"""

    ignore_index: int | None
    """a label that does not count (default: -100, where a sample has many)"""

    class_weights: str | None
    """cross-entropy: the weight of each class: 1,2.5,1"""

    lr: float
    """learning rate (default: 0.01)"""

    momentum: float
    """SGD, RMSprop, LARS: momentum (default: 0.9)"""

    nesterov: bool
    """use Nesterov momentum (default: False)"""

    weight_decay: float
    """weight decay (default: 0.0)"""

    beta1: float
    """AdamW: decay of the first moment (default: 0.9)"""

    beta2: float
    """AdamW, RMSprop: decay of the second moment (default: 0.999)"""

    eps: float
    """AdamW, RMSprop: added to the denominator (default: 1e-08)"""

    predict: bool
    """extrapolate stale weights along their momentum (default: False)"""

    clip: float | None
    """clip the gradient to this norm"""

    ema: float | None
    """evaluate and export averaged weights; the decay per batch: 0.999"""

    label_smoothing: float
    """fraction of the target spread over all classes (default: 0.0)"""

    group: str | Mapping[str, object] | Sequence[str | Mapping[str, object]]
    """lr, weight_decay, momentum, beta1 or beta2 of the parameters whose names match; may be repeated"""

    no_decay: bool
    """no weight decay of biases, norms and one-dimensional parameters (default: False)"""

    layer_decay: float | None
    """factor of the learning rate of each layer for that of the one before"""

    lr_schedule: Literal["constant", "step", "poly", "cosine", "one-cycle"]
    """learning rate over the run (default: 'constant')"""

    warmup: int
    """batches of linear warm-up (default: 0)"""

    lr_steps: str
    """step: batches at which the rate drops: 100,200 (default: '')"""

    lr_gamma: float
    """step: factor of each drop (default: 0.1)"""

    lr_power: float
    """poly: exponent (default: 2.0)"""

    lr_final: float
    """poly, cosine: rate at the end (default: 0.0)"""

    lr_peak: float
    """one-cycle: share of the run in which the rate rises to --lr (default: 0.3)"""

    lr_start_div: float
    """one-cycle: --lr over the rate at the start (default: 25.0)"""

    lr_final_div: float
    """one-cycle: the rate at the start over that at the end (default: 10000.0)"""

    lr_anneal: Literal["cosine", "linear"]
    """one-cycle: how the rate rises and falls (default: 'cosine')"""

    checkpoint_every: int
    """batches between checkpoints (0: only on request) (default: 0)"""

    checkpoint_minutes: float
    """minutes between checkpoints (0: none) (default: 0.0)"""

    keep: int
    """newest checkpoints to keep (0: all) (default: 2)"""

    best: str | None
    """also keep the best one by an evaluation: loss, top1, ..., min:NAME or max:NAME"""

    steps: int | None
    """batches to train"""

    epochs: int | None
    """epochs to train (default: 1, or as many as make 100 steps)"""

    seed: int
    """seed of weights, sample order and dropout (default: 0)"""

    precision: str
    """fp64, fp32, ieee, tf32, bf16 or fp16; auto: bf16 on GPUs that have it, else fp32 (default: 'auto')"""

    loss_scale: float
    """fp16: initial scale of the loss (default: 65536.0)"""

    growth_interval: int
    """fp16: batches without overflow until the scale doubles (default: 2000)"""

    device: Literal["auto", "cpu", "cuda"]
    """kind of device (auto: GPUs where there are any) (default: 'auto')"""

    share_gpu: bool
    """let devices beyond the last GPU share the existing ones (default: False)"""

    backend: Literal["auto", "gloo", "nccl"]
    """auto: nccl on GPUs, gloo where ranks share one (default: 'auto')"""

    channels_last: bool
    """on GPUs: store images of convolutional models channels last (default: True)"""

    compile: bool
    """torch.compile each stage (default: False)"""

    cuda_graph: Literal["auto", "on", "off"]
    """replay stages as CUDA graphs (auto: one rank, where faster) (default: 'auto')"""

    deterministic: bool
    """on GPUs: compute the same bits every time (default: False)"""

    threads: int | None
    """threads per CPU rank (default: 1, with --placement auto what is fastest)"""

    unproven: bool
    """train a cut without proof that its stages compute what the model does (default: False)"""

    dynamic: bool
    """let ranks choose between forward and backward at run time (default: False)"""

    emulate: bool
    """run every rank in one process (default: False)"""

    eval_every: int | None
    """batches between evaluations (0: only at the end) (default: with --val, an epoch)"""

    early_stop: int | None
    """stop after N evaluations without a better --best (default metric: loss)"""

    log_every: int
    """batches between log lines (default: 10)"""

    monitor_every: float
    """seconds between samples of memory, load and power (0: none) (default: 1.0)"""

    track: Literal["none", "tensorboard", "wandb", "mlflow"]
    """also send metrics to a tracker (default: 'none')"""

    export: str | PathLike[str] | None
    """write the trained weights to a .safetensors file"""

    resume: str | PathLike[str] | None
    """resume a run from its newest checkpoint, or from a given one (RUN/best: its best)"""

    runs: str | PathLike[str]
    """folder that holds run folders (default: 'runs')"""

    bucket: int
    """MiB of gradients per all-reduce (0: one parameter) (default: 25)"""

    timeout: float
    """seconds at one action after which a rank counts as hung (default: 600.0)"""

    start_timeout: float
    """the same before the first update and while saving (default: 3600.0)"""

    max_restarts: int | None
    """restarts after a fault (default: 3 where the run keeps checkpoints, 0 otherwise)"""

    nodes: str | None
    """addresses or names of all machines, the host first, or slurm: 10.0.0.1,10.0.0.2"""

    node_index: int | None
    """index of this machine in --nodes (default: by its address)"""

    token: str | PathLike[str] | None
    """file with the secret that all machines share (default: $STAGEWRIGHT_TOKEN)"""

    join_timeout: float
    """seconds to wait for all machines (default: 600.0)"""

    lost_timeout: float
    """seconds of silence after which a machine counts as lost (default: 60.0)"""

class PlanOptions(TypedDict, total=False):
    """Those of `stagewright plan`, as keywords of `stagewright.plan`."""

    cluster: str | PathLike[str] | None
    """a cluster of the catalog, or a cluster file"""

    devices: int | None
    """use only the first N devices of the cluster"""

    precision: Literal["auto", "fp64", "fp32", "ieee", "tf32", "bf16", "fp16"]
    """fp64, fp32, ieee, tf32, bf16, fp16; auto: bf16 on GPUs of this machine that have it, else fp32 (default:
    'auto')"""

    software: str
    """whose efficiency to assume: stagewright, pytorch, oneflow or pipedream (default: 'stagewright')"""

    optimizer: str
    """optimizer, for its memory (default: 'sgd')"""

    ema: float | None
    """count averaged weights too"""

    image: int | None
    """side of the images in pixels (default: the model's, or that of smaller data)"""

    classes: int | None
    """outputs of a model by name (default: the data's classes)"""

    freeze: str | None
    """parameters that are not trained: 'trunk.*,stem', or all but some: '!head'"""

    batch: int | None
    """samples per update (default: what suits the devices)"""

    mode: Literal["sync", "stale", "pipedream"] | Sequence[Literal["sync", "stale", "pipedream"]] | None
    """try only this mode; may be repeated"""

    microbatches: int | None
    """microbatches per batch (default: try several)"""

    staleness: int | None
    """most updates that a stage may lag"""

class SimulateOptions(TypedDict, total=False):
    """Those of `stagewright simulate`, as keywords of `stagewright.simulate`."""

    cluster: str | PathLike[str] | None
    """a cluster of the catalog, or a cluster file"""

    devices: int | None
    """use only the first N devices of the cluster"""

    precision: Literal["auto", "fp64", "fp32", "ieee", "tf32", "bf16", "fp16"]
    """fp64, fp32, ieee, tf32, bf16, fp16; auto: bf16 on GPUs of this machine that have it, else fp32 (default:
    'auto')"""

    software: str
    """whose efficiency to assume: stagewright, pytorch, oneflow or pipedream (default: 'stagewright')"""

    optimizer: str
    """optimizer, for its memory (default: 'sgd')"""

    ema: float | None
    """count averaged weights too"""

    image: int | None
    """side of the images in pixels (default: the model's, or that of smaller data)"""

    classes: int | None
    """outputs of a model by name (default: the data's classes)"""

    freeze: str | None
    """parameters that are not trained: 'trunk.*,stem', or all but some: '!head'"""

    mode: Literal["dp", "sync", "stale", "pipedream"] | None
    """how far weights may lag (default: stale; dp for one stage)"""

    placement: str | None
    """devices of each stage: 0:0-6.0:7 (default: one stage on all)"""

    shares: str | None
    """each stage's share of the operations: 11:7"""

    cut: str | None
    """first unit of each later stage (default: the planner's choice)"""

    batch: int | None
    """samples per update"""

    microbatches: int | None
    """microbatches per batch"""

    staleness: int | None
    """most updates that a stage may lag in mode stale"""

class ProfileOptions(TypedDict, total=False):
    """Those of `stagewright profile`, as keywords of `stagewright.profile`."""

    samples: str
    """microbatch sizes (default: '8,16')"""

    precision: str
    """fp64, fp32, ieee, tf32, bf16, fp16; auto: bf16 on GPUs of this machine that have it, else fp32; or several:
    fp32,bf16 (default: 'auto')"""

    device: Literal["cpu", "cuda"]
    """kind of device (default: 'cpu')"""

    threads: int
    """threads per CPU rank (default: 1)"""

    together: int
    """processes at once, as ranks would run (default: 1)"""

    image: int | None
    """side of the images in pixels (default: the model's, or that of smaller data)"""

    classes: int | None
    """outputs of a model by name (default: the data's classes)"""

    freeze: str | None
    """parameters that are not trained: 'trunk.*,stem', or all but some: '!head'"""

    pipedream: str | PathLike[str] | None
    """import PipeDream's graph.txt, measured at --samples"""

class InspectOptions(TypedDict, total=False):
    """Those of `stagewright inspect`, as keywords of `stagewright.inspect`."""

    stages: int | None
    """stages of the even cut to prove (default: 4)"""

    cut: str | None
    """prove this cut: the first unit or module of each later stage"""

    inputs: str | None
    """fields that the model takes: image, or input_ids,labels=input_ids (default: all but targets)"""

    image: int | None
    """side of the images in pixels (default: the model's, or that of smaller data)"""

    classes: int | None
    """outputs of a model by name (default: the data's classes)"""

    init: str | PathLike[str] | None
    """start from the weights of a .safetensors file, or of a folder with shards"""

    freeze: str | None
    """parameters that are not trained: 'trunk.*,stem', or all but some: '!head'"""

    seed: int
    """seed of weights, sample order and dropout (default: 0)"""
