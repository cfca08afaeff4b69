"""Times a schedule with a cost model: the same programs that ranks run, on lanes instead of devices.

A rank's computes run one after another; messages run beside them, on the edges of the topology that they take, in the
order of time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stagewright.metrics import Span, Timeline
from stagewright.plan import cost
from stagewright.plan.estimate import Estimate
from stagewright.plan.plan import Plan, Stage
from stagewright.schedule.action import COMPUTES, SENDS, SUMS, Action, Op
from stagewright.schedule.check import representative_span
from stagewright.schedule.lower import program
from stagewright.schedule.policy import overlaps
from stagewright.schedule.requires import requires

_TRANSFERS = (*SENDS, *SUMS)
_MOST_COMPUTES = 240  # microbatches times stages of one period, above which it is not simulated whole
_MOST_TURNS = 256
_FEW_RANKS = 16  # up to which every rank is simulated
Times = Mapping[Action, tuple[float, float]]


class Costs(Protocol):
    """How long an action takes, which lanes it occupies for how long, and what else it waits for."""

    def seconds(self, action: Action) -> float: ...

    def lanes(self, action: Action) -> Sequence[tuple[Hashable, float]]: ...

    def waits(self, action: Action) -> Iterable[Action]: ...

    def card(self, rank: int) -> SharedCard | None:
        """The card that a rank computes on together with others; None where it has one of its own."""
        ...


class SharedCard:
    """Computes of several ranks on one card: those that run at the same time share its speed equally.

    Their seconds are those with `ranks` at work; alone a compute is faster by no more than `most`. The clock `_worked`
    counts the seconds that each of the running computes has got, so that they end in the order of when they began.
    """

    def __init__(self, ranks: int, most: float) -> None:
        self._ranks = ranks
        self._most = most
        self._now = 0.0
        self._worked = 0.0
        self._running: list[tuple[float, int, float, Action]] = []
        self._number = itertools.count()

    def begin(self, moment: float, seconds: float, action: Action) -> None:
        self._advance(moment)
        heapq.heappush(self._running, (self._worked + seconds, next(self._number), moment, action))

    def next_end(self) -> float:
        """When the next compute ends if none begins before."""
        return self._now + (self._running[0][0] - self._worked) / self._speed() if self._running else math.inf

    def end(self) -> tuple[Action, float, float]:
        """End the next compute; returns when it began and ended."""
        moment = self.next_end()
        worked, _, begun, action = heapq.heappop(self._running)
        self._now, self._worked = moment, worked
        return action, begun, moment

    def _advance(self, moment: float) -> None:
        if self._running:
            self._worked += (moment - self._now) * self._speed()
        self._now = moment

    def _speed(self) -> float:
        return min(self._most, self._ranks / len(self._running))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Fixed times by stage; other actions take no time."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: float = 0.0
    reduce: float = 0.0

    def seconds(self, action: Action) -> float:
        if action.op is Op.FORWARD:
            return self.forward[action.stage]
        if action.op is Op.BACKWARD:
            return self.backward[action.stage]
        if action.op in SUMS:
            return self.reduce
        return self.transfer if action.op in SENDS else 0.0

    def lanes(self, action: Action) -> Sequence[tuple[Hashable, float]]:
        return ((action.rank, self.seconds(action)),)

    def waits(self, action: Action) -> Iterable[Action]:
        return ()

    def card(self, rank: int) -> SharedCard | None:
        return None


def balanced_costs(plan: Plan) -> StageCosts:
    """The costs of a balanced plan: a stage takes as long as it has replicas, a backward twice as long as a forward."""
    return StageCosts([float(stage.replicas) for stage in plan.stages], [2.0 * stage.replicas for stage in plan.stages])


def reduce_seconds(estimate: Estimate, stage: Stage, rank: int) -> float:
    """Seconds that a rank's reduce takes after its backward, which hides a part where the policy lets them overlap."""
    is_hidden = overlaps(estimate.plan, stage, rank)
    return estimate.exposed(stage.index) if is_hidden else estimate.reduction(stage.index)


class ClusterCosts:
    """A plan's costs on a cluster: units on devices, messages on the edges of its topology."""

    def __init__(self, estimate: Estimate, like: Like | None = None) -> None:
        self._estimate = estimate
        self._like = like
        self._plan = estimate.plan if like is None else like.plan
        self._seconds: dict[tuple[Op, int, int], float] = {}
        self._cards: dict[int, SharedCard] = {}
        self._paths: dict[tuple[Op, int, int, int], tuple[tuple[Hashable, float], ...]] = {}

    def seconds(self, action: Action) -> float:
        if action.op in SENDS:
            return self._message(action)
        key = (action.op, action.stage, action.rank)
        if key not in self._seconds:
            self._seconds[key] = self._other(action)
        return self._seconds[key]

    def card(self, rank: int) -> SharedCard | None:
        number = self._estimate.plan.devices[self._own(rank)].machine
        machine = self._estimate.setting.cluster.machines[number]
        if not machine.is_shared:
            return None
        return self._cards.setdefault(number, SharedCard(machine.devices or 1, machine.most_speedup))

    def _own(self, rank: int) -> int:
        """The rank of the whole plan that a simulated one stands for."""
        return rank if self._like is None else self._like.ranks[rank]

    def _other(self, action: Action) -> float:
        estimate, rank = self._estimate, self._own(action.rank)
        if action.op is Op.FORWARD:
            return estimate.forward(action.stage, rank)
        if action.op is Op.BACKWARD:
            return estimate.backward(action.stage, rank)
        if action.op is Op.UPDATE:
            return estimate.update(action.stage, rank)
        stage = estimate.plan.stages[action.stage]
        if action.op is Op.TIE and (tie := estimate.plan.tie_of(stage)) is not None:
            return estimate.tie(tie)
        return reduce_seconds(estimate, stage, rank) if action.op is Op.REDUCE else 0.0

    def _message(self, action: Action) -> float:
        return max(seconds for _, seconds in self.lanes(action))

    def lanes(self, action: Action) -> Sequence[tuple[Hashable, float]]:
        """Every edge of a message with its seconds on that edge: a fast edge is free for others before a slow one."""
        if action.op not in SENDS:
            return ((action.rank, self.seconds(action)),)
        assert action.peer is not None
        key = (action.op, action.stage, action.rank, action.peer)
        if key not in self._paths:
            backward = action.op is Op.SEND_GRAD
            size = self._estimate.boundary(action.stage - backward, backward=backward)
            self._paths[key] = tuple(self._edges(self._own(action.rank), self._own(action.peer), size))
        return self._paths[key]

    def _edges(self, source: int, target: int, size: float) -> Iterator[tuple[Hashable, float]]:
        estimate, crowds = self._estimate, {} if self._like is None else self._like.crowds
        path = estimate.setting.cluster.path(estimate.plan.devices[source], estimate.plan.devices[target])
        latency = max(link.latency for _, link in path)
        software = estimate.setting.software
        handover = software.handover.bandwidth if software.handover and not software.blocking else math.inf
        for edge, link in path:
            is_own = edge[0][1] == -1  # of one device, which hands the message over
            bandwidth = min(link.bandwidth, handover) if is_own else link.bandwidth
            yield edge, float(cost.transfer_seconds(size * crowds.get(edge, 1.0), bandwidth, latency))

    def waits(self, action: Action) -> Iterator[Action]:
        """If the software passes whole batches, a stage begins when one has arrived and sends when it is done."""
        if not self._estimate.setting.software.whole_batches or action.microbatch is None:
            return
        stage = self._plan.stages[action.stage]
        update = stage.update_of(action.microbatch)
        batch = range(update * stage.round, (update + 1) * stage.round)
        if action.op in SENDS:
            op = Op.FORWARD if action.op is Op.SEND_ACT else Op.BACKWARD
            for own in stage.own(action.rank, batch):
                yield Action(op, action.rank, stage.index, own, stage.version_of(own))
        elif action.op is Op.FORWARD and not stage.is_first:
            yield from self._messages(Op.SEND_ACT, self._plan.stages[stage.index - 1], stage, batch)
        elif action.op is Op.BACKWARD and not stage.is_last:
            yield from self._messages(Op.SEND_GRAD, self._plan.stages[stage.index + 1], stage, batch)

    def _messages(self, op: Op, source: Stage, target: Stage, batch: range) -> Iterator[Action]:
        for microbatch in batch:
            sender, receiver = source.rank_of(microbatch), target.rank_of(microbatch)
            if sender != receiver:
                yield Action(op, sender, source.index, microbatch, None, receiver)


def simulate(plan: Plan, costs: Costs, span: range) -> Timeline:
    """The timeline of a span: each rank runs its program in order; messages and reductions go beside its computes."""
    programs = {rank: list(program(plan, rank, span)) for rank in range(plan.world)}
    return _drawn(programs, Simulation(plan, costs, programs, span.start).run())


def _drawn(programs: Mapping[int, Sequence[Action]], times: Times) -> Timeline:
    return Timeline(
        tuple(
            Span(rank, "compute" if action.op in COMPUTES else "transfer", str(action.op), str(action), *times[action])
            for rank, actions in programs.items()
            for action in actions
            if action.op in COMPUTES or (action.op in _TRANSFERS and times[action][0] < times[action][1])
        )
    )


class Simulation:
    """Runs programs in the order of time: what can begin first begins first, so actions take turns on shared lanes."""

    def __init__(self, plan: Plan, costs: Costs, programs: Mapping[int, Sequence[Action]], start: int) -> None:
        self._plan = plan
        self._costs = costs
        self._start = start
        self._programs = {rank: iter(actions) for rank, actions in programs.items()}
        self._times: dict[Action, tuple[float, float]] = {}
        self._events: list[tuple[float, int, Action]] = []  # what can begin, by when
        self._number = itertools.count()
        self._compute: dict[int, float] = defaultdict(float)
        self._lanes: dict[Hashable, float] = defaultdict(float)
        self._waiting: dict[Action, list[tuple[Action, Iterator[Action], float]]] = defaultdict(list)
        self._card_of = {rank: costs.card(rank) for rank in programs}
        self._cards = list({id(card): card for card in self._card_of.values() if card is not None}.values())

    def run(self) -> Times:
        """When each action begins and ends."""
        for rank in self._programs:
            self._advance(rank)
        while self._events or any(card.next_end() < math.inf for card in self._cards):
            if self._cards:
                card = min(self._cards, key=SharedCard.next_end)
                if not self._events or card.next_end() < self._events[0][0]:
                    self._complete(*card.end())
                    continue
            ready, _, action = heapq.heappop(self._events)
            self._begin(ready, action)
        assert not any(self._waiting.values()), "the schedule deadlocks"
        return self._times

    def _advance(self, rank: int) -> None:
        """Advance a rank to its next compute; messages before it run beside the compute."""
        for action in self._programs[rank]:
            needs = itertools.chain(requires(self._plan, action, self._start), self._costs.waits(action))
            self._collect(action, needs, self._compute[rank])
            if action.op not in _TRANSFERS:
                return

    def _collect(self, action: Action, needs: Iterator[Action], ready: float) -> None:
        """Go through what an action needs; at the first that has no time yet, wait for it and continue from there."""
        for needed in needs:
            known = self._times.get(needed)
            if known is None:
                self._waiting[needed].append((action, needs, ready))
                return
            ready = max(ready, known[1])
        heapq.heappush(self._events, (ready, next(self._number), action))

    def _begin(self, ready: float, action: Action) -> None:
        seconds = self._costs.seconds(action)
        if action.op in _TRANSFERS:
            lanes = self._costs.lanes(action)
            begin = max(ready, *(self._lanes[lane] for lane, _ in lanes))
            for lane, held in lanes:
                self._lanes[lane] = begin + held
        elif seconds and (card := self._card_of[action.rank]):
            card.begin(ready, seconds, action)
            return
        else:
            begin = ready
        self._complete(action, begin, begin + seconds)

    def _complete(self, action: Action, begin: float, end: float) -> None:
        """Note when an action ends, and advance what waits for it."""
        self._times[action] = (begin, end)
        for waiting, needs, since in self._waiting.pop(action, ()):
            self._collect(waiting, needs, max(since, end))
        if action.op not in _TRANSFERS:
            self._compute[action.rank] = end
            self._advance(action.rank)


@dataclass(frozen=True, slots=True)
class Steady:
    """A pipeline once it is full: how long a batch takes, how busy each rank is, and the timeline of the window."""

    batch_seconds: float
    busy: tuple[float, ...]  # share of each rank's time
    timeline: Timeline
    window: tuple[float, float]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is not compute."""
        return 1 - sum(self.busy) / len(self.busy)


def steady(plan: Plan, costs: Costs, *, draws: bool = False) -> Steady:
    """Simulate fill, two periods and drain; read the second period. A long period is not simulated whole.

    The timeline is made only where it is to be drawn.
    """
    period, wait = representative_span(plan, bounded=False).stop, 0
    if period * len(plan.stages) > _MOST_COMPUTES:
        step = math.lcm(plan.alignment, plan.microbatches)
        wait = -(-_filled(plan) // step) * step
        period = max(1, min(period, _MOST_COMPUTES // len(plan.stages)) // step) * step
    first = wait or period
    span = range(first + period + (wait or period))
    programs = {rank: list(program(plan, rank, span)) for rank in range(plan.world)}
    times = Simulation(plan, costs, programs, span.start).run()
    last = plan.stages[-1]
    ends = {
        action.microbatch: times[action][1]
        for rank in last.ranks
        for action in programs[rank]
        if action.op is Op.BACKWARD and action.stage == last.index
    }
    window = (ends[first - 1], ends[first + period - 1])
    busy = tuple(_busy_share(programs[rank], times, window) for rank in range(plan.world))
    timeline = _drawn(programs, times) if draws else Timeline(())
    return Steady((window[1] - window[0]) * plan.microbatches / period, busy, timeline, window)


def _busy_share(actions: Sequence[Action], times: Times, window: tuple[float, float]) -> float:
    """The share of a window in which a rank computes."""
    low, high = window
    busy = 0.0
    for action in actions:
        if action.op in COMPUTES:
            begin, end = times[action]
            busy += max(0.0, min(end, high) - max(begin, low))
    return busy / (high - low) if high > low else 0.0


def _filled(plan: Plan) -> int:
    """Microbatches after which a pipeline is full."""
    return max(max(stage.versions * stage.round, stage.depth * stage.replicas) + stage.round for stage in plan.stages)


# --- Like ranks, simulated once ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Like:
    """A plan whose replicas form pipelines of their own: one of these, which stands for all."""

    plan: Plan
    ranks: tuple[int, ...]  # of the whole plan
    copies: int
    crowds: Mapping[Hashable, float]  # by edge: messages of all pipelines for one of this one's


def find_like(plan: Plan, estimate: Estimate) -> Like | None:
    """One of the equal pipelines of a plan; None where they are not equal, or there is only one.

    Microbatch i runs on replica i mod r of each stage. Where g divides every r and the microbatches of a round, those
    with one i mod g meet only replicas with that remainder: g pipelines, which share nothing but links.
    """
    copies = math.gcd(plan.microbatches, *(stage.replicas for stage in plan.stages))
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    if copies == 1 or len(set(ranks)) != len(ranks):
        return None
    for stage in plan.stages:
        kinds = [estimate.kind(rank) for rank in stage.ranks]
        if len(set(kinds)) > 1:
            return None
    kept = [rank for stage in plan.stages for rank in stage.ranks[::copies]]
    order = sorted(kept)
    number = {rank: index for index, rank in enumerate(order)}
    stages = tuple(
        replace(
            stage,
            ranks=tuple(number[rank] for rank in stage.ranks[::copies]),
            round=stage.round // copies,
        )
        for stage in plan.stages
    )
    small = replace(
        plan,
        batch=plan.batch // copies,
        microbatches=plan.microbatches // copies,
        devices=tuple(plan.devices[rank] for rank in order),
        stages=stages,
    )
    return Like(small, tuple(order), copies, _crowds(plan, estimate, copies))


def _crowds(plan: Plan, estimate: Estimate, copies: int) -> dict[Hashable, float]:
    """How many messages cross an edge for every one of the first pipeline's that does."""
    every: dict[Hashable, int] = defaultdict(int)
    own: dict[Hashable, int] = defaultdict(int)
    for stage, behind in itertools.pairwise(plan.stages):
        turns = math.lcm(stage.replicas, behind.replicas)
        for turn in range(min(turns, _MOST_TURNS * copies)):
            source, target = plan.devices[stage.rank_of(turn)], plan.devices[behind.rank_of(turn)]
            for ends in ((source, target), (target, source)):
                for edge, _ in estimate.setting.cluster.path(*ends):
                    every[edge] += 1
                    own[edge] += turn % copies == 0
    return {edge: every[edge] / count for edge, count in own.items() if count}


def steady_state(estimate: Estimate, *, draws: bool = False) -> Steady:
    """A plan of several stages once it is full, with like pipelines simulated once where there are many ranks."""
    plan = estimate.plan
    software = estimate.setting.software
    is_small = draws or plan.world <= _FEW_RANKS or software.whole_batches
    like = None if is_small else find_like(plan, estimate)
    if like is None:
        return steady(plan, ClusterCosts(estimate), draws=draws)
    found = steady(like.plan, ClusterCosts(estimate, like))
    shares = dict(zip(like.ranks, found.busy, strict=True))
    busy = [0.0] * plan.world
    for stage in plan.stages:
        for index, rank in enumerate(stage.ranks):
            busy[rank] = shares[stage.ranks[index - index % like.copies]]
    return replace(found, busy=tuple(busy))
