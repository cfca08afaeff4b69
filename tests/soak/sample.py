"""Memory, threads and files of a run's processes over time, and how they grow with the steps."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 1.0  # between samples
_WARM_UP = 0.2  # of a process's samples since its first step, which are left out of its slope: caches and pools fill
_LEAST_STEPS = 100  # of a process that has a slope


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    role: str  # "supervisor 0", "rank 2"
    process: int
    steps: int  # in the run's metrics
    rss: int  # bytes
    threads: int
    files: int  # open ones


@dataclass(frozen=True, slots=True)
class Growth:
    """What one role used at most, over all of its processes, and its slope per 1000 steps."""

    role: str
    samples: int
    most_rss: int
    most_threads: int
    most_files: int
    rss_slope: float | None  # bytes; None where the steps of no process are spread enough
    threads_slope: float | None
    files_slope: float | None


def read_sample(role: str, process: int, steps: int) -> Sample | None:
    """A process now; None where it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        files = sum(1 for _ in (folder / "fd").iterdir())
        return Sample(role, process, steps, int(status["VmRSS"].split()[0]) << 10, int(status["Threads"]), files)
    except (OSError, KeyError):  # it ended, or has no memory any more
        return None


class Sampler:
    """A thread that samples processes while the context is open."""

    def __init__(self, processes: Callable[[], Mapping[str, int]], steps: Callable[[], int]) -> None:
        self.samples: list[Sample] = []
        self._processes = processes
        self._steps = steps
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_SECONDS):
            steps = self._steps()
            found = (read_sample(role, process, steps) for role, process in self._processes().items())
            self.samples += filter(None, found)


def growth(samples: Iterable[Sample]) -> tuple[Growth, ...]:
    """The growth of every role, in the order of names."""
    roles: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        roles[sample.role].append(sample)
    return tuple(_growth_of(role, own) for role, own in sorted(roles.items()))


def _growth_of(role: str, samples: list[Sample]) -> Growth:
    processes: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        processes[sample.process].append(sample)
    warm = [own for own in map(_warmed_up, processes.values()) if own and own[-1].steps - own[0].steps >= _LEAST_STEPS]

    def slope_of(value: Callable[[Sample], float]) -> float | None:
        found = slope([[(sample.steps, value(sample)) for sample in own] for own in warm])
        return None if found is None else 1000 * found

    return Growth(
        role,
        len(samples),
        max(sample.rss for sample in samples),
        max(sample.threads for sample in samples),
        max(sample.files for sample in samples),
        slope_of(lambda sample: sample.rss),
        slope_of(lambda sample: sample.threads),
        slope_of(lambda sample: sample.files),
    )


def _warmed_up(samples: list[Sample]) -> list[Sample]:
    """Those of one process without its start, during which the run makes no steps."""
    began = next((index for index, sample in enumerate(samples) if sample.steps != samples[0].steps), len(samples))
    return samples[began + int(_WARM_UP * (len(samples) - began)) :]


def slope(groups: Iterable[list[tuple[float, float]]]) -> float | None:
    """The slope of y over x by least squares, where every group of points has a height of its own."""
    above = below = 0.0
    for points in groups:
        if not points:
            continue
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        above += sum((x - mean_x) * (y - mean_y) for x, y in points)
        below += sum((x - mean_x) ** 2 for x, _ in points)
    return above / below if below else None
