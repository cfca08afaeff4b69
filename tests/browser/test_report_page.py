"""Reports in a real browser: drawing, zooming, keyboard, touch, dark mode and narrow screens, without errors."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from PIL import Image

from stagewright.metrics import Span, Timeline
from stagewright.report.html import as_html
from stagewright.report.live.serve import PageServer
from stagewright.report.page import Page, Pipeline, Table
from stagewright.run.folder import run_lock
from stagewright.run.report import live_page, make_page, runs_page, write_page
from tests.browser.conftest import Opened
from tests.made_runs import append, make_run, steps, timeline, usage
from tests.unit.report.test_html import EVIL, whole

Visit = Callable[..., Opened]
END = timeline(10).end
LABELS, AXIS, ROW = 150, 22, 60  # of a wide timeline with few ranks, in pixels
COUNT = """(colour) => {
    const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d");
    const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
    let count = 0;
    for (let at = 0; at < data.length; at += 4) {
        count += wanted.every((value, part) => Math.abs(data[at + part] - value) < 3);
    }
    return count;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with every kind of section."""
    folder = make_run(
        tmp_path_factory.mktemp("page") / "run",
        summary={"predicted_images_per_second": 336.0},
        monitor=usage(gpus=2),
        trace=timeline(10),
    )
    return write_page(make_page([folder]), folder / "report.html")[0]


def bar_at(opened: Opened, rank: int, seconds: float, labels: int = LABELS) -> tuple[float, float]:
    """The position on the screen of a moment in a rank's compute lane."""
    box, shown = opened.page.locator("canvas").bounding_box(), opened.timeline
    x = labels + (seconds - shown["from"]) / (shown["to"] - shown["from"]) * (box["width"] - labels)
    return box["x"] + x, box["y"] + AXIS + (rank + 0.25) * ROW


def colours(opened: Opened, *names: str) -> list[str]:
    read = "(name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim()"
    return [opened.page.evaluate(read, name) for name in names]


@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_drawn_without_errors_or_requests(report: Path, visit: Visit, width: int, scheme: str) -> None:
    opened = visit(report, width, scheme)
    assert opened.messages == [] and opened.requests == [report.as_uri()]
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    forward, backward, waiting, back = colours(opened, "forward", "backward", "waiting", "back")
    drawn = [opened.page.evaluate(COUNT, colour) for colour in (forward, backward, waiting)]
    area = opened.page.evaluate("document.querySelector('canvas').width * document.querySelector('canvas').height")
    assert all(count > area / 200 for count in drawn), drawn
    assert drawn[1] > 1.3 * drawn[0], "backward takes longer than forward"
    assert int(back[1:3], 16) < 64 if scheme == "dark" else int(back[1:3], 16) > 192


def test_a_phone_shows_all_rows_and_shades_hidden_columns(tmp_path: Path, visit: Visit) -> None:
    path, columns = tmp_path / "wide.html", tuple(f"a column {number}" for number in range(9))
    rows = tuple(tuple(f"{column} of row {row}" for column in columns) for row in range(40))
    path.write_text(as_html(Page("p", (Table("wide", columns, rows), Table("narrow", ("a", "b"), (("1", "2"),))))))
    opened = visit(path, 390)
    wide, narrow = opened.page.locator("section > .scroll").all()
    assert wide.evaluate("(box) => box.scrollHeight - box.clientHeight") == 0, "no row is hidden"
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390

    def grey_at(box: Any, share: float) -> int:
        """How bright a box is at a share of its width, between its letters: 255 is white."""
        with Image.open(io.BytesIO(box.screenshot())) as shot:
            x, grey = round(share * (shot.width - 1)), shot.convert("L")
        return int(median(grey.getpixel((x, y)) for y in range(grey.height // 2)))

    assert grey_at(wide, 1.0) < 220 < grey_at(wide, 0.9), "the edge behind which columns hide is shaded"
    assert grey_at(narrow, 1.0) > 250
    wide.evaluate("(box) => { box.scrollLeft = box.scrollWidth; }")
    assert grey_at(wide, 1.0) > 250
    first = opened.page.get_by_role("cell", name="a column 0 of row 3", exact=True)
    assert first.bounding_box()["x"] == pytest.approx(wide.bounding_box()["x"], abs=1), "which row it is stays in sight"


def test_the_wheel_zooms_around_the_pointer(report: Path, visit: Visit) -> None:
    opened = visit(report)
    opened.page.locator("canvas").scroll_into_view_if_needed()
    x, y = bar_at(opened, 1, 0.2)
    opened.page.mouse.move(x, y)
    opened.page.mouse.move(x + 1, y)
    before, scrolled = opened.timeline, opened.page.evaluate("scrollY")
    for _ in range(5):
        opened.page.mouse.wheel(0, -120)
        opened.wait_drawn()
    after = opened.timeline
    assert after["to"] - after["from"] == pytest.approx(
        (before["to"] - before["from"]) * 2.718 ** (-5 * 120 / 300), rel=0.02
    )
    assert after["from"] < 0.2 < after["to"] and bar_at(opened, 1, 0.2)[0] == pytest.approx(x, abs=3)
    assert opened.page.evaluate("scrollY") == scrolled, "the page stays where it is"
    opened.page.mouse.wheel(0, 3000)
    opened.page.mouse.wheel(0, 3000)
    opened.wait_drawn()
    assert (opened.timeline["from"], opened.timeline["to"]) == (0, pytest.approx(END))


def test_dragging_moves_and_buttons_zoom(report: Path, visit: Visit) -> None:
    opened = visit(report)
    opened.page.get_by_role("button", name="Zoom in").click()
    opened.page.get_by_role("button", name="Zoom in").click()
    opened.wait_drawn()
    zoomed = opened.timeline
    assert zoomed["to"] - zoomed["from"] == pytest.approx(END / 4)
    x, y = bar_at(opened, 1, (zoomed["from"] + zoomed["to"]) / 2)
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.move(x - 100, y, steps=4)
    opened.page.mouse.up()
    opened.wait_drawn()
    assert opened.timeline["from"] > zoomed["from"] + 0.01
    opened.page.get_by_role("button", name="Earlier").click()
    opened.page.get_by_role("button", name="Show all").click()
    opened.wait_drawn()
    assert (opened.timeline["from"], opened.timeline["to"]) == (0, pytest.approx(END))


def test_touch_moves_and_zooms(report: Path, visit: Visit) -> None:
    opened = visit(report, 375, has_touch=True)
    opened.page.locator("canvas").scroll_into_view_if_needed()
    box = opened.page.locator("canvas").bounding_box()
    middle, y = box["x"] + 200, box["y"] + 60
    session = opened.page.context.new_cdp_session(opened.page)

    def touch(kind: str, *xs: float) -> None:
        points = [{"x": x, "y": y, "id": number} for number, x in enumerate(xs)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", middle - 20, middle + 20)
    for away in range(25, 81, 5):
        touch("touchMove", middle - away, middle + away)
    touch("touchEnd")
    opened.wait_drawn()
    near = opened.timeline
    assert near["to"] - near["from"] == pytest.approx(END / 4, rel=0.3), "fingers four times as far apart"
    touch("touchStart", middle)
    for moved in range(5, 61, 5):
        touch("touchMove", middle - moved)
    touch("touchEnd")
    opened.wait_drawn()
    assert opened.timeline["from"] > near["from"] + 0.05 and opened.messages == []
    opened.page.get_by_role("button", name="Show all").click()
    opened.page.locator(".range", has_text="0 s to 2.05 s").wait_for()
    opened.page.locator("canvas").scroll_into_view_if_needed()
    opened.page.touchscreen.tap(*bar_at(opened, 2, 0.71, labels=44))
    opened.page.locator(".tip:visible", has_text="1F14@3: forward of microbatch 14").wait_for()


def test_hovering_shows_action_version_and_duration(report: Path, visit: Visit) -> None:
    opened = visit(report)
    opened.page.locator("canvas").scroll_into_view_if_needed()
    tip = opened.page.locator(".tip")
    for rank, seconds, words in (
        (
            0,
            0.105,
            ["0F2@0", "forward of microbatch 2 at stage 0 on version 0", "15 ms, from 100 ms on", "rank 0 (stage 0)"],
        ),
        (1, 0.575, ["0B11@1", "backward of microbatch 11 at stage 0 on version 1", "25 ms", "rank 1 (stage 0)"]),
        (2, 0.21, ["1F4@1", "forward of microbatch 4 at stage 1 on version 1", "20 ms"]),
    ):
        opened.page.mouse.move(*bar_at(opened, rank, seconds))
        text = tip.inner_text()
        assert all(word in text for word in words), text
    x, y = bar_at(opened, 0, 0.07)
    opened.page.mouse.move(x, y + 0.52 * ROW)
    assert "0RG0<2: waiting for receive gradient of microbatch 0 at stage 0 from rank 2" in tip.inner_text()
    opened.page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_the_keyboard_reaches_everything(report: Path, visit: Visit) -> None:
    opened = visit(report)
    keyboard, seen = opened.page.keyboard, []
    for _ in range(60):
        keyboard.press("Tab")
        tag = opened.page.evaluate("document.activeElement.tagName")
        seen.append(tag)
        if tag == "CANVAS":
            break
    assert {"A", "BUTTON", "SUMMARY", "CANVAS"} <= set(seen)
    keyboard.press("+")
    opened.wait_drawn()
    near = opened.timeline
    assert near["to"] - near["from"] == pytest.approx(END / 2)
    keyboard.press("ArrowRight")
    opened.wait_drawn()
    assert opened.timeline["from"] == pytest.approx(near["from"] + END / 10)
    keyboard.press("0")
    keyboard.press("Enter")
    status = opened.page.locator(".live")
    announced = [status.inner_text()]
    assert announced[0].startswith("0") and "rank 0" in announced[0]
    for key, words in (
        (".", "rank 0"),
        (",", announced[0][:5]),
        ("ArrowDown", "rank 1"),
        ("ArrowDown", "rank 2"),
        ("ArrowUp", "rank 1"),
    ):
        keyboard.press(key)
        assert words in status.inner_text(), (key, status.inner_text())
    starts = []
    for _ in range(6):
        keyboard.press(".")
        starts.append(status.inner_text())
    assert len(set(starts)) == 6, "each step is another bar"
    for _ in range(200):
        keyboard.press(",")
    walked = [status.inner_text()]
    for _ in range(200):
        keyboard.press(".")
        walked.append(status.inner_text())
    own = [span for span in timeline(10).spans if span.rank == 1]
    assert len(set(walked)) == len(own), "every bar of the rank can be reached"
    keyboard.press("-")
    keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.tagName") != "CANVAS", "the timeline lets the keyboard go"


def test_numbers_can_be_copied(report: Path, visit: Visit) -> None:
    opened = visit(report)
    opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.page.locator("summary").first.click()
    button = opened.page.locator("details .copy").first
    button.click()
    button.get_by_text("Copied").or_(button.filter(has_text="Copied")).wait_for()
    copied = opened.page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines() == ["\timages/s\thow", "measured\t320\tmeasured", "predicted\t336\tpredicted"]


def test_hostile_names_are_shown_as_text(tmp_path: Path, visit: Visit) -> None:
    path = tmp_path / "evil.html"
    path.write_text(as_html(whole(EVIL)))
    opened = visit(path)
    opened.page.locator("canvas").scroll_into_view_if_needed()
    opened.page.mouse.move(*bar_at(opened, 0, 0.75))
    assert opened.messages == [] and opened.requests == [path.as_uri()]
    assert opened.page.locator("h1").inner_text() == EVIL
    assert opened.page.locator(".tip").inner_text().startswith(EVIL)


def test_the_policy_blocks_scripts_styles_and_requests(report: Path, visit: Visit) -> None:
    opened = visit(report)
    blocked = opened.page.evaluate(
        """async () => {
            const seen = [];
            document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
            const outside = '<img src="http://127.0.0.1:9/x.png"><p style="color: red">x</p>';
            document.body.insertAdjacentHTML("beforeend", outside);
            const script = document.createElement("script");
            script.textContent = "window.entered = true";
            document.body.append(script);
            await fetch("http://127.0.0.1:9/").catch(() => {});
            await new Promise((done) => setTimeout(done, 100));
            return [...seen, String(window.entered)];
        }"""
    )
    assert {"img-src", "style-src-attr", "script-src-elem", "connect-src", "undefined"} == set(blocked)


def bars(count: int) -> Timeline:
    """A timeline of so many bars on eight ranks, short and long, in all lanes."""
    spans = []
    for number in range(count):
        rank, turn = number % 8, number // 8
        lane, kind = [("compute", "F"), ("compute", "B"), ("transfer", "SA"), ("wait", "RG"), ("compute", "U")][
            turn % 5
        ]
        start = turn * 1.3e-3 + rank * 1e-4
        name = (
            f"0{kind}@{turn}"
            if kind == "U"
            else f"{rank % 2}{kind}{turn}" + (">1" if kind == "SA" else "<1" if kind == "RG" else f"@{turn // 7}")
        )
        spans.append(Span(rank, lane, kind, name, start, start + 1e-3 * (1 + number % 3) / 3))
    return Timeline(tuple(spans))


def test_ten_thousand_bars_make_a_small_page_and_are_all_drawn(tmp_path: Path, visit: Visit) -> None:
    path = tmp_path / "many.html"
    path.write_text(as_html(Page("many", (Pipeline("P", bars(10_240), tuple(f"rank {r}" for r in range(8))),))))
    assert path.stat().st_size < 1_000_000
    opened = visit(path)
    ready = float(opened.page.evaluate("document.documentElement.dataset.ready"))
    assert opened.timeline["bars"] == 10_240
    opened.page.locator("canvas").focus()
    opened.page.keyboard.press("0")
    opened.wait_drawn()
    assert (opened.timeline["from"], opened.timeline["drawn"]) >= (0, 1000), "the whole is on the screen"
    frames = []
    for key in ["+"] * 8 + ["ArrowRight"] * 8 + ["-"] * 8:
        opened.page.keyboard.press(key)
        opened.wait_drawn()
        frames.append(opened.timeline["milliseconds"])
    print(f"{path.stat().st_size:,} bytes, ready in {ready:.0f} ms, frames {min(frames):.1f} to {max(frames):.1f} ms")


def test_a_served_page_updates_with_the_run(tmp_path: Path, visit: Visit) -> None:
    folder = make_run(tmp_path / "run", steps(5), is_finished=False)
    with PageServer(0, lambda path: live_page(folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with run_lock(folder):
                opened = visit(server.url)
                first = opened.page.locator(".summary p").first
                assert "5 of 20 steps" in first.inner_text()
                opened.page.locator("summary").first.click()
                opened.page.evaluate("document.activeElement.blur()")  # a part that is being read is left alone
                append(folder, *steps(9)[5:])
                opened.page.locator(".summary p", has_text="9 of 20 steps").wait_for()
                assert opened.page.locator("details[open]").count() == 1, "what was open stays open"
            opened.page.get_by_role("heading", name="Now").wait_for(state="detached")
            assert set(opened.requests) == {server.url} and opened.messages == []
        finally:
            server.shutdown()
            thread.join()


def test_the_list_of_runs_follows_them_and_leads_to_each(tmp_path: Path, visit: Visit) -> None:
    folder = make_run(tmp_path / "runs" / "20260101-120000-vgg-small-stale-2-1", steps(5), is_finished=False)
    with PageServer(0, lambda path: runs_page(tmp_path / "runs", path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for scheme in ("light", "dark"):
                opened = visit(server.url, width=390, scheme=scheme)
                assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
            opened.page.get_by_role("cell", name="stopped").wait_for()
            with run_lock(folder):
                opened.page.get_by_role("cell", name="running").wait_for()
            opened.page.get_by_role("link", name=folder.name).click()
            opened.page.get_by_role("heading", name="vgg-small, stale 2-1").wait_for()
            assert {url.removeprefix(server.url) for url in opened.requests} == {"", f"{folder.name}/"}
            assert opened.messages == []
        finally:
            server.shutdown()
            thread.join()


def test_a_timeline_of_one_rank_without_bars_is_drawn(tmp_path: Path, visit: Visit) -> None:
    path = tmp_path / "empty.html"
    blocks = (Pipeline("none", Timeline(()), ("rank 0",)), Pipeline("three", timeline(), ("a", "b", "c")))
    path.write_text(as_html(Page("p", blocks)))
    opened = visit(path)
    opened.page.locator("canvas").first.focus()
    for key in ("+", ".", "Enter", "ArrowLeft", "-", "0"):
        opened.page.keyboard.press(key)
    opened.wait_drawn()
    assert opened.messages == []


def names(element: Any) -> str:
    return str(element.get_attribute("aria-label") or element.text_content())


def test_every_control_has_an_accessible_name(report: Path, visit: Visit) -> None:
    opened = visit(report)
    for element in opened.page.locator("button, a, summary, canvas").all():
        assert names(element).strip()
    for figure in opened.page.locator("figure").all():
        caption = figure.get_attribute("aria-describedby")
        assert opened.page.locator(f"#{caption}").inner_text().strip()
