"""The page that `demo` writes, opened as a user would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.cli.train import COMMON, PLANS, write_comparison
from stagewright.config.toml import make_config
from stagewright.run.train import run
from tests.browser.conftest import Opened
from tests.browser.test_report_page import COUNT, colours
from tests.marks import soak
from tests.waiting import LONG


def check(opened: Opened, path: Path, *words: str) -> None:
    assert opened.messages == [] and opened.requests == [path.as_uri()]
    assert path.stat().st_size < 1_000_000
    for word in ("Overview", "Loss", "Configurations", *words):
        assert opened.page.get_by_role("heading", name=word, exact=True).count() == 1
    assert "2+1 stages, stale" in opened.page.locator(".summary").inner_text()


def test_the_page_of_a_small_demo(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    short = {"run": {"steps": 3, "emulate": True, "runs": str(tmp_path)}, "data": {"samples": 64}}
    results = {name: run(make_config(COMMON, {"plan": plan}, short)) for name, plan in PLANS.items()}
    path = write_comparison(results)
    check(visit(path), path)


@soak
def test_the_page_of_the_whole_demo(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    path = Path(done.stdout.splitlines()[-1].removeprefix("open in a browser: "))
    opened = visit(path)
    check(opened, path, "Throughput")
    forward, backward, update = colours(opened, "forward", "backward", "update")
    assert all(opened.page.evaluate(COUNT, colour) > 100 for colour in (forward, backward, update))
    opened.page.locator("canvas").first.focus()
    opened.page.keyboard.press("Enter")
    assert "stage 0" in opened.page.locator(".live").first.inner_text()
    assert pytest.approx(opened.timeline["bars"], rel=0.5) == 6000
