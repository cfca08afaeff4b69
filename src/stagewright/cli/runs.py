"""`stagewright report`: what runs were like, as a page to look at and one to paste. `stagewright compare`: two runs or two benches, and whether they differ. `stagewright watch`: a run while it runs, in the terminal or in a browser on this machine."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

from stagewright.bench.compare import compare, describe
from stagewright.report.live.serve import PageServer
from stagewright.report.live.terminal import has_blocks
from stagewright.report.live.watch import Watch, as_line, as_screen
from stagewright.report.page import Verdict
from stagewright.run.folder import is_run, newest
from stagewright.run.report import layout_of, live_page, look_at, page_of_runs, write_page

if TYPE_CHECKING:
    from stagewright.bench.compare import Comparison
    from stagewright.report.live.watch import Moment


def run_report(parsed: argparse.Namespace) -> None:
    folders = [Path(text) for text in dict.fromkeys(parsed.runs)]
    target = Path(parsed.output) if parsed.output else _default(folders)
    if target.suffix not in (".html", ".md", ""):
        raise ValueError(f"-o {target} ends in {target.suffix}; give a name that ends in .html, the .md goes beside it")
    page = page_of_runs(folders)
    html, markdown = write_page(page, target)
    lines = [line for block in page.blocks if isinstance(block, Verdict) for line in block.lines]
    if parsed.json:
        print(json.dumps({"title": page.title, "verdict": lines, "html": str(html), "markdown": str(markdown)}))
        return
    for line in (*lines, f"report: {html}", f"as text: {markdown}"):
        print(line)


def _default(folders: list[Path]) -> Path:
    return folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")


def run_compare(parsed: argparse.Namespace) -> None:
    comparison = compare(Path(parsed.first), Path(parsed.second))
    if parsed.json:
        print(json.dumps(describe(comparison)))
    else:
        show_comparison(Console(), comparison)


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Both sides in a table, then what to make of it."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    say(f"A: {comparison.first}")
    say(f"B: {comparison.second}")
    table = Table(box=None, pad_edge=False)
    for name in ("images/s", "A", "95 % interval", "B", "95 % interval"):
        table.add_column(name, justify="left" if name == "images/s" else "right", no_wrap=name != "images/s")
    for pair in comparison.pairs:
        sides = [(f"{side.value:,.0f}", f"{side.low:,.0f} - {side.high:,.0f}") for side in (pair.first, pair.second)]
        cells = [cell for value, spread in sides for cell in (value, "predicted" if pair.is_predicted else spread)]
        table.add_row(pair.what, *cells)
    if comparison.pairs:
        console.print(table)
    for reason in comparison.reasons:
        say(f"not comparable: {reason}")
    for pair in comparison.pairs if comparison.is_comparable else ():
        say(pair.verdict if len(comparison.pairs) == 1 else f"{pair.what}: {pair.verdict}")
    for note in comparison.notes:
        say(f"note: {note}")


_EVERY = 1.0  # seconds


def run_watch(parsed: argparse.Namespace) -> None:
    if parsed.serve is not None and (parsed.once or parsed.json):
        flag = "--once" if parsed.once else "--json"
        raise ValueError(f"--serve shows the run until Ctrl-C but {flag} shows it once; give one of them")
    folder = Path(parsed.folder) if parsed.folder else _newest()
    if parsed.serve is not None:
        _serve(folder, parsed.serve)
        return
    watch = Watch(folder, layout_of(folder))
    console = Console()
    if parsed.json:
        print(json.dumps(look_at(watch, folder).describe()))
    elif parsed.once:
        _show(console, look_at(watch, folder))
    else:
        try:
            (_live if console.is_terminal and has_blocks(console) else _lines)(console, watch, folder)
        except KeyboardInterrupt:
            print("no longer watched; the run goes on")


def _newest() -> Path:
    found = [folder for folder in Path("runs").glob("*") if is_run(folder)]
    if not found:
        raise ValueError("there is no run in runs/; give the folder of one: stagewright watch RUN")
    return newest(found)


def _show(console: Console, moment: Moment) -> None:
    console.print(as_screen(moment, console.width) if has_blocks(console) else as_line(moment), highlight=False)


def _live(console: Console, watch: Watch, folder: Path) -> None:
    """A screen that stays where it is, until the run ends."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            moment = look_at(watch, folder)
            live.update(as_screen(moment, console.width), refresh=True)
            if not moment.is_running:
                return
            time.sleep(_EVERY)


def _lines(console: Console, watch: Watch, folder: Path) -> None:
    """A line whenever steps have come, for a pipe or a file."""
    last: tuple[int, str] | None = None
    while True:
        moment = look_at(watch, folder)
        if (moment.done, moment.state) != last:
            last = (moment.done, moment.state)
            console.file.write(f"{as_line(moment)}\n")
            console.file.flush()
        if not moment.is_running:
            return
        time.sleep(_EVERY)


def _serve(folder: Path, port: int) -> None:
    layout_of(folder)  # what is no run is an error here, not in the browser
    with PageServer(port, lambda: live_page(folder)) as server:
        print(f"{server.url} shows {folder} to this machine's browsers; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("no longer served; the run goes on")
