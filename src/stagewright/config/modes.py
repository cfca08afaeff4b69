"""The modes, presets of versions: how far a stage's weights may lag. docs/design.md, rule 4, has them in words.

A mode is a name with its entry in `PRESETS`, and a case of tests/unit/runtime/stage/test_parity.py. Options, rules,
plans and the search ask the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Number = Any  # an integer, or an array of them
# K of a stage by its place: stages from it to the last, devices behind it, its own devices, and --staleness.
Versions = Callable[[Number, Number, Number, int | None], Number]


class Mode(StrEnum):
    """The name of a mode, as options and plan files have it."""

    DP = "dp"
    SYNC = "sync"
    STALE = "stale"
    PIPEDREAM = "pipedream"

    @property
    def preset(self) -> Preset:
        return PRESETS[self]

    @staticmethod
    def where(wanted: Callable[[Preset], bool]) -> tuple[str, ...]:
        """The names of the modes whose preset is wanted."""
        return tuple(str(mode) for mode, preset in PRESETS.items() if wanted(preset))


@dataclass(frozen=True, slots=True)
class Preset:
    """What a mode is."""

    versions: Versions
    has_stages: bool = True  # a model may be cut; `stagewright plan` searches such modes
    has_staleness: bool = False  # --staleness and --versions choose K
    has_lag: bool = False  # a stage's weights may lag
    is_per_batch: bool = True  # an update is of a batch; else of as many microbatches as the stage has replicas


def _newest(left: Number, behind: Number, size: Number, staleness: int | None) -> Number:
    return 0 * behind + 1


def _at_most_staleness(left: Number, behind: Number, size: Number, staleness: int | None) -> Number:
    """min(S-s, n+1): a stage lags by the stages behind it, by at most n updates."""
    return 0 * behind + (left if staleness is None else min(left, staleness + 1))


def _rounds_in_flight(left: Number, behind: Number, size: Number, staleness: int | None) -> Number:
    """ceil(sum of r_t for t >= s, / r_s)."""
    return -(-(behind + size) // size)


PRESETS: Mapping[Mode, Preset] = {
    Mode.DP: Preset(_newest, has_stages=False),
    Mode.SYNC: Preset(_newest),
    Mode.STALE: Preset(_at_most_staleness, has_staleness=True, has_lag=True),
    Mode.PIPEDREAM: Preset(_rounds_in_flight, has_lag=True, is_per_batch=False),
}
