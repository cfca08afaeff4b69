"""What happens in a run, as values, and the one codec by which they travel: JSON text.

A `Record` is one line of metrics.jsonl. An `Event` is what a rank (or on a restart its supervisor) sends to the log of
machine 0, which makes records of events. A `Usage`, with its `GpuUsage` and `RankUsage`, is one line of monitor.jsonl.

rank ── encode(event) ─► store ── decode(text) ─► log ── encode(record) ─► metrics.jsonl ── read_records ─► report

Type hints are the format: `build` makes any of our dataclasses of a JSON object and checks every value against its
hint. Integers are counts, floats are finite and lists stand for tuples. A field with a default may be missing, as a
new one is in older files; an `Evaluated` of older files has its metrics as fields. What a rank sends is ours, so
`decode` raises; a file may be torn or edited, so `read_records` and `read_usage` leave out what does not fit.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from stagewright.errors import counted
from stagewright.metrics import LOSS, Criterion, Span, format_metric, metric_label, metric_values

Loss = Annotated[float, "may be infinite or NaN, as in a run that diverged"]
SignedInt = Annotated[int, "may be negative"]
_MOST_COUNT, _MOST_SIZE = 2**63, 1e300  # beyond these, arithmetic overflows
_OLDER_METRICS = ("top1", "top5")  # that an evaluation had as fields of its own
_T = TypeVar("_T")


class DecodeError(ValueError):
    """JSON that is not the value that it should be; the message names its kind and field."""


@dataclass(frozen=True, slots=True)
class Step:
    """One trained batch."""

    batch: int  # from 0
    epoch: int  # from 0
    loss: Loss
    lr: float
    seconds: float  # since the run started to train
    images_per_second: float  # over the last 20 batches, or a second; 0 where unknown. Of older runs: of this one
    loss_scale: float | None = None  # of its gradients, in fp16


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation, after `batch` batches."""

    batch: int
    samples: int
    loss: Loss
    metrics: Mapping[str, Loss] = field(default_factory=dict)  # by name, in the order that they were asked for

    @staticmethod
    def of(batch: int, scores: Iterable[Score]) -> Evaluated:
        """The evaluation that the scores of all replicas add up to."""
        total = sum(scores, Score())
        values = metric_values(total.totals)
        return Evaluated(batch, total.samples, values.pop(LOSS, 0.0), values)


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation so far by a criterion, and how many there were since that, none of them better."""

    criterion: Criterion
    batch: int = 0  # after which it was made
    value: float | None = None  # of the metric; None before there was one
    since: int = 0

    def after(self, evaluated: Evaluated) -> Best:
        """The best evaluation after one more."""
        metric = self.criterion.metric
        value = evaluated.loss if metric == LOSS else evaluated.metrics.get(metric)
        if value is not None and self.criterion.is_better(value, self.value):
            return Best(self.criterion, evaluated.batch, value)
        return replace(self, since=self.since + 1)

    def words(self, than: str = "") -> str:
        """`top-1 91.2%`, for people; `top-1 than 91.2%` if `than` says so."""
        label = metric_label(self.criterion.metric)
        return label if self.value is None else f"{label} {than}{format_metric(self.criterion.metric, self.value)}"

    def stall(self) -> str:
        """Why a run stops early: `no better top-1 than 91.2% (step 120) in 3 evaluations`."""
        found = self.words() if self.value is None else f"better {self.words('than ')} (step {self.batch})"
        return f"no {found} in {counted(self.since, 'evaluation')}"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A data record that could not be read; another one took its place."""

    index: int
    reason: str  # starts with the record's name


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint after `batch` batches is on the disk."""

    batch: int
    bytes: int
    seconds: float  # that training paused
    waited: float = 0.0  # of these seconds, for earlier checkpoints to reach the disk
    best: Best | None = None  # of a checkpoint that is the best so far


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A checkpoint after `batch` batches could not be written."""

    batch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """The ranks started again after a fault, after `batch` batches."""

    batch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run resumed after `batch` batches."""

    batch: int
    checkpoint: str
    plan: str  # of the checkpoint, as in `stale 7-1`


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over the samples that one replica has evaluated; scores add up by name over microbatches and replicas."""

    samples: int = 0
    totals: Mapping[str, tuple[Loss, float]] = field(default_factory=dict)  # total and count of the loss and metrics

    def __add__(self, other: Score) -> Score:
        totals = dict(self.totals)
        for name, (total, count) in other.totals.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + total, before[1] + count)
        return Score(self.samples + other.samples, totals)


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has built its worker and starts to train; its clock, so that times of other machines can be compared."""

    rank: int
    time: float  # of its monotonic clock
    clock: str  # which clock that is: ranks of one machine have the same


@dataclass(frozen=True, slots=True)
class BatchLosses:
    """The losses of a batch's microbatches that one rank has computed."""

    rank: int
    losses: tuple[tuple[int, float, float], ...]  # microbatch, its total and count; of a mean: the loss and 1
    time: float  # of the rank's monotonic clock
    scale: float | None = None  # of their gradients, in fp16
    rate: float | None = None  # of their update, where a script sets it


@dataclass(frozen=True, slots=True)
class Scored:
    """One replica's part of the evaluation after `batch` batches."""

    rank: int
    batch: int
    score: Score


@dataclass(frozen=True, slots=True)
class Skipped:
    """A stage skipped the update of a batch because its gradients overflowed."""

    stage: int
    batch: int


@dataclass(frozen=True, slots=True)
class Called:
    """What a rank's script asks of its engine, and where; every rank asks for the same in the same order."""

    rank: int
    number: int  # of the call, from 0
    what: str
    where: str  # file and line
    contents: str = ""  # a hash of the samples or of the model that it is given


@dataclass(frozen=True, slots=True)
class Shortage:
    """A rank ran out of GPU memory."""

    rank: int
    room: int  # bytes that it could have had: those it holds and those that are free


@dataclass(frozen=True, slots=True)
class Stopped:
    """A rank was asked to stop, and did after `batch` batches."""

    rank: int
    batch: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A rank is done; its last actions, for the trace."""

    rank: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint: tensors by the parameter names of the whole model."""

    name: str
    stage: int
    kind: str  # master, ema, slot/0, optimizer/exp_avg, own/NAdam/exp_avg (of a user's optimizer), buffers/0
    bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The state of one replica besides its tensors."""

    stage: int
    replica: int  # its index in the stage
    count: int  # microbatches in its BatchNorm statistics
    optimizer: Mapping[str, float] = field(default_factory=dict)  # its scalars
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShareSaved:
    """A rank has written its share of the checkpoint after `batch` batches, or could not because of an error."""

    rank: int
    batch: int
    seconds: float  # that training paused
    replicas: tuple[ReplicaState, ...] = ()
    files: tuple[File, ...] = ()
    error: str | None = None
    waited: float = 0.0  # of these seconds, for earlier checkpoints to reach the disk
    best: Best | None = None  # where evaluations are compared


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a rank, and the action at which it was raised."""

    rank: int
    error: str  # its type
    cause: str  # for people
    action: str | None = None  # None before the first
    stage: int | None = None
    is_secondary: bool = False  # the rank only lost its peer
    is_users: bool = False  # a restart would fail in the same way
    traceback: str = ""


Record = Step | Evaluated | Replaced | Saved | Unsaved | Restarted | Resumed
Event = (
    Ready
    | BatchLosses
    | Called
    | Scored
    | Skipped
    | Replaced
    | Shortage
    | Stopped
    | Finished
    | ShareSaved
    | Failure
    | Restarted
)
Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """One GPU at one moment, as NVML reports it; None where the driver does not say."""

    uuid: str
    index: int
    memory: int | None  # bytes in use by all processes
    utilisation: float | None  # 0 to 1
    power: float | None = None  # watts
    energy: float | None = None  # joules since the driver was loaded
    temperature: float | None = None  # degrees Celsius
    clock: float | None = None  # of the multiprocessors, in Hz
    throttled: tuple[str, ...] = ()  # the reasons why its clock is reduced
    foreign: int = 0  # processes on it that do not belong to this run


@dataclass(frozen=True, slots=True)
class RankUsage:
    """One rank's process at one moment."""

    rank: int
    memory: int  # resident bytes
    cores: float  # that it kept busy since the moment before
    torch_memory: int | None = None  # bytes that torch has reserved on its device


@dataclass(frozen=True, slots=True)
class Usage:
    """What a run and its machine use at one moment."""

    seconds: float  # since the run started
    cores: float  # that all processes of the machine kept busy
    memory: int  # bytes that all processes of the machine use
    gpus: tuple[GpuUsage, ...]
    ranks: tuple[RankUsage, ...]
    start: int = 0  # batch at which this part of the run resumed


def _named(kinds: Any) -> dict[str, Any]:
    return {kind.__name__.lower(): kind for kind in get_args(kinds)}


_RECORDS, _EVENTS = _named(Record), _named(Event)


def encode(value: Event | Record) -> str:
    """An event or record as a JSON object: its kind, then its fields; those that are None are left out."""
    known = {name: item for name, item in asdict(value).items() if item is not None}
    return json.dumps({"kind": type(value).__name__.lower(), **known})


def decode(text: str | bytes) -> Event:
    """The event of a JSON object; DecodeError with its kind where it is not one."""
    event: Event = _decode(text, _EVENTS)
    return event


def read_records(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Record]]:
    """The lines of metrics.jsonl that are complete, each with its record; all others are left out."""
    return _read(lines, lambda line: _decode(line, _RECORDS))


def read_usage(lines: Iterable[bytes]) -> Iterator[Usage]:
    """The samples of monitor.jsonl; lines that are torn or do not fit are left out."""
    return (usage for _, usage in _read(lines, lambda line: build(Usage, _parse(line))))


def build(kind: type[_T], found: object) -> _T:
    """The dataclass of a JSON object, or an instance of it checked again; DecodeError where a field does not fit."""
    hints, required = _fields(kind)  # type: ignore[arg-type]  # mypy takes classes for unhashable
    if isinstance(found, kind):
        found = {name: getattr(found, name) for name in hints}
    if not isinstance(found, dict):
        raise DecodeError(f"{kind.__name__} is {reprlib.repr(found)}")
    for name in (*sorted(required - found.keys()), *sorted(found.keys() - hints.keys())):
        raise DecodeError(f"{kind.__name__} {'lacks' if name in required else 'has no field'} {reprlib.repr(name)}")
    values = {}
    for name, value in found.items():
        try:
            values[name] = _as(hints[name], value)
        except DecodeError as error:
            raise DecodeError(f"{kind.__name__}.{name}: {error}") from None
    return kind(**values)


def fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is of a type."""
    try:
        _as(hint, value)
    except DecodeError:
        return False
    return True


def _read(lines: Iterable[bytes], decode_line: Callable[[bytes], _T]) -> Iterator[tuple[bytes, _T]]:
    for line in lines:
        try:
            yield line, decode_line(line)
        except DecodeError:
            continue


def _decode(text: str | bytes, kinds: Mapping[str, Any]) -> Any:
    found = _parse(text)
    kind = found.pop("kind", None) if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise DecodeError(f"kind {reprlib.repr(kind)} is unknown; known: {', '.join(kinds)}")
    return build(kinds[kind], _with_metrics(found) if kinds[kind] is Evaluated else found)


def _with_metrics(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of an evaluation; those that older files have for top-1 and top-5 become metrics."""
    if "metrics" in found or not found.keys() & _OLDER_METRICS:
        return found
    metrics = {name: found[name] for name in _OLDER_METRICS if name in found}
    return {name: value for name, value in found.items() if name not in metrics} | {"metrics": metrics}


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{text[:80]!r} is not JSON") from error


@cache
def _fields(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The type of each field of a dataclass, and the fields that can't be missing."""
    required = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    return get_type_hints(kind, include_extras=True), frozenset(required)


def _as(hint: Any, value: Any) -> Any:
    """A JSON value as a type; DecodeError where it is not of that type."""
    if hint in _CHECKS:
        if _CHECKS[hint](value):
            return value
    elif isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value)
    origin, inner = get_origin(hint), get_args(hint)
    if NoneType in inner:
        return None if value is None else _as(inner[0], value)
    if origin is tuple and isinstance(value, list | tuple):
        hints = inner[:1] * len(value) if inner[1:] == (...,) else inner
        if len(hints) == len(value):
            return tuple(map(_as, hints, value))
    if origin is Mapping and isinstance(value, dict):
        return {str(name): _as(inner[1], item) for name, item in value.items()}
    raise DecodeError(f"{reprlib.repr(value)} is not {getattr(hint, '__name__', hint)}")


_CHECKS: Mapping[Any, Callable[[Any], bool]] = {
    Any: lambda value: True,
    bool: lambda value: isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    int: lambda value: type(value) is int and 0 <= value < _MOST_COUNT,
    SignedInt: lambda value: type(value) is int and abs(value) < _MOST_COUNT,
    float: lambda value: type(value) in (int, float) and abs(value) < _MOST_SIZE,
    Loss: lambda value: type(value) is float or (type(value) is int and abs(value) < _MOST_SIZE),
}
