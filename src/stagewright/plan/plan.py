"""The plan: which ranks run which stage, on which microbatches, with which version of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from stagewright.cluster.placement import Placement, format_placement
from stagewright.cluster.topology import Device
from stagewright.config.modes import Mode as Mode


def gradient_buffers(versions: Any, replicas: Any, is_tied: Any = False) -> Any:
    """Gradient buffers of a stage: two if the next round's backward need not wait for this round's sum over ranks.

    Takes integers or arrays of them.
    """
    return 1 + ((versions > 1) & ((replicas > 1) | is_tied))


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous run of units and the ranks that each hold a replica of it."""

    index: int
    count: int
    ranks: tuple[int, ...]
    round: int  # microbatches of one update: the batch's M, or r in pipedream
    versions: int = 1
    depth: int = 1
    origin: int = 0  # the update at which this plan began
    is_tied: bool = False  # a home of a tied parameter

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def num_gradients(self) -> int:
        return int(gradient_buffers(self.versions, self.replicas, self.is_tied))

    def rank_of(self, microbatch: int) -> int:
        """The rank that runs a microbatch."""
        return self.ranks[microbatch % len(self.ranks)]

    def update_of(self, microbatch: int) -> int:
        """The update that a microbatch's gradient joins."""
        return microbatch // self.round

    def version_of(self, microbatch: int) -> int:
        """The version of the weights that forward and backward of a microbatch use."""
        return self.version_for(microbatch // self.round)

    def version_for(self, update: int) -> int:
        """The version of the weights that the microbatches of an update use."""
        return max(self.origin, update + 1 - self.versions)

    def own(self, rank: int, span: range) -> range:
        """The microbatches of a span that one rank's replica runs."""
        replicas = len(self.ranks)
        return range(span.start + (self.ranks.index(rank) - span.start) % replicas, span.stop, replicas)


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A trained parameter that several stages use: it has a home in each."""

    names: tuple[str, ...]  # every name of it in the model, the first one first
    homes: tuple[int, ...]  # stages
    size: int = 0  # numbers that it consists of


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters whose homes overlap: their gradients are summed over all ranks of all homes, once per update.

    A stage belongs to one tie at most. All its stages have the same versions and the same rounds.
    """

    stages: tuple[int, ...]
    parameters: tuple[TiedParameter, ...] = ()

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        what = f"'{self.parameters[0].names[0]}'{more}" if self.parameters else "a parameter"
        return f"stages {stages} share {what}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rank runs what, when, with which weights: everything together; docs/design.md has the rules."""

    mode: Mode
    batch: int
    microbatches: int
    devices: tuple[Device, ...]  # of rank 0, 1, ...
    stages: tuple[Stage, ...]
    cuts: tuple[str, ...] = ()  # the first unit of each stage after the first
    agree: bool = False  # all ranks exchange norms before an update, which is of the same batch everywhere
    flags: bool = False  # stages that lag pass on whether a gradient overflowed
    ties: tuple[Tie, ...] = ()
    ties_agree: bool = False  # the ranks of a tie exchange norms before an update: homes that lag, and clip

    @property
    def world(self) -> int:
        return len(self.devices)

    @property
    def samples(self) -> int:
        """Samples of a microbatch."""
        return self.batch // self.microbatches

    @property
    def is_synchronous(self) -> bool:
        """Whether every batch sees the last update everywhere."""
        return self.mode.preset.is_per_batch and all(stage.versions == 1 for stage in self.stages)

    @property
    def lag(self) -> int:
        """How many updates the weights of the stage that lags most are behind."""
        return max(stage.versions for stage in self.stages) - 1

    @property
    def widest(self) -> int:
        """The most replicas of a stage."""
        return max(stage.replicas for stage in self.stages)

    @property
    def tied(self) -> list[TiedParameter]:
        """The parameters of all ties."""
        return [parameter for tie in self.ties for parameter in tie.parameters]

    @property
    def decision_delay(self) -> int:
        """Batches until the last stage knows whether one was skipped: L of the design."""
        return 1 if self.is_synchronous else max(len(self.stages), self.stages[0].versions)

    @property
    def shape(self) -> str:
        """Replicas of each stage: 7-1."""
        return "-".join(str(stage.replicas) for stage in self.stages)

    @property
    def placement(self) -> Placement:
        return tuple(tuple(self.devices[rank] for rank in stage.ranks) for stage in self.stages)

    @property
    def alignment(self) -> int:
        """Microbatches after which every stage has finished a round: a run pauses only at its multiples."""
        return math.lcm(*(stage.round for stage in self.stages))

    @property
    def pause_step(self) -> int:
        """Batches after which a batch ends together with every stage's round: checkpoints are at its multiples."""
        return math.lcm(self.alignment, self.microbatches) // self.microbatches

    def boundary(self, batch: int) -> int:
        """The microbatch number at which the pipeline can drain once `batch` batches are done."""
        return -(-batch * self.microbatches // self.alignment) * self.alignment

    def with_microbatches(self, microbatches: int) -> Plan:
        """The plan with the same batch in so many microbatches."""
        rounds = [microbatches if self.mode.preset.is_per_batch else stage.replicas for stage in self.stages]
        stages = (replace(stage, round=round) for stage, round in zip(self.stages, rounds, strict=True))
        return replace(self, microbatches=microbatches, stages=tuple(stages))

    def starting_at(self, batch: int) -> Plan:
        """The plan as it begins after so many batches, trained under other plans."""
        begun = self.boundary(batch)
        return replace(self, stages=tuple(replace(stage, origin=begun // stage.round) for stage in self.stages))

    def computes_as(self, other: Plan) -> bool:
        """Whether the same versions live in the same slots of the same ranks; depth and order may differ."""
        own, others = ((p.batch, p.microbatches, p.cuts, p.ties) for p in (self, other))
        return own == others and [
            (stage.ranks, stage.round, stage.versions, stage.origin) for stage in self.stages
        ] == [(stage.ranks, stage.round, stage.versions, stage.origin) for stage in other.stages]

    def tie_of(self, stage: Stage) -> Tie | None:
        """The tie that a stage belongs to."""
        if not stage.is_tied:
            return None
        return next(tie for tie in self.ties if stage.index in tie.stages)

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The ranks of some stages, each once: those of the first stage first."""
        return tuple(dict.fromkeys(rank for index in stages for rank in self.stages[index].ranks))

    def tied_stage(self, tie: Tie, rank: int) -> Stage:
        """The first stage of a tie that a rank runs: its sum stands under this one."""
        return next(self.stages[index] for index in tie.stages if rank in self.stages[index].ranks)

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if rank in stage.ranks)

    def name_replica(self, rank: int, stage: int | None = None) -> str:
        """`stage 1 replica 0 (rank 7, machine 0)`; without a stage, the first stage of the rank."""
        carried = self.stages_of(rank)[0] if stage is None else self.stages[stage]
        replica, machine = carried.ranks.index(rank), self.devices[rank].machine
        return f"stage {carried.index} replica {replica} (rank {rank}, machine {machine})"

    def describe(self) -> dict[str, object]:
        """The plan as plan.json has it: every choice resolved."""
        return {
            "mode": str(self.mode),
            "placement": format_placement(self.placement),
            "cuts": list(self.cuts),
            "batch": self.batch,
            "microbatches": self.microbatches,
            "versions": [stage.versions for stage in self.stages],
            "depths": [stage.depth for stage in self.stages],
            "agree": self.agree,
            "flags": self.flags,
            **({"ties": [asdict(tie) for tie in self.ties]} if self.ties else {}),
        }
