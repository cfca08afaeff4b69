"""A headless Chromium that the tests of pages share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
_LIMIT = 300_000  # milliseconds after which the browser will not answer any more


def find_chromium() -> str | None:
    """The browser that STAGEWRIGHT_CHROMIUM names, or the system's."""
    named = os.environ.get("STAGEWRIGHT_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser; its driver keeps an event loop in this thread, so it does not outlive the module."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set STAGEWRIGHT_CHROMIUM to one")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to start as root
        browser = driver.chromium.launch(executable_path=path, args=root, timeout=_LIMIT)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page in the browser, with its console messages and requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def timeline(self) -> dict[str, float]:
        """What the first timeline reports: bars, drawn, from, to, milliseconds."""
        found = self.page.evaluate("({...document.querySelector('.timeline').dataset})")
        return {name: float(value) for name, value in found.items()}

    def wait_drawn(self) -> None:
        """Wait until the browser has drawn what was requested."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Opened]]:
    """Opens a file or an address."""
    contexts = []

    def visit(where: Path | str, width: int = 1200, scheme: str = "light", has_touch: bool = False) -> Opened:
        screen = {"width": width, "height": 900}
        context = chromium.new_context(
            viewport=screen,
            color_scheme=scheme,
            has_touch=has_touch,
            reduced_motion="reduce",  # so that nothing scrolls away from where a test points
        )
        context.set_default_timeout(_LIMIT)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.messages.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.messages.append(f"error: {error}"))
        opened.page.on("dialog", lambda dialog: (opened.messages.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(where.as_uri() if isinstance(where, Path) else where)
        opened.page.wait_for_selector("html[data-ready]")
        return opened

    yield visit
    for context in contexts:
        context.close()
