"""`stagewright watch`: a run while it runs, in the terminal or in a browser on this machine."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.commands.options import Commands, add_json

if TYPE_CHECKING:
    from rich.console import Console

    from stagewright.report.watch import Moment, Watch

_EVERY = 1.0  # seconds


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "watch",
        help="follow a run in the terminal, or in a browser with --serve",
        description="Follow a run: a screen in a terminal, lines anywhere else. It ends when the run ends.",
    )
    parser.add_argument("folder", metavar="RUN", nargs="?", help="a run folder (default: the newest in runs/)")
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")
    parser.add_argument(
        "--serve", metavar="PORT", type=int, nargs="?", const=0, help="serve the run's page to this machine's browsers"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from rich.console import Console

    from stagewright.report.terminal import has_blocks
    from stagewright.report.watch import Watch
    from stagewright.reporting import layout_of, look_at

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
    from stagewright.runfolder import is_run, newest

    found = [folder for folder in Path("runs").glob("*") if is_run(folder)]
    if not found:
        raise ValueError("there is no run in runs/; give the folder of one: stagewright watch RUN")
    return newest(found)


def _show(console: Console, moment: Moment) -> None:
    from stagewright.report.terminal import has_blocks
    from stagewright.report.watch import as_line, as_screen

    console.print(as_screen(moment, console.width) if has_blocks(console) else as_line(moment), highlight=False)


def _live(console: Console, watch: Watch, folder: Path) -> None:
    """A screen that stays where it is, until the run ends."""
    from rich.live import Live

    from stagewright.report.watch import as_screen
    from stagewright.reporting import look_at

    with Live(console=console, auto_refresh=False) as live:
        while True:
            moment = look_at(watch, folder)
            live.update(as_screen(moment, console.width), refresh=True)
            if not moment.is_running:
                return
            time.sleep(_EVERY)


def _lines(console: Console, watch: Watch, folder: Path) -> None:
    """A line whenever steps have come, for a pipe or a file."""
    from stagewright.report.watch import as_line
    from stagewright.reporting import look_at

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
    from stagewright.report.serve import PageServer
    from stagewright.reporting import layout_of, live_page

    layout_of(folder)  # what is no run is an error here, not in the browser
    with PageServer(port, lambda: live_page(folder)) as server:
        print(f"{server.url} shows {folder} to this machine's browsers; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("no longer served; the run goes on")
