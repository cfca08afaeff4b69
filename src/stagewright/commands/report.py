"""`stagewright report`: what runs were like, as a page to look at and one to paste."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stagewright.commands.options import Commands, add_json


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="write the page of a run, or one that compares several",
        description="Write report.html (one file, works offline) and report.md of a run, or of several side by side.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the .html file (default: in the run's folder; several: .)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    from stagewright.report.page import Verdict
    from stagewright.reporting import page_of_runs, write_page

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
