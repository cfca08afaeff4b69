"""What commands print: timelines and curves as text, plain tables, and the progress of a run.

`open_console` makes the console of every command: a terminal is used to its width, and in a pipe or a file nothing is
wrapped or cut. On a terminal the progress of a run is a bar; anywhere else it is plain lines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from stagewright.errors import counted, printable
from stagewright.events import Evaluated, Replaced, Restarted, Resumed, Saved, Step, Unsaved
from stagewright.metrics import IMAGES, MIB, Span, ThroughputUnit, Timeline, format_rate, metric_words, steady_rate
from stagewright.report.columns import Column, Row
from stagewright.report.live.progress import PATIENCE, ProgressLine
from stagewright.voice import SILENT, Voice

_PASTED = re.compile(r"(^|: )(stagewright |--\w).*[^.]$")  # a command or its options, up to the end of the line
_UNBOUNDED = 10**6  # columns of what is no terminal: more than any table or sentence has
_DRAWING = 120  # columns of a drawing where there is no terminal
_LONG_PAUSE = 0.1  # seconds that are worth a word
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_STYLES = {"F": "black on bright_cyan", "B": "black on bright_green", "U": "black on bright_yellow"}


def plain(text: str, style: str = "") -> Text:
    """One line as it is: brackets are no markup, numbers have no colours, control characters are escapes."""
    return Text(printable(text), style)


def say(console: Console, *lines: str, style: str = "", soft_wrap: bool | None = None) -> None:
    """Print lines as they are; a line end within one is shown as an escape.

    A terminal gets sentences in lines of its width, broken between words, and breaks no path. It gets a line that ends
    in a command or its options whole, so that they can be copied as one; so does everything else get every line.
    """
    for line in lines:
        text = plain(line, style)
        is_whole = _PASTED.search(line) is not None if soft_wrap is None else soft_wrap
        for part in (text,) if is_whole or not console.is_terminal else _wrapped(text, console.width):
            console.print(part, soft_wrap=True)


def _wrapped(text: Text, width: int) -> Iterable[Text]:
    """A line in parts that fit the width, broken between words only, with the indent of the first."""
    if text.cell_len <= width:
        return (text,)
    indent = " " * (len(text.plain) - len(text.plain.lstrip(" ")))
    parts = textwrap.wrap(text.plain, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return (Text(part, text.style) for part in parts)


def print_lines(*lines: str) -> None:
    """Print lines as they are to standard output, whatever its width: a command to paste stays one line."""
    say(open_console(), *lines, soft_wrap=True)


def voice_of(console: Console, progress: ProgressLine | None = None) -> Voice:
    """Warnings and notes as lines of a console, for which the line of progress makes room."""

    def note(line: str) -> None:
        if progress is not None:
            progress.clear()
        say(console, line)

    return Voice(lambda warning: note(f"warning: {warning}"), note, progress or SILENT.progress)


@contextmanager
def speaking(text: str, *, as_json: bool = False, patience: float = PATIENCE) -> Iterator[Voice]:
    """The voice of a command that does what `text` says: a line of progress, and the rest on its console."""
    with ProgressLine(text, patience) as progress:
        yield voice_of(open_console(stderr=as_json), progress)


def answer(found: Any, *lines: str, as_json: bool) -> None:
    """Print what a command found: as one JSON object, or as lines for people."""
    if as_json:
        print(json.dumps(found))
    else:
        print_lines(*lines)


def open_console(*, stderr: bool = False) -> PipeSafeConsole:
    """The console of a command, on standard output or standard error."""
    return PipeSafeConsole(stderr=stderr)


def drawing_width(console: Console) -> int:
    """The columns of a drawing that fills the width: of the terminal, else COLUMNS, else 120."""
    return console.width if console.is_terminal else shutil.get_terminal_size((_DRAWING, 1)).columns


def has_blocks(console: Console) -> bool:
    """Whether the console can print block characters, and not only ASCII."""
    return "utf" in console.encoding.lower()


def draw_timeline(timeline: Timeline, ranks: int, width: int, dot: str = "·") -> list[Text]:
    """One line per rank, time to the right; compute shows its microbatch where that fits, dots are waiting."""
    end, margin = timeline.end, len(f"rank {ranks - 1} ")
    scale = _scale(timeline, end, max(8, width - margin - 1))
    computed = [[s for s in timeline.spans if s.rank == rank and s.lane == "compute"] for rank in range(ranks)]
    return [Text(f"rank {rank}".ljust(margin)) + _row(spans, end, scale, dot) for rank, spans in enumerate(computed)]


def _scale(timeline: Timeline, end: float, columns: int) -> float:
    """Characters per second: enough to label the shortest compute, if the line is wide enough for that."""
    lengths = [span.end - span.start for span in timeline.spans if span.kind in "FB" and span.end > span.start]
    shortest = min(lengths, default=end or 1.0)
    widest = max((len(_label(span)) for span in timeline.spans if span.kind in "FB"), default=1)
    wanted = (widest + 1) / shortest
    return wanted if end * wanted <= columns else columns / end


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
        width = last - row.cell_len
        label = _label(span)
        row.append((label if len(label) <= width else label[0]).ljust(width), style=_STYLES.get(span.kind, ""))
    row.append(dot * (round(end * scale) - row.cell_len), style="dim")
    return row


def plot(values: Sequence[float], width: int, height: int = 6) -> list[str]:
    """A curve as lines of block characters, with its scale on the left; each column is a mean of some values."""
    known = [value for value in values if abs(value) < 1e300]  # neither infinite nor NaN
    if not known or width < 16:
        return []
    low, high = min(known), max(known)
    labels = {height - 1: f"{high:.4g}", 0: f"{low:.4g}"}
    margin = max(map(len, labels.values())) + 1
    columns = min(len(known), width - margin)
    ends = [len(known) * number // columns for number in range(columns + 1)]
    means = [fmean(known[first:last]) for first, last in pairwise(ends)]
    levels = [round((mean - low) / ((high - low) or 1.0) * (8 * height - 1)) + 1 for mean in means]
    rows = {row: "".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels) for row in range(height)}
    return [f"{labels.get(row, ''):>{margin - 1}} {blocks}" for row, blocks in reversed(rows.items())]


class PipeSafeConsole(Console):
    """A console that a pipe can take the place of: there nothing is wrapped or cut, and no line ends in spaces.

    Its reader may close the pipe (`| head`): later output is dropped, and the command continues.
    """

    def __init__(self, *, file: IO[str] | None = None, stderr: bool = False) -> None:
        super().__init__(file=file, stderr=stderr, highlight=False)
        if not self.is_terminal:
            self.width = _UNBOUNDED

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal or not any(isinstance(made, Table) for made in objects):
            super().print(*objects, **options)
            return
        with self.capture() as captured:  # tables fill their last column
            super().print(*objects, **options)
        for line in captured.get().splitlines():
            super().print(Text(line.rstrip()), soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())
        os.close(null)


class RunConsole:
    """Shows the events of a run as they come."""

    def __init__(
        self,
        console: Console,
        batches: int | None,
        batch_size: int,
        log_every: int,
        evaluated_on: str,
        unit: ThroughputUnit = IMAGES,
        starting: ProgressLine | None = None,
        ranks: int = 1,
    ) -> None:
        """Without a number of batches, what drives the run shows its steps itself.

        Until its first line a terminal shows that ranks start; anywhere else `starting` is told.
        """
        self.voice, self._console = voice_of(console, starting), console
        self._starting = f"starting {counted(ranks, 'rank')}"
        self._evaluated_on = evaluated_on  # training data, validation data
        self._batches, self._batch_size, self._unit, self._log_every = batches, batch_size, unit, log_every
        self._progress = ProgressBar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal or batches is None,
            transient=True,
        )
        self._task = self._progress.add_task(self._starting, total=batches)
        self._since: list[Step] = []  # the last line, and the step of that line
        self._interrupted = {0}  # batches right after a pause, whose times are not training time

    def __enter__(self) -> RunConsole:
        self._progress.start()
        if not self._console.is_terminal:
            self.voice.progress(self._starting)
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, record: Step | Evaluated | Replaced | Saved | Unsaved | Restarted | Resumed) -> None:
        match record:
            case Step() | Evaluated() if self._batches is None:
                pass
            case Step():
                self._show_step(record)
            case Restarted() | Resumed():
                self._interrupted.add(record.batch)
            case Unsaved():
                self.voice.warn(f"no checkpoint after step {record.batch}: {record.reason}; training continues")
            case Replaced():
                self.voice.warn(f"bad record replaced by the next: {record.reason}")
            case Saved():
                best = f", the best so far ({record.best.words()})" if record.best is not None else ""
                paused = f"training paused for {record.seconds * 1e3:.0f} ms"
                if record.waited >= max(_LONG_PAUSE, record.seconds / 2):
                    paused += ", most of it for earlier ones to reach the disk; raise --checkpoint-every"
                size = f"{record.bytes / MIB:.1f} MiB"
                self.voice.note(f"checkpoint after step {record.batch}{best}: {size}, {paused}")
            case Evaluated():
                values = "  ".join((f"loss {record.loss:.4f}", *metric_words(record.metrics, 2)))
                on = f"({record.samples} samples of the {self._evaluated_on})"
                self.voice.note(f"evaluation after step {record.batch}: {values}  {on}")
                self._interrupted.add(record.batch)

    def _show_step(self, step: Step) -> None:
        done = step.batch + 1
        self._since.append(step)
        self._progress.update(self._task, completed=done, description=f"loss {step.loss:.4f}")
        if done % self._log_every == 0 or done in (1, self._batches):
            speed = steady_rate(self._since, self._batch_size, self._interrupted)
            rate = f"  {format_rate(self._unit.of(speed.rate))} {self._unit.rate}" if speed else ""
            number = f"{done:>{len(str(self._batches))}}/{self._batches}"
            self.voice.note(f"epoch {step.epoch + 1}  step {number}  loss {step.loss:.4f}  lr {step.lr:.4g}{rate}")
            self._since = [step]


def draw_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> Table:
    """Rows as a table without lines, whose cells are shown as they are."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(plain(column.head), justify="left" if column.is_text else "right", no_wrap=not column.wraps)
    for row in rows:
        table.add_row(*(plain(one.cell(row), one.style(row) if one.style else "") for one in columns))
    return table


def print_table(console: Console, columns: Sequence[Column[Row]], rows: Sequence[Row]) -> None:
    """Print rows as a table, as far as a narrow terminal has a place for its columns, and what short heads mean."""
    shown = _fitting(columns, rows, console.width) if console.is_terminal else columns
    console.print(draw_table(shown, rows))
    if legend := "; ".join(f"{column.head}: {column.about}" for column in shown if column.about):
        say(console, legend, style="dim")


def _fitting(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, gap: int = 2) -> list[Column[Row]]:
    """The columns that fit a width; those that can be spared most are left out first."""
    wide = {column: max(map(len, (column.head, *map(column.cell, rows)))) + gap for column in columns}
    shown = list(columns)
    for spared in sorted((column for column in columns if column.spare), key=lambda column: -column.spare):
        if sum(wide[column] for column in shown) - gap <= width:
            break
        shown.remove(spared)
    return shown
