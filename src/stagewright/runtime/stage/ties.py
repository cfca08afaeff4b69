"""Tied parameters on one rank: their gradients are summed over all ranks of all their homes, once per update.

A rank that runs several homes joins once: it adds their gradients up first, and copies the sum to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagewright.plan.plan import Plan, Tie, TiedParameter
from stagewright.runtime.comm.transport import AllOf, Collective, Pending
from stagewright.runtime.stage.gradients import Norms
from stagewright.runtime.stage.replica import Replica
from stagewright.runtime.stage.versions import Parameter

Collect = Callable[[str, Sequence[int]], Collective]


@dataclass(frozen=True, slots=True)
class TiedHere:
    """One tied parameter on this rank: its place among the parameters of each home that the rank runs."""

    name: str
    homes: tuple[int, ...]  # all stages that have it
    places: Mapping[int, int]  # by stage
    collective: Collective  # of all ranks of all homes
    ranks: tuple[int, ...]


class TieOnRank:
    """What a rank does for one tie."""

    def __init__(
        self,
        tie: Tie,
        replicas: Mapping[int, Replica],
        parameters: Sequence[TiedHere],
        norms: Norms,
        *,
        is_conditional: bool,
    ) -> None:
        self.stages = tuple(stage for stage in tie.stages if stage in replicas)
        self.parameters = parameters
        self.norms = norms
        self._replicas = replicas
        self._is_conditional = is_conditional

    def sum(self, update: int) -> None:
        """Start to sum the gradients of an update; part of what the homes' `GradientBuffers.pending` waits for."""
        sums: list[Pending] = []
        copies: list[tuple[Tensor, Tensor]] = []
        flags: dict[int, dict[int, Tensor]] = {stage: {} for stage in self.stages}
        for parameter in self.parameters:
            parts = [
                self._replicas[stage].gradients.tied_part(update, index) for stage, index in parameter.places.items()
            ]
            (target, _), *others = parts
            for part, _ in others:
                target += part
                copies.append((part, target))
            sums.append(parameter.collective.sum(target))
            if self._is_conditional:
                flag = torch.full((1,), float(any(is_reached for _, is_reached in parts)), device=target.device)
                sums.append(parameter.collective.sum(flag))
                for stage, index in parameter.places.items():
                    flags[stage][index] = flag
        pending = _Once(sums, copies)
        for stage in self.stages:
            self._replicas[stage].gradients.add_tie(update, pending, flags[stage])

    def agree(self, update: int, rank: int) -> None:
        """Exchange the norms of the homes, each from its stage's first replica; their gradients are whole."""
        first = [self._replicas[stage] for stage in self.stages if self._replicas[stage].stage.ranks[0] == rank]
        own = {r.stage.index: r.gradients.norm(update) * r.gradients.factor for r in first}
        self.norms.exchange(own, update)

    def norms_of(self, stage: int, update: int) -> tuple[Tensor, dict[int, Tensor]]:
        """The norm of a home's gradient, and for each tied parameter of it the norms of all homes."""
        norms = self.norms.squares(update).sqrt()
        places = [(parameter.places[stage], parameter) for parameter in self.parameters if stage in parameter.places]
        return norms[stage], {index: norms[list(parameter.homes)] for index, parameter in places}


class _Once:
    """Sums as one, whose result is copied to other places once they are complete."""

    def __init__(self, sums: Sequence[Pending], copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._sums = AllOf(sums)
        self._copies = copies
        self._is_done = False

    def is_completed(self) -> bool:
        return self._is_done or self._sums.is_completed()

    def wait(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._sums.wait()
            for target, source in self._copies:
                target.copy_(source)


def places_of(tie: Tie | None, stage: int, parameters: Sequence[Parameter]) -> dict[TiedParameter, int]:
    """The tied parameters of a home: their places among its parameters, where any gradient reaches them."""
    held = {name: index for index, own in enumerate(parameters) for name in own.names}
    found = {}
    for parameter in tie.parameters if tie else ():
        index = next((held[name] for name in parameter.names if name in held), None)
        if index is not None and stage in parameter.homes:
            found[parameter] = index
    return found


def connect_ties(
    plan: Plan, rank: int, replicas: Mapping[int, Replica], collect: Collect, *, is_conditional: bool
) -> dict[int, TieOnRank]:
    """The ties of a rank, by each stage of them that it runs; every rank opens the collectives in the same order."""
    ties: dict[int, TieOnRank] = {}
    for number, tie in enumerate(plan.ties):
        ranks = plan.ranks_of(tie.stages)
        if rank not in ranks:
            continue
        everyone = collect(f"tie/{number}", ranks)
        own = [stage for stage in tie.stages if stage in replicas]
        found = {stage: places_of(tie, stage, replicas[stage].ring.parameters) for stage in own}
        collectives = {tie.stages: everyone}
        parameters = []
        for parameter in tie.parameters:
            homes, members = parameter.homes, plan.ranks_of(parameter.homes)
            if rank not in members:
                continue
            if homes not in collectives:
                collectives[homes] = collect(f"tie/{number}/{'-'.join(map(str, homes))}", members)
            places = {stage: found[stage][parameter] for stage in own if parameter in found[stage]}
            if places:
                parameters.append(TiedHere(parameter.names[0], homes, places, collectives[homes], members))
        # Of their own: where scheduling is dynamic, ranks join exchanges and sums in different orders.
        norms = Norms(len(plan.stages), collect(f"tie/{number}/norms", ranks if plan.ties_agree else (rank,)))
        joined = TieOnRank(tie, replicas, parameters, norms, is_conditional=is_conditional)
        ties |= dict.fromkeys(joined.stages, joined)
    return ties
