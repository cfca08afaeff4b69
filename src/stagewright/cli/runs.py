"""Commands about runs: `report` and `watch` show one, `runs` lists, names, tags and deletes them.

None of them imports torch, numpy or pydantic, so that they start at once beside a run that keeps the machine busy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from stagewright.errors import UserError, counted, printable
from stagewright.report.live.listing import columns, select, total_words
from stagewright.report.live.serve import PageServer
from stagewright.report.live.terminal import (
    answer,
    drawing_width,
    has_blocks,
    open_console,
    print_lines,
    print_table,
    say,
)
from stagewright.report.live.watch import Snapshot, Watch, as_line, as_screen
from stagewright.report.page import Summary
from stagewright.report.words import format_bytes
from stagewright.run.folder import (
    LAST,
    RUNS,
    Label,
    delete_run,
    find_run,
    is_locked,
    is_run,
    name_run,
    read_label,
    size_on_disk,
    tag_run,
)
from stagewright.run.report import list_runs, live_page, make_page, read_rank_map, runs_page, take_snapshot, write_page

_EVERY = 1.0  # seconds between snapshots


def run_report(parsed: argparse.Namespace) -> None:
    folders = list(dict.fromkeys(find_run(text) for text in parsed.runs))
    default = folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")
    target = Path(parsed.output) if parsed.output else default
    if target.suffix not in (".html", ".md", ""):
        raise UserError(
            f"-o {target} ends in {target.suffix}; give a name that ends in .html, the .md is written beside it"
        )
    page = make_page(folders)
    html, markdown = write_page(page, target)
    lines = [line for block in page.blocks if isinstance(block, Summary) for line in block.lines]
    if parsed.json:
        print(json.dumps({"title": page.title, "verdict": lines, "html": str(html), "markdown": str(markdown)}))
        return
    say(open_console(), *lines, f"report: {html}", f"as text: {markdown}")


# --- A run while it trains --------------------------------------------------------------------------------------------


def run_watch(parsed: argparse.Namespace) -> None:
    if parsed.serve is not None:
        _serve(parsed.serve, find_run(parsed.folder) if parsed.folder else None)
        return
    folder = find_run(parsed.folder or LAST)
    watch = Watch(folder, read_rank_map(folder))
    console = open_console()
    if parsed.json:
        print(json.dumps(take_snapshot(watch, folder).describe()))
    elif parsed.once:
        snapshot = take_snapshot(watch, folder)
        if has_blocks(console):
            console.print(as_screen(snapshot, drawing_width(console)))
        else:
            print_lines(as_line(snapshot))
    else:
        try:
            (_live if console.is_terminal and has_blocks(console) else _lines)(console, watch, folder)
        except KeyboardInterrupt:
            print_lines("stopped watching; the run continues")


def _live(console: Console, watch: Watch, folder: Path) -> None:
    """One screen that is redrawn in place until the run ends."""
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in _snapshots(watch, folder):
            live.update(as_screen(snapshot, console.width), refresh=True)


def _lines(console: Console, watch: Watch, folder: Path) -> None:
    """One line whenever there are new steps, for a pipe or a file."""
    last: tuple[int, str, str] | None = None
    for snapshot in _snapshots(watch, folder):
        if (snapshot.done, snapshot.state, snapshot.doing) != last:
            last = (snapshot.done, snapshot.state, snapshot.doing)
            say(console, as_line(snapshot), soft_wrap=True)


def _snapshots(watch: Watch, folder: Path) -> Iterator[Snapshot]:
    """One snapshot per second, until the run has ended."""
    while (snapshot := take_snapshot(watch, folder)).is_running:
        yield snapshot
        time.sleep(_EVERY)
    yield snapshot


def _serve(port: int, folder: Path | None) -> None:
    """Serve the page of a run, or the list of all runs with a page for each."""
    make: Callable[[str], str | None]
    if folder is None:
        what, make = f"all runs in {RUNS}/", lambda path: runs_page(Path(RUNS), path)
    else:
        read_rank_map(folder)  # fails here, and not in the browser, if this is not a run
        what, make = str(folder), lambda path: live_page(folder) if path == "/" else None
    with PageServer(port, make) as server:
        print_lines(f"{server.url} shows {what} to browsers on this machine; Ctrl-C stops")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_lines("stopped serving; runs continue")


# --- All runs ---------------------------------------------------------------------------------------------------------


def run_list(parsed: argparse.Namespace) -> None:
    entries = select(list_runs(Path(parsed.runs)), parsed.filter, parsed.sort)
    if parsed.json:
        total = sum(entry.bytes for entry in entries)
        print(json.dumps({"runs": [entry.describe() for entry in entries], "bytes": total}))
        return
    if not entries:
        why = f" with {' '.join(parsed.filter)}" if parsed.filter else "; stagewright train makes one"
        print_lines(f"no runs in {parsed.runs}/{why}")
        return
    print_table(open_console(), columns(entries), entries)
    print_lines(total_words(entries))


def run_name(parsed: argparse.Namespace) -> None:
    run = _find(parsed.run, parsed.runs)
    _show_label(parsed, run, name_run(run, parsed.name))


def run_tag(parsed: argparse.Namespace) -> None:
    run = _find(parsed.run, parsed.runs)
    added, removed = ([word[1:] for word in parsed.rest if word.startswith(sign)] for sign in "+-")
    _show_label(parsed, run, tag_run(run, added, removed) if parsed.rest else read_label(run))


def _show_label(parsed: argparse.Namespace, run: Path, label: Label) -> None:
    tags = f"tags {' '.join(label.tags)}" if label.tags else "no tags"
    line = f"{run.name}: {f'named {label.name}' if label.name else 'no name'}, {tags}"
    answer({"id": run.name, "name": label.name or None, "tags": list(label.tags)}, line, as_json=parsed.json)


def run_delete(parsed: argparse.Namespace) -> None:
    """Delete runs, all of them or, where one can't be deleted, none."""
    folders = list(dict.fromkeys(_find(text, parsed.runs) for text in parsed.run))
    for folder in folders:
        if is_locked(folder):
            raise UserError(f"run {folder.name} is being trained, so nothing is deleted; stop it, or leave it out")
    size = sum(map(size_on_disk, folders))
    what = f"{counted(len(folders), 'run')}, {format_bytes(size)}"
    if not parsed.yes:
        if not sys.stdin.isatty():
            raise UserError(
                f"can't ask whether to delete {what} without a terminal; use --yes to delete without being asked"
            )
        for folder in folders:
            name = read_label(folder).name
            sys.stderr.write(f"{printable(str(folder))}{f' ({name})' if name else ''}\n")
        sys.stderr.write(f"delete {what}, for good? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print_lines("nothing is deleted")
            return
    for folder in folders:
        delete_run(folder)
    answer({"deleted": [folder.name for folder in folders], "bytes": size}, f"deleted {what}", as_json=parsed.json)


def _find(text: str, runs: str) -> Path:
    """A run to change, which must be one."""
    folder = find_run(text, Path(runs))
    if not is_run(folder):
        raise UserError(f"{text} is not a run folder; see stagewright runs")
    return folder.absolute()
