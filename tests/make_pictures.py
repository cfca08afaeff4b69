"""Renders pages as pictures: wide and as on a phone, light and dark.

`python -m tests.make_pictures OUT` makes the page of a run, a comparison, a bench, a prediction, a live page and the
list of runs from made runs; `--page NAME=FILE` renders a page of yours as well, or in place of one of these. The
pictures of docs: `python -m tests.make_pictures docs/pictures --page demo=runs/<id>/report.html`.
It also prints how large a page of 10,240 bars is, and how soon it is ready.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from stagewright.bench.pages import outcome_page
from stagewright.bench.result import Outcome, measured_row
from stagewright.bench.run import with_speedups
from stagewright.cli.main import main as stagewright
from stagewright.events import Evaluated, Saved, Step
from stagewright.metrics import Span, Timeline
from stagewright.report.html import as_html
from stagewright.report.live.serve import PageServer
from stagewright.report.page import Page, Pipeline
from stagewright.run.folder import FAULT_FILE, name_run, run_lock, tag_run
from stagewright.run.report import make_page, runs_page, write_page
from stagewright.runtime.status_file import OPS, RECORD, RankState, status_path
from stagewright.schedule.action import Op
from tests.browser.conftest import find_chromium
from tests.made_runs import delayed, make_run, timeline, usage

SCREENS = {"wide": (1400, 900), "phone": (390, 844)}
MOST_BYTES, BARS = 120_000, 10_240
DATA_PARALLEL = {"mode": "dp", "placement": "0:0", "cuts": [], "versions": [1], "depths": [1]}


def learning(count: int, speed: float, seed: int, end: float) -> list[Any]:
    """Steps with noise, four evaluations that pause training, and a checkpoint."""
    noise, seconds, records = random.Random(seed), 0.0, []
    for batch in range(count):
        pause = 1.2 if batch and batch % (count // 4) == 0 else 0.0
        seconds += pause + 64 / speed * noise.uniform(0.93, 1.08)
        loss = end + (2.3 - end) * math.exp(-3 * batch / count) + noise.gauss(0, 0.06)
        records.append(Step(batch, batch // 50, loss, 0.02, seconds, speed))
    for batch in range(count // 4, count + 1, count // 4):
        share = 1 - 0.9 * math.exp(-3 * batch / count)
        scores = {"top1": share - 0.03 - 0.05 * seed, "top5": min(0.998, share + 0.08) - 0.01 * seed}
        records.append(Evaluated(batch, 2000, end + 0.05 + 2 * (1 - share), scores))
    return [*records, Saved(count * 3 // 8, 10**7, 0.4)]


def make_pages(folder: Path) -> dict[str, Path]:
    """The pages that need nobody else's files, by name."""
    trace = delayed(timeline(80), 200, 0.4)
    predicted = {"images_per_second": 318.0, "predicted_images_per_second": 331.0}
    ours = make_run(
        folder / "20260101-120000-vgg-small-stale-2-1",
        learning(400, 320.0, 0, 0.2),
        trace=trace,
        summary=predicted,
        monitor=usage(90),
    )
    alone = Timeline(tuple(replace(s, rank=0, name=f"0{s.name[1:]}") for s in trace.spans if s.rank == 2))
    theirs = make_run(
        folder / "20260101-123000-vgg-small-dp-1",
        learning(400, 210.0, 1, 0.22),
        plan=DATA_PARALLEL,
        trace=alone,
        summary={"images_per_second": 209.0},
        monitor=usage(90),
    )
    seven = [1213.0, 1220.0, 1198.0, 1207.0, 1215.0]
    rows = with_speedups(
        [
            measured_row("VGG-16", "dp", [rate / 1.62 for rate in seven], data="synthetic", is_baseline=True),
            measured_row("VGG-16", "sync 7+1", [rate / 1.2 for rate in seven], data="synthetic"),
            measured_row(
                "VGG-16", "stale 7+1", [rate + 4 * number for number, rate in enumerate(seven)], data="synthetic"
            ),
        ]
    )
    machine = {
        "processor": "made for this picture",
        "system": "Debian GNU/Linux 12",
        "cores": "2",
        "memory": "23.5 GiB",
        "Python": "3.11.7",
        "torch": "2.13.0",
        "GPUs": "none",
        "CUDA": "not there",
    }
    bench = Outcome("stages", "Unequal stages", "stagewright bench stages", "2026-01-01", 5, 60, machine, tuple(rows))
    prediction = folder / "prediction.html"
    plan = ["--cluster", "titan-v-8", "--batch", "224", "--mode", "stale", "--placement", "0:0-6.0:7"]
    stagewright(["simulate", "vgg16", *plan, "--report", str(prediction)])
    return {
        "run": write_page(make_page([ours]), folder / "run.html")[0],
        "comparison": write_page(make_page([ours, theirs]), folder / "comparison.html")[0],
        "bench": write_page(outcome_page(bench), folder / "bench.html")[0],
        "prediction": prediction,
    }


@contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """The addresses of a list of runs and of the page of the one that is under way, by name."""
    runs = folder / "runs"
    known = [record for record in learning(400, 320.0, 0, 0.2) if record.batch < 260]
    running = make_run(runs / "20260102-091500-vgg-small-stale-2-1", known, is_finished=False, monitor=usage(50))
    (running / "job.json").write_text(json.dumps({"batches": 400}))
    (running / "ranks").mkdir()
    doing = ((Op.FORWARD, 0, 1042, 259, -1), (Op.RECV_GRAD, 0, 1039, -1, 2), (Op.BACKWARD, 1, 1040, 260, -1))
    for rank, (op, *numbers) in enumerate(doing):
        state = RankState.WAITING if op is Op.RECV_GRAD else RankState.WORKING
        status_path(running, rank).write_bytes(RECORD.pack(OPS.index(op) + 1, *numbers, 9000, state, 1))
    make_run(runs / "20260102-084012-vgg-small-stale-2-1", learning(40, 318.0, 0, 0.9)[:40], is_finished=False)
    finished = (
        ("20260101-170433-vgg-small-sync-2-1", {"mode": "sync", "versions": [1, 1]}, 259.0, 0.9465),
        ("20260101-154500-vgg-small-dp-1", DATA_PARALLEL, 209.0, 0.9512),
    )
    for name, plan, speed, top1 in finished:
        found = {"images_per_second": speed, "evaluations": [{"metrics": {"top1": top1}}]}
        make_run(runs / name, learning(400, speed, 1, 0.2), plan=plan, summary=found)
    name_run(runs / finished[0][0], "baseline")
    tag_run(runs / finished[0][0], ("paper", "vgg"), ())
    failed = make_run(
        runs / "20260101-154107-vgg-small-dp-1", learning(8, 90.0, 1, 2.2)[:8], plan=DATA_PARALLEL, is_finished=False
    )
    (failed / FAULT_FILE).write_text("rank 0 ran out of memory\n")
    for hours, one in zip((0, 1, 16, 17, 18), sorted(runs.iterdir(), reverse=True), strict=True):
        os.utime(one / "plan.json", (time.time() - 3600 * hours,) * 2)
    with chdir(folder), PageServer(0, lambda path: runs_page(Path("runs"), path)) as server, run_lock(running):
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {"live": f"{server.url}{running.name}/", "runs": server.url}
        finally:
            server.shutdown()
            thread.join()


def take(browser: Any, address: str, target: Path) -> None:
    """A picture of the first screen for every size and scheme, in at most 256 colours."""
    for screen, (width, height) in SCREENS.items():
        for scheme in ("light", "dark"):
            size = {"width": width, "height": height}
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            page = context.new_page()
            page.goto(address)
            page.wait_for_load_state()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{address} scrolls sideways"
            path = target.with_name(f"{target.name}-{screen}-{scheme}.png")
            page.screenshot(path=path)
            context.close()
            shrink(path)


def take_timeline(browser: Any, address: str, path: Path) -> None:
    """A picture of a timeline with a bar pointed at."""
    page = browser.new_page(viewport={"width": 1100, "height": 900}, reduced_motion="reduce")
    page.goto(address)
    section = page.locator("section", has=page.locator(".timeline"))
    section.scroll_into_view_if_needed()
    box = page.locator("canvas").bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 160)
    section.screenshot(path=path)
    page.close()
    shrink(path)


def shrink(path: Path) -> None:
    """Store a picture with as many colours as fit its limit."""
    with Image.open(path) as picture:
        whole = picture.convert("RGB")
    seen = np.asarray(whole, np.int32).reshape(-1, 3) @ (65536, 256, 1)
    found, places, counts = np.unique(seen, return_inverse=True, return_counts=True)
    parts = np.stack([found >> 16, found >> 8 & 255, found & 255], 1)
    for colours in (256, 128, 64, 32):  # the most frequent ones stay as they are, so that a background has its own
        palette = parts[np.argsort(-counts)[:colours]]
        nearest = ((parts[:, None] - palette) ** 2).sum(2).argmin(1)
        small = Image.fromarray(nearest[places].astype(np.uint8).reshape(whole.size[::-1]), "P")
        small.putpalette(palette.astype(np.uint8).tobytes())
        small.save(path, optimize=True)
        if path.stat().st_size < MOST_BYTES:
            break
    print(f"{path}  {path.stat().st_size:,} bytes")


def time_bars(browser: Any, folder: Path) -> None:
    """Print how large a page of many bars is, and how soon a browser has drawn it."""
    spans = []
    for number in range(BARS):
        mark, start = "FB"[number // 8 % 2], number / 8e3
        spans.append(Span(number % 8, "compute", mark, f"0{mark}{number}@0", start, start + 9e-4))
    path, ranks = folder / "bars.html", tuple(f"rank {rank}" for rank in range(8))
    path.write_text(as_html(Page("bars", (Pipeline("Timeline", Timeline(tuple(spans)), ranks),))))
    page = browser.new_page()
    page.goto(path.as_uri())
    ready = page.wait_for_selector("html[data-ready]", state="attached").get_attribute("data-ready")
    print(f"{BARS:,} bars: a page of {path.stat().st_size:,} bytes, ready in {ready} ms")


def address_of(file: str) -> str:
    """The address of a page: of a file, or one that is served."""
    return file if file.startswith("http://127.0.0.1:") else Path(file).resolve().as_uri()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.make_pictures")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--page", action="append", default=[], metavar="NAME=FILE", help="a file or a served page to render as well"
    )
    parser.add_argument("--only", nargs="*", help="names of pages")
    parsed = parser.parse_args()
    out = parsed.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    given = {name: address_of(file) for name, _, file in (text.partition("=") for text in parsed.page)}
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as made, sync_playwright() as driver, served(Path(made)) as addresses:
        pages = {name: path.as_uri() for name, path in make_pages(Path(made)).items()} | addresses | given
        browser = driver.chromium.launch(executable_path=find_chromium(), args=root)
        for name, url in pages.items():
            if not parsed.only or name in parsed.only:
                take(browser, url, out / name)
        if not parsed.only or "timeline" in parsed.only:
            take_timeline(browser, pages["run"], out / "timeline.png")
        time_bars(browser, Path(made))
        browser.close()


if __name__ == "__main__":
    main()
