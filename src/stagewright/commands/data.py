"""`stagewright data`: look at a data set, index it, write it in another format, measure how fast it loads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stagewright.commands.options import Commands, add_json

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.data.survey import Survey

_PLACE = "folder:DIR, tar:GLOB, ofrecord:DIR, or a path"
_MOST_SHOWN = 20
_MOST_SIDE = 2048  # of a sheet's samples


def add(commands: Commands) -> None:
    parser = commands.add_parser("data", help="look at a data set, index it, convert it, measure its loading")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_inspect(actions)
    index = actions.add_parser("index", help="find every record and keep where they are")
    index.add_argument("path", help=_PLACE)
    index.add_argument("--class-names", help="file with one class name a line, in label order")
    add_json(index)
    index.set_defaults(run=run_index)
    convert = actions.add_parser("convert", help="write a data set in another format")
    convert.add_argument("source", metavar="SRC", help=_PLACE)
    convert.add_argument("target", metavar="DST", help="folder:DIR, tar:DIR or ofrecord:DIR; DIR empty or new")
    convert.add_argument("--class-names", help="file with one class name a line, in label order")
    convert.add_argument("--limit", type=int, help="so many records, evenly spread")
    convert.add_argument("--per-part", type=int, default=5000, help="records of a part or shard (default: 5000)")
    add_json(convert)
    convert.set_defaults(run=run_convert)
    bench = actions.add_parser("bench", help="images a second of this loader and of stock ones, in one run")
    bench.add_argument("--repeats", type=int, default=30, help="interleaved repeats of every side (default: 30)")
    bench.add_argument("--images", type=int, default=64, help="images of one repeat (default: 64)")
    bench.add_argument("--threads", type=int, default=2, help="most loader threads to measure (default: 2)")
    add_json(bench)
    bench.set_defaults(run=run_bench)


def _add_inspect(actions: Commands) -> None:
    parser = actions.add_parser("inspect", help="counts, classes, sizes, bad records, and a sheet of samples")
    parser.add_argument("path", help=_PLACE)
    parser.add_argument("--class-names", help="file with one class name a line, in label order")
    parser.add_argument("--most", type=int, default=10_000, help="records to decode (default: 10000; 0: all)")
    parser.add_argument("--sheet", default="contact-sheet.png", help="picture to write (default: contact-sheet.png)")
    parser.add_argument("--image", type=int, default=0, help="side of its samples (default: 224; 32 for small images)")
    parser.add_argument("--crop", choices=("auto", "resized", "padded"), default="auto", help="random crop")
    parser.add_argument("--jitter", type=float, default=0.0, help="change of colours, as a share")
    parser.add_argument("--cutout", type=int, default=0, help="side of a black square in them")
    parser.add_argument("--seed", type=int, default=0, help="of the crops")
    add_json(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(parsed: argparse.Namespace) -> None:
    from pathlib import Path

    from rich.console import Console

    from stagewright.data.datasets import open_records
    from stagewright.data.sources import ImageOptions, with_transforms
    from stagewright.data.survey import draw_sheet, survey

    if parsed.most < 0:
        raise ValueError(f"--most is {parsed.most}; give the records to decode, or 0 for all")
    if parsed.image > _MOST_SIDE:
        raise ValueError(f"--image is {parsed.image}; a sheet has samples of at most {_MOST_SIDE} pixels a side")
    with _progress("indexing") as tell:
        records = open_records(parsed.path, parsed.class_names, progress=tell)
    with _progress("decoding") as tell:
        found = survey(records, parsed.most, tell)
    side = parsed.image or (32 if 0 < found.heights.high <= 64 else 224)
    source = with_transforms(records, side, ImageOptions(parsed.crop, jitter=parsed.jitter, cutout=parsed.cutout))
    if len(found.bad) < found.looked_at:
        draw_sheet(source, parsed.seed, Path(parsed.sheet))
    if parsed.json:
        print(json.dumps(found.describe() | {"sheet": parsed.sheet}))
    else:
        _show(Console(soft_wrap=True, highlight=False), found, parsed.sheet)


def _show(console: Console, found: Survey, sheet: str) -> None:
    looked = "all" if found.looked_at == found.records else f"{found.looked_at} of them, evenly spread,"
    lines = [
        f"{found.records} records, {found.classes} classes; {looked} were decoded",
        f"encoded bytes  {found.encoded}   (smallest / median / largest)",
        f"height         {found.heights}",
        f"width          {found.widths}",
    ]
    lines += [] if found.looked_at == found.records else ["of those, in each class:"]
    for label, count in list(enumerate(found.per_class))[:_MOST_SHOWN]:
        lines.append(f"class {label:4} {count:8}  {found.class_names[label] if label < len(found.class_names) else ''}")
    if found.classes > _MOST_SHOWN:
        lines.append(f"... and {found.classes - _MOST_SHOWN} more classes; --json has them all")
    lines.append(f"bad records: {len(found.bad)}")
    lines += [f"  {bad.index}: {bad.reason}" for bad in found.bad[:_MOST_SHOWN]]
    lines += [f"fingerprint: {found.fingerprint}", f"samples after augmentation: {sheet}"]
    console.print("\n".join(line.rstrip() for line in lines), markup=False)


def run_index(parsed: argparse.Namespace) -> None:
    import time

    from stagewright.data.datasets import open_records

    began = time.perf_counter()
    with _progress("indexing") as tell:
        records = open_records(parsed.path, parsed.class_names, progress=tell)
    seconds = time.perf_counter() - began
    if parsed.json:
        about = {"records": len(records), "classes": records.classes, "fingerprint": records.fingerprint}
        print(json.dumps(about | {"seconds": seconds}))
    else:
        print(f"{len(records)} records, {records.classes} classes, fingerprint {records.fingerprint}, {seconds:.2f} s")


def run_convert(parsed: argparse.Namespace) -> None:
    from dataclasses import asdict
    from pathlib import Path

    from stagewright.data.convert import convert
    from stagewright.data.datasets import Kind, open_records

    kind, _, where = parsed.target.partition(":")
    if kind not in set(Kind) or not where:
        raise ValueError(f"target '{parsed.target}' is not one of folder:DIR, tar:DIR, ofrecord:DIR")
    with _progress("indexing") as tell:
        records = open_records(parsed.source, parsed.class_names, parsed.limit, tell)
    with _progress("converting", len(records)) as tell:
        done = convert(records, Kind(kind), Path(where), parsed.per_part, tell)
    if parsed.json:
        print(json.dumps(asdict(done)))
        return
    print(f"{done.records} records, {done.classes} classes in {where}")
    for reason in done.left_out[:_MOST_SHOWN]:
        print(f"left out: {reason}")
    if len(done.left_out) > _MOST_SHOWN:
        print(f"... and {len(done.left_out) - _MOST_SHOWN} more were left out")


def run_bench(parsed: argparse.Namespace) -> None:
    from stagewright.bench.data import run

    run(repeats=parsed.repeats, images=parsed.images, most_threads=parsed.threads, as_json=parsed.json)


@contextmanager
def _progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal that follows a count; nothing anywhere else."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
