"""What must hold at the end of a soak: functions of values, each of which returns what is wrong, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tests.soak.sample import Growth

MOST_PARTIAL = 2  # checkpoints that are being written
_MOST_RSS, _MOST_THREADS, _MOST_FILES = 1 << 30, 64, 512  # of one process of the soak's small model
_RSS_SLOPE, _COUNT_SLOPE = 1 << 20, 0.5  # per 1000 steps, in a long run without faults
_PARTIAL = ".partial"
_LEFTOVERS = ("*.partial", "*.draft", "*.tmp", "*.sock", "damaged-*", "ranks/*.safetensors")
_SHOWN = 5

Losses = Sequence[tuple[int, float]]  # batch and loss of every step, in the order of the file


def check_steps(found: Losses, expected: Losses) -> list[str]:
    """Every step exactly once, in order, with the losses of the undisturbed run."""
    wrong: list[str] = []
    counts = Counter(batch for batch, _ in found)
    if missing := [batch for batch, _ in expected if batch not in counts]:
        wrong.append(f"{len(missing)} steps are missing from metrics.jsonl: {_some(missing)}")
    if repeated := [batch for batch, count in counts.items() if count > 1]:
        wrong.append(f"{len(repeated)} steps are in metrics.jsonl more than once: {_some(repeated)}")
    losses = dict(expected)
    if beyond := [batch for batch in counts if batch not in losses]:
        wrong.append(f"{len(beyond)} steps do not belong to the run: {_some(beyond)}")
    if changed := [batch for batch, loss in found if batch in losses and loss != losses[batch]]:
        wrong.append(f"{len(changed)} steps have another loss: {_some(changed)}")
    if not wrong and list(found) != list(expected):
        wrong.append("the steps of metrics.jsonl are not in order")
    return wrong


def check_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """The same tensors, bit for bit."""
    if found.keys() != expected.keys():
        return [f"the exported tensors differ: {_some(sorted(found.keys() ^ expected.keys()))}"]
    changed = [name for name in expected if _bits(found[name]) != _bits(expected[name])]
    return [f"{len(changed)} of {len(expected)} exported tensors have other bits: {_some(changed)}"] if changed else []


def check_leftovers(
    runs: Path, processes: Iterable[int], listening: Iterable[str], others: Sequence[Path]
) -> list[str]:
    """Nothing is left: no process, no open port or socket, no half-written file of a run, no temporary or shared one.

    `others` are folders that must be empty: what stands for /tmp and /dev/shm.
    """
    files = [path for pattern in _LEFTOVERS for path in sorted(runs.rglob(pattern))]
    files += [path for folder in others for path in sorted(folder.rglob("*"))]
    wrong = [f"process {process} is still running" for process in processes]
    wrong += [f"still listening: {line}" for line in listening]
    return wrong + [f"left behind: {path}" for path in files]


def check_bounds(used: Iterable[Growth], most_partial: int, *, slopes: bool = False) -> list[str]:
    """Memory, threads, files and checkpoints under way stay bounded; in a long run they do not grow either."""
    wrong: list[str] = []
    if most_partial > MOST_PARTIAL:
        wrong.append(f"{most_partial} checkpoints were being written at a time, the most is {MOST_PARTIAL}")
    for role in used:
        bounds = [
            ("bytes of memory", role.most_rss, _MOST_RSS, role.rss_slope, _RSS_SLOPE),
            ("threads", role.most_threads, _MOST_THREADS, role.threads_slope, _COUNT_SLOPE),
            ("open files", role.most_files, _MOST_FILES, role.files_slope, _COUNT_SLOPE),
        ]
        for what, most, bound, per_1000, steepest in bounds:
            if most > bound:
                wrong.append(f"{role.role} had {most} {what}, the bound is {bound}")
            if slopes and per_1000 is not None and per_1000 > steepest:
                wrong.append(f"{role.role} grows by {per_1000:.3g} {what} per 1000 steps, the bound is {steepest}")
    return wrong


def count_partial(names: Iterable[str]) -> int:
    """How many checkpoints are being written, from the names in a folder of checkpoints.

    A partial folder older than the newest checkpoint is one that is being deleted.
    """
    names = tuple(names)
    newest = max((int(name) for name in names if name.isdecimal()), default=-1)
    partial = (name.removesuffix(_PARTIAL) for name in names if name.endswith(_PARTIAL))
    return sum(1 for name in partial if name.isdecimal() and int(name) > newest)


def _bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


def _some(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:_SHOWN])) + (", ..." if len(items) > _SHOWN else "")
