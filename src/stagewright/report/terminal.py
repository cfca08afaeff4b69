"""A timeline as text: one row a rank, time to the right."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from stagewright.metrics import Span, Timeline

_STYLES = {"F": "black on bright_cyan", "B": "black on bright_green", "U": "black on bright_yellow"}


def has_blocks(console: Console) -> bool:
    """Whether what is printed may hold more than ASCII."""
    return "utf" in console.encoding.lower()


def draw_timeline(timeline: Timeline, ranks: int, width: int, dot: str = "·") -> list[Text]:
    """One line a rank; a compute shows its microbatch number where all of it has room, dots are waiting."""
    end = timeline.end
    margin = len(f"rank {ranks - 1} ")
    columns = max(8, width - margin - 1)
    scale = _scale(timeline, end, columns)
    rows = []
    for rank in range(ranks):
        row = Text(f"rank {rank}".ljust(margin))
        row.append_text(_row([s for s in timeline.spans if s.rank == rank and s.lane == "compute"], end, scale, dot))
        rows.append(row)
    return rows


def _scale(timeline: Timeline, end: float, columns: int) -> float:
    """Characters a second: whole ones for each shortest compute where that fits."""
    lengths = [span.end - span.start for span in timeline.spans if span.kind in "FB" and span.end > span.start]
    shortest = min(lengths, default=end or 1.0)
    widest = max((len(_label(span)) for span in timeline.spans if span.kind in "FB"), default=1)
    roomy = (widest + 1) / shortest
    return roomy if end * roomy <= columns else columns / end


def _label(span: Span) -> str:
    """`F3` from `0F3@2`."""
    return span.name.lstrip("0123456789").partition("@")[0]


def _row(spans: list[Span], end: float, scale: float, dot: str) -> Text:
    row = Text()
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        first, last = round(span.start * scale), round(min(span.end, end) * scale)
        if span.start >= end or last <= max(first, row.cell_len):
            continue
        row.append(dot * (first - row.cell_len), style="dim")
        room = last - row.cell_len
        label = _label(span)
        row.append((label if len(label) <= room else label[0]).ljust(room), style=_STYLES.get(span.kind, ""))
    row.append(dot * (round(end * scale) - row.cell_len), style="dim")
    return row
