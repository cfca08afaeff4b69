"""What a whole run used: peaks, means and sums over its moments."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from stagewright.metrics import GpuUse, RankUse, Use


@dataclass(slots=True)
class GpuTotals:
    """One GPU over a run."""

    uuid: str
    index: int
    peak_memory: int | None = None
    mean_utilisation: float | None = None
    mean_power: float | None = None  # watts
    energy: float | None = None  # joules
    peak_temperature: float | None = None
    throttled: dict[str, float] = field(default_factory=dict)  # seconds by reason
    throttled_seconds: float = 0.0  # for any of them
    foreign: int = 0  # most processes of others at a time


class _Mean:
    """A mean over time: every value counts for the seconds before it."""

    def __init__(self) -> None:
        self.sum = self.seconds = 0.0

    def add(self, value: float | None, seconds: float) -> None:
        if value is not None:
            self.sum += value * seconds
            self.seconds += seconds

    @property
    def value(self) -> float | None:
        return self.sum / self.seconds if self.seconds else None


class _GpuSeries:
    def __init__(self, use: GpuUse) -> None:
        self.totals = GpuTotals(use.uuid, use.index)
        self.utilisation, self.power = _Mean(), _Mean()
        self._counted = 0.0  # joules by the GPU's own counter
        self._before: float | None = None

    def add(self, use: GpuUse, seconds: float) -> None:
        totals = self.totals
        totals.peak_memory = _most(totals.peak_memory, use.memory)
        totals.peak_temperature = _most(totals.peak_temperature, use.temperature)
        totals.foreign = max(totals.foreign, use.foreign)
        self.utilisation.add(use.utilisation, seconds)
        self.power.add(use.power, seconds)
        for reason in use.throttled:
            totals.throttled[reason] = totals.throttled.get(reason, 0.0) + seconds
        totals.throttled_seconds += seconds if use.throttled else 0.0
        if use.energy is not None and self._before is not None:
            self._counted += max(use.energy - self._before, 0.0)  # a driver that is loaded again counts from 0
        self._before = use.energy if use.energy is not None else self._before

    def close(self) -> GpuTotals:
        totals = self.totals
        totals.mean_utilisation = self.utilisation.value
        totals.mean_power = self.power.value
        has_counter = self._before is not None
        totals.energy = self._counted if has_counter else self.power.sum if self.power.seconds else None
        return totals


class Totals:
    """Takes one moment after the other."""

    def __init__(self) -> None:
        self._gpus: dict[str, _GpuSeries] = {}
        self._peaks: dict[int, int] = {}
        self._torch_peaks: dict[int, int] = {}
        self._cores: dict[int, _Mean] = {}
        self._machine = _Mean()
        self._memory = self._moments = 0
        self._seconds = 0.0
        self._last: float | None = None

    def add(self, use: Use) -> None:
        seconds = 0.0 if self._last is None else max(use.seconds - self._last, 0.0)
        self._last = use.seconds
        self._seconds += seconds
        self._moments += 1
        self._memory = max(self._memory, use.memory)
        self._machine.add(use.cores, seconds)
        for gpu in use.gpus:
            self._gpus.setdefault(gpu.uuid, _GpuSeries(gpu)).add(gpu, seconds)
        for rank in use.ranks:
            self._add_rank(rank, seconds)

    def _add_rank(self, use: RankUse, seconds: float) -> None:
        self._peaks[use.rank] = max(self._peaks.get(use.rank, 0), use.memory)
        self._cores.setdefault(use.rank, _Mean()).add(use.cores, seconds)
        if use.torch_memory is not None:
            self._torch_peaks[use.rank] = max(self._torch_peaks.get(use.rank, 0), use.torch_memory)

    def describe(self) -> dict[str, Any]:
        """The run's use as its summary has it; what nobody told is None."""
        gpus = [series.close() for series in self._gpus.values()]
        energies = [gpu.energy for gpu in gpus if gpu.energy is not None]
        powers = [gpu.mean_power for gpu in gpus if gpu.mean_power is not None]
        return {
            "moments": self._moments,
            "seconds": self._seconds,
            "peak_machine_memory": self._memory,
            "mean_machine_cores": self._machine.value,
            "ranks": [
                {
                    "rank": rank,
                    "peak_memory": peak,
                    "peak_torch_memory": self._torch_peaks.get(rank),
                    "mean_cores": self._cores[rank].value,
                }
                for rank, peak in sorted(self._peaks.items())
            ],
            "gpus": [asdict(gpu) for gpu in gpus],
            "mean_power": sum(powers) if powers else None,
            "energy": sum(energies) if energies else None,
            "throttled_seconds": max((gpu.throttled_seconds for gpu in gpus), default=None),
            "foreign": max((gpu.foreign for gpu in gpus), default=None),
        }


def _most(one: Any, other: Any) -> Any:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)
