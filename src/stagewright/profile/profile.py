"""The profile of a model: time and bytes of every unit, at the measured microbatch sizes and precisions.

Sizes between the measured ones are interpolated; a size outside them is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stagewright.errors import UserError
from stagewright.events import DecodeError, build
from stagewright.files import read_text, write_text

FORMAT = "stagewright-profile-1"
_SECONDS = ("forward", "backward")  # fields of a unit that grow with the microbatch
_BYTES = ("output", "live", "live_gradient", "saved", "workspace")


class NotProfiled(UserError):
    """A microbatch is smaller or larger than all measured ones."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit on one microbatch: seconds and bytes."""

    name: str
    kind: str
    forward: float
    backward: float
    parameters: int  # trainable elements
    output: int  # bytes it returns
    live: int  # bytes that cross a cut after it, forward
    live_gradient: int  # bytes that cross the same cut backward
    saved: int  # bytes it keeps for backward
    workspace: int = 0  # bytes it borrows while it runs
    begins: bool = True  # whether a stage can begin with it
    frozen: int = 0  # elements of parameters that are not trained

    def joined(self, following: Unit) -> Unit:
        """This unit and the next one as one: what crosses a cut after it is what crosses one after the next."""
        return replace(
            self,
            forward=self.forward + following.forward,
            backward=self.backward + following.backward,
            parameters=self.parameters + following.parameters,
            frozen=self.frozen + following.frozen,
            output=following.output,
            live=following.live,
            live_gradient=following.live_gradient,
            saved=self.saved + following.saved,
            workspace=max(self.workspace, following.workspace),
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Every unit at one precision and microbatch size."""

    precision: str
    samples: int
    units: tuple[Unit, ...]

    @property
    def seconds(self) -> float:
        return sum(unit.forward + unit.backward for unit in self.units)

    def of_stages(self) -> Table:
        """The units that stages can begin with, each with those behind it that none can begin with."""
        if all(unit.begins for unit in self.units):
            return self
        joined: list[Unit] = []
        for unit in self.units:
            if joined and not unit.begins:
                joined[-1] = joined[-1].joined(unit)
            else:
                joined.append(unit)
        return replace(self, units=tuple(joined))


@dataclass(frozen=True, slots=True)
class Transfer:
    """The measured speed of transfers between two ranks: seconds = latency + bytes / bandwidth."""

    source: int
    target: int
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The peak rates of the device, measured together with the units."""

    matrix: Mapping[str, float]  # operations per second, by precision
    copy: float  # bytes per second, reads and writes counted
    update: float  # bytes of weights per second that the optimizer updates
    reduce: float | None = None  # bytes of gradients per second in an all-reduce of two ranks
    transfers: tuple[Transfer, ...] = ()
    overhead: float = 0.0  # seconds per microbatch and rank in addition to its units
    host: float | None = None  # bytes per second that all ranks' copies through host memory get together
    gloo_reduce: float | None = None  # the same as `reduce` and `host` of sums over gloo, as stock PyTorch has them
    gloo_host: float | None = None
    alone: float | None = None  # times that a pass is faster while the other processes on the same card do nothing


@dataclass(frozen=True, slots=True, repr=False)
class Profile:
    """The tables of one model on one device."""

    model: str
    device: str
    software: str
    input: tuple[int, ...]  # shape of one sample
    together: int  # processes that ran at once while it was measured
    ceilings: Ceilings | None
    tables: tuple[Table, ...]

    def __repr__(self) -> str:
        times = ", ".join(f"{t.precision} {t.samples}: {t.seconds * 1e3:.1f} ms" for t in self.tables)
        return f"Profile({self.model} on {self.device}: {len(self.tables[0].units)} units; {times})"

    def at(self, precision: str, samples: int) -> Table:
        """The table of a precision and microbatch size: measured, or interpolated between two measured sizes."""
        sizes = self._sizes(precision)
        if samples in sizes:
            return sizes[samples]
        below = max((size for size in sizes if size < samples), default=None)
        above = min((size for size in sizes if size > samples), default=None)
        if below is None or above is None:
            covered = str(min(sizes)) if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
            raise NotProfiled(
                f"the profile of {self.model} covers microbatches of {covered} samples but the plan's have "
                f"{samples}; profile again with --samples {samples}"
            )
        return _between(sizes[below], sizes[above], samples)

    def reaching(self, samples: int) -> Profile:
        """The same with tables of larger microbatches where it has none: units take as much more a sample as measured.

        No unit gets faster than at the largest size that was measured.
        """
        added = []
        for precision in dict.fromkeys(table.precision for table in self.tables):
            *lower, largest = (table for _, table in sorted(self._sizes(precision).items()))
            if largest.samples < samples:
                added.append(_between(lower[-1] if lower else largest, largest, samples))
        return replace(self, tables=(*self.tables, *added)) if added else self

    def over_gloo(self) -> Profile:
        """The same with sums over gloo, as stock PyTorch has them; an older profile has no other."""
        found = self.ceilings
        if found is None or found.gloo_reduce is None:
            return self
        return replace(self, ceilings=replace(found, reduce=found.gloo_reduce, host=found.gloo_host))

    def covered(self, precision: str) -> tuple[int, int]:
        """The smallest and the largest microbatch size that `at` accepts."""
        sizes = self._sizes(precision)
        return min(sizes), max(sizes)

    def _sizes(self, precision: str) -> dict[int, Table]:
        sizes = {table.samples: table for table in self.tables if table.precision == precision}
        if not sizes:
            known = sorted({table.precision for table in self.tables})
            raise UserError(
                f"the profile of {self.model} has precision {', '.join(known)} but {precision} was asked for; "
                f"profile again with --precision {precision}"
            )
        return sizes

    @property
    def is_imported(self) -> bool:
        """Whether it was imported from PipeDream's file, whose nodes are not the model's units."""
        return self.device == "pipedream"

    def require(self, model: str, units: Sequence[str]) -> None:
        """Raise unless this profile has exactly these units."""
        own = [unit.name for unit in self.tables[0].units]
        if own == list(units):
            return
        if self.is_imported:
            raise UserError(
                f"the profile of {self.model} was imported, and its {len(own)} nodes are not the {len(units)} units "
                f"of {model}; measure those with stagewright profile {model}, or use this one with plan or simulate"
            )
        first = next((a for a, b in zip(own, units, strict=False) if a != b), "the end")
        raise UserError(
            f"the profile is of {self.model} ({len(own)} units) but the model is {model} ({len(units)} units); "
            f"they differ at '{first}'; profile {model} itself"
        )

    def write(self, path: str | Path) -> None:
        """Save as JSON."""
        write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))


def read_profile(path: str | Path) -> Profile:
    """Load a saved profile."""
    try:
        content: Any = json.loads(read_text(path))
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"profile {path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise UserError(f"profile {path} is not a {FORMAT} file; make one with stagewright profile")
    try:
        profile = build(Profile, content)
    except DecodeError as error:
        raise UserError(f"profile {path}: {error}; profile again") from error
    if not profile.tables or not all(table.units for table in profile.tables):
        raise UserError(f"profile {path} has no units; profile again")
    names = [unit.name for unit in profile.tables[0].units]
    for table in profile.tables:
        if [unit.name for unit in table.units] != names:
            raise UserError(f"profile {path}: its table of {table.samples} samples has other units; profile again")
        if table.samples < 1:
            raise UserError(f"profile {path} has a table of {table.samples} samples; it must be at least 1")
        for unit in table.units:
            if min(unit.forward, unit.backward) < 0:
                raise UserError(f"profile {path}: unit '{unit.name}' takes less than no time; profile again")
    return profile


def _between(below: Table, above: Table, samples: int) -> Table:
    """The units at another size than two others: in proportion from one to the other, or beyond the larger."""

    def mix(low: Unit, high: Unit, name: str) -> float:
        at_low, at_high = getattr(low, name), getattr(high, name)
        if below.samples == above.samples:
            return float(at_high * samples / above.samples)
        mixed = at_low + (samples - below.samples) / (above.samples - below.samples) * (at_high - at_low)
        return float(mixed if samples <= above.samples else max(mixed, at_high))

    units = []
    for low, high in zip(below.units, above.units, strict=True):
        changes: dict[str, Any] = {name: mix(low, high, name) for name in _SECONDS}
        changes |= {name: round(mix(low, high, name)) for name in _BYTES}
        units.append(replace(low, **changes))
    return Table(below.precision, samples, tuple(units))
