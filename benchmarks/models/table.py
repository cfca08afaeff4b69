"""The table of `models`, in 80 columns, and what it sums up to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.models.run import BAR, STAGES, Tried, Tries
from stagewright.errors import counted
from stagewright.report.columns import Column
from stagewright.report.live.terminal import print_table, say


def show_tries(console: Console, tries: Tries) -> None:
    """Print the table, the models that were refused or differ, and the summary."""
    print_table(console, _COLUMNS, [tried for tried in tries.models if not tried.refused])
    for tried in tries.models:
        if tried.refused:
            say(console, f"{tried.name}: {tried.refused}")
    if compared := [tried for tried in tries.models if tried.stock]:
        say(console, "torch.distributed.pipelining, cut before the same modules:")
        for tried in compared:
            say(console, f"  {tried.name}: {tried.stock}")
    for line in summary(tries):
        say(console, line)


def summary(tries: Tries) -> Iterator[str]:
    """What the table amounts to, in sentences."""
    models = tries.models
    if not models:
        yield "no model was tried"
    else:
        enough = [tried for tried in models if not tried.refused and tried.stages >= STAGES]
        trained = [tried for tried in models if tried.largest is not None]
        equal = [tried for tried in trained if tried.is_equal]
        yield f"{len(enough)} of {counted(len(models), 'model')} cut into {STAGES} stages or more"
        if trained:
            seconds = median(tried.seconds for tried in trained)
            calm = [tried.largest or 0.0 for tried in trained if tried.noise is None]
            yield f"median {seconds:.1f} s to cut and prove"
            yield f"{len(equal)} of {len(trained)} train as plain PyTorch does, {len(calm)} of them within {BAR:.0e}"
            yield from (_chaotic(tried) for tried in trained if tried.noise is not None)
            if calm:
                yield f"largest difference of the others {max(calm):.0e}"
    yield ", ".join(f"{library} {number}" for library, number in tries.versions.items())
    if tries.missing:
        yield f"not installed, so left out: {', '.join(tries.missing)}; pip install 'stagewright[libraries]'"


def _chaotic(tried: Tried) -> str:
    gap, noise = _figure(tried.largest), _figure(tried.noise)
    word = "chaotic" if tried.is_equal else "differs"
    return f"{tried.name}: {word}: by {gap}, where rounding alone makes {noise} in plain PyTorch"


def as_json(tries: Tries) -> dict[str, Any]:
    """Everything as one JSON object."""
    return asdict(tries) | {"summary": list(summary(tries))}


def _figure(gap: float | None) -> str:
    return "" if gap is None else f"{gap:.0e}"


_COLUMNS: tuple[Column[Tried], ...] = (
    Column("model", lambda tried: tried.name, is_text=True, wraps=True),
    Column("way", lambda tried: tried.way, is_text=True, wraps=True),
    Column("units", lambda tried: tried.units, wraps=True),
    Column("most", lambda tried: tried.most_stages, wraps=True),
    Column("s", lambda tried: tried.seconds, "{:.1f}", wraps=True),
    Column("sync", lambda tried: _figure(tried.sync), wraps=True),
    Column("stale", lambda tried: _figure(tried.stale), wraps=True),
)
