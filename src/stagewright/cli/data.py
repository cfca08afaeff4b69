"""`stagewright data`: inspect, index and convert a data set, and measure how fast data sets load."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stagewright.config.sources import SourceOptions
from stagewright.data.convert import Shrink, convert
from stagewright.data.datasets import Kind, open_listed, open_records
from stagewright.data.formats.text import convert_text, open_tokenizer
from stagewright.data.sources import with_transforms
from stagewright.data.survey import Survey, draw_sheet, survey
from stagewright.errors import UserError, counted
from stagewright.metrics import MIB
from stagewright.report.live.progress import ProgressLine
from stagewright.report.live.terminal import answer, open_console

_TEXT = "text:"
_PER_PART = 5000  # records of a part or shard
_MOST_SHOWN = 20  # classes, bad records


def run_inspect(parsed: argparse.Namespace) -> None:
    with _progress("indexing") as update:
        records = open_records(parsed.path, parsed.class_names, progress=update)
    with _progress("decoding") as update:
        found = survey(records, parsed.most, update)
    side = parsed.image or (32 if 0 < found.heights.high <= 64 else 224)
    options = SourceOptions(side, parsed.crop, jitter=parsed.jitter, cutout=parsed.cutout)
    source = with_transforms(records, options)
    sheet = parsed.sheet if len(found.bad) < found.looked_at else None
    if sheet is not None:
        draw_sheet(source, parsed.seed, Path(sheet))
    answer(asdict(found) | {"sheet": sheet}, *_about(found, sheet), as_json=parsed.json)


def _about(found: Survey, sheet: str | None) -> Iterator[str]:
    looked = "all" if found.looked_at == found.records else f"{found.looked_at} of them, evenly spread,"
    lines = [
        f"{_size(found.records, found.classes)}; {looked} were decoded",
        f"encoded bytes  {found.encoded}   (smallest / median / largest)",
        f"height         {found.heights}",
        f"width          {found.widths}",
    ]
    lines += [] if found.looked_at == found.records else ["of these, per class:"]
    for label, count in list(enumerate(found.per_class))[:_MOST_SHOWN]:
        lines.append(f"class {label:4} {count:8}  {found.class_names[label] if label < len(found.class_names) else ''}")
    if found.classes > _MOST_SHOWN:
        lines.append(f"... and {found.classes - _MOST_SHOWN} more classes; --json lists all")
    lines.append(f"bad records: {len(found.bad)}")
    lines += [f"  {bad.index}: {bad.reason}" for bad in found.bad[:_MOST_SHOWN]]
    shown = f"none drawn, 0 of {found.looked_at} records are good" if sheet is None else sheet
    lines += [f"fingerprint: {found.fingerprint}", f"samples after augmentation: {shown}"]
    return (line.rstrip() for line in lines)


def run_index(parsed: argparse.Namespace) -> None:
    began = time.perf_counter()
    kind, _, where = parsed.path.partition(":")
    with _progress("indexing") as update:
        if kind == "segmentation":
            records = open_listed(kind, where, parsed.class_names, progress=update)
        else:
            records = open_records(parsed.path, parsed.class_names, progress=update)
    seconds = time.perf_counter() - began
    about = {"records": len(records), "classes": records.classes, "fingerprint": records.fingerprint}
    line = f"{_size(len(records), records.classes)}, fingerprint {records.fingerprint}, {seconds:.2f} s"
    answer(about | {"seconds": seconds}, line, as_json=parsed.json)


def run_convert(parsed: argparse.Namespace) -> None:
    if parsed.source.startswith(_TEXT):
        _convert_text(parsed)
        return
    if parsed.tokenizer is not None or parsed.val_fraction:
        flag = "--tokenizer" if parsed.tokenizer is not None else "--val-fraction"
        raise UserError(f"{flag} changes nothing with {parsed.source}; it needs text:FILE")
    kind, _, where = parsed.target.partition(":")
    if kind not in set(Kind) or not where:
        raise UserError(f"target '{parsed.target}' is not one of folder:DIR, tar:DIR, ofrecord:DIR")
    with _progress("indexing") as update:
        records = open_records(parsed.source, parsed.class_names, parsed.limit, update)
    changes = parsed.side is not None or parsed.raw
    shrink = Shrink(parsed.side, parsed.raw, len(os.sched_getaffinity(0))) if changes else None
    with _progress("converting", len(records)) as update:
        done = convert(records, Kind(kind), Path(where), parsed.per_part or _PER_PART, update, shrink)
    sizes = f": {done.bytes_read / MIB:,.1f} MiB of images became {done.bytes_written / MIB:,.1f}" if changes else ""
    left_out, more = done.left_out[:_MOST_SHOWN], len(done.left_out) - _MOST_SHOWN
    lines = [f"{_size(done.records, done.classes)} in {where}{sizes}", *(f"left out: {reason}" for reason in left_out)]
    lines += [f"... and {more} more were left out"] if more > 0 else []
    answer(asdict(done), *lines, as_json=parsed.json)


def _convert_text(parsed: argparse.Namespace) -> None:
    """Text to tokens."""
    source, (kind, _, target) = parsed.source.removeprefix(_TEXT), parsed.target.partition(":")
    if kind != "tokens" or not target:
        raise UserError(f"target '{parsed.target}' is not tokens:FILE, the only one for {parsed.source}")
    given = {"--class-names": parsed.class_names, "--limit": parsed.limit, "--per-part": parsed.per_part}
    given |= {"--side": parsed.side, "--raw": parsed.raw or None}
    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{flag} changes nothing with {parsed.source}; leave it out")
    total = Path(source).stat().st_size if Path(source).is_file() else None
    with _progress("tokenizing", total) as update:
        done = convert_text(source, target, open_tokenizer(parsed.tokenizer), parsed.val_fraction, update)
    lines = [f"{counted(one.tokens, 'token')}, vocabulary of {one.vocabulary}, in {one.path}" for one in done]
    answer([asdict(one) for one in done], *lines, as_json=parsed.json)


def _size(records: int, classes: int) -> str:
    return f"{counted(records, 'record')}, {counted(classes, 'class', 'es')}"


@contextmanager
def _progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, else a line where it takes long; yields the function that takes the count."""
    console = open_console(stderr=True)
    if not console.is_terminal:
        with ProgressLine(what):
            yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
