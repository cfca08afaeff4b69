"""`stagewright report` and `watch`: finished runs as pages, and a running one in a terminal or a browser.

Neither imports torch, numpy or pydantic, so that both start at once beside a run that keeps the machine busy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from stagewright.errors import UserError
from stagewright.report.live.serve import PageServer
from stagewright.report.live.terminal import has_blocks, plain, print_lines, say
from stagewright.report.live.watch import Snapshot, Watch, as_line, as_screen
from stagewright.report.page import Summary
from stagewright.run.folder import is_run, newest
from stagewright.run.report import live_page, make_page, read_rank_map, take_snapshot, write_page

_EVERY = 1.0  # seconds between snapshots


def run_report(parsed: argparse.Namespace) -> None:
    folders = [Path(text) for text in dict.fromkeys(parsed.runs)]
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
    print_lines(*lines, f"report: {html}", f"as text: {markdown}")


def run_watch(parsed: argparse.Namespace) -> None:
    folder = Path(parsed.folder) if parsed.folder else _newest()
    if parsed.serve is not None:
        _serve(folder, parsed.serve)
        return
    watch = Watch(folder, read_rank_map(folder))
    console = Console()
    if parsed.json:
        print(json.dumps(take_snapshot(watch, folder).describe()))
    elif parsed.once:
        snapshot = take_snapshot(watch, folder)
        console.print(as_screen(snapshot, console.width) if has_blocks(console) else plain(as_line(snapshot)))
    else:
        try:
            (_live if console.is_terminal and has_blocks(console) else _lines)(console, watch, folder)
        except KeyboardInterrupt:
            print_lines("stopped watching; the run continues")


def _newest() -> Path:
    found = [folder for folder in Path("runs").glob("*") if is_run(folder)]
    if not found:
        raise UserError("there are no runs in runs/; give a run folder: stagewright watch RUN")
    return newest(found)


def _live(console: Console, watch: Watch, folder: Path) -> None:
    """One screen that is redrawn in place until the run ends."""
    with Live(console=console, auto_refresh=False) as live:
        for snapshot in _snapshots(watch, folder):
            live.update(as_screen(snapshot, console.width), refresh=True)


def _lines(console: Console, watch: Watch, folder: Path) -> None:
    """One line whenever there are new steps, for a pipe or a file."""
    last: tuple[int, str] | None = None
    for snapshot in _snapshots(watch, folder):
        if (snapshot.done, snapshot.state) != last:
            last = (snapshot.done, snapshot.state)
            say(console, as_line(snapshot), soft_wrap=True)


def _snapshots(watch: Watch, folder: Path) -> Iterator[Snapshot]:
    """One snapshot per second, until the run has ended."""
    while (snapshot := take_snapshot(watch, folder)).is_running:
        yield snapshot
        time.sleep(_EVERY)
    yield snapshot


def _serve(folder: Path, port: int) -> None:
    read_rank_map(folder)  # fails here, and not in the browser, if this is not a run
    with PageServer(port, lambda: live_page(folder)) as server:
        print_lines(f"{server.url} shows {folder} to browsers on this machine; Ctrl-C stops")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_lines("stopped serving; the run continues")
