"""The page that `demo` writes, opened as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from stagewright.bench.demo.page import demo_page, sentences
from stagewright.run.report import write_page
from tests.browser.conftest import Opened
from tests.browser.test_report_page import COUNT, colours
from tests.demo import make_demo
from tests.marks import soak
from tests.waiting import LONG


def check(opened: Opened, path: Path) -> None:
    assert opened.messages == [] and opened.requests == [path.as_uri()]
    assert path.stat().st_size < 1_000_000
    for word in ("Throughput", "Result", "Accuracy over time", "How it was measured"):
        assert opened.page.get_by_role("heading", name=word, exact=True).count() == 1
    assert opened.page.locator("canvas").count() == 2
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_explains_the_demo_in_three_sentences(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    demo = make_demo()
    path = write_page(demo_page(demo), tmp_path / "report.html")[0]
    opened = visit(path)
    check(opened, path)
    shown = opened.page.locator(".summary").inner_text()
    assert all(sentence in shown for sentence in sentences(demo))


@soak
def test_the_page_of_the_whole_demo(tmp_path: Path, visit: Callable[..., Opened]) -> None:
    command = [sys.executable, "-m", "stagewright", "demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG, check=True)
    found = json.loads(done.stdout)
    path = Path(found["report"])
    opened = visit(path)
    check(opened, path)
    assert all(opened.page.evaluate(COUNT, colour) > 100 for colour in colours(opened, "forward", "backward", "update"))
    reached = [side["accuracies"][-1] for side in found["sides"].values()]
    assert min(reached) > 0.95 and abs(reached[0] - reached[1]) < 0.02
    assert found["low"] <= found["ratio"] <= found["high"]
