"""Reports in a real browser: drawing, zooming, keyboard, touch, dark mode and narrow screens, without errors."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from PIL import Image

from stagewright.events import Evaluated, Saved
from stagewright.metrics import Span, Timeline
from stagewright.report.html import as_html
from stagewright.report.live.serve import PageServer
from stagewright.report.page import Page, Pipeline, Table
from stagewright.run.folder import run_lock
from stagewright.run.report import live_page, make_page, runs_page, write_page
from tests.browser.conftest import Opened
from tests.made_runs import append, delayed, make_run, steps, timeline, usage
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
        [*steps(20), Evaluated(10, 512, 0.9), Saved(10, 9, 0.1), Evaluated(20, 512, 0.5, {"top1": 0.75, "top5": 0.99})],
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
    assert after["from"] < 0.2 < after["to"] and bar_at(opened, 1, 0.2)[0] == pytest.approx(x, abs=7)
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
    opened.page.touchscreen.tap(*bar_at(opened, 2, 0.71, labels=52))
    opened.page.locator(".timeline .tip:visible", has_text="1F14@3: forward of microbatch 14").wait_for()


def test_hovering_shows_action_version_and_duration(report: Path, visit: Visit) -> None:
    opened = visit(report)
    opened.page.locator("canvas").scroll_into_view_if_needed()
    tip = opened.page.locator(".timeline .tip")
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
    assert "0RG0<2: waiting to start: receive gradients of microbatch 0 at stage 0 from rank 2" in tip.inner_text()
    opened.page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_the_keyboard_reaches_everything(report: Path, visit: Visit) -> None:
    opened = visit(report)
    keyboard, seen = opened.page.keyboard, []
    for _ in range(120):
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
    status = opened.page.locator(".timeline .live")
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
    opened.page.locator("summary", has_text="Numbers").first.click()
    button = opened.page.locator("details .copy").first
    opened.page.evaluate("window.setTimeout = () => 0")  # which takes the word away again
    button.click()
    button.get_by_text("Copied").or_(button.filter(has_text="Copied")).wait_for()
    copied = opened.page.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied[0] == "curve\tseconds of training\timages/s"
    assert copied[1] == "measured\t0.2\t320" and copied[-1] == "predicted\t4\t336"


def test_hostile_names_are_shown_as_text(tmp_path: Path, visit: Visit) -> None:
    path = tmp_path / "evil.html"
    path.write_text(as_html(whole(EVIL)))
    opened = visit(path)
    opened.page.locator("canvas").scroll_into_view_if_needed()
    opened.page.mouse.move(*bar_at(opened, 0, 0.75))
    assert opened.messages == [] and opened.requests == [path.as_uri()]
    assert opened.page.locator("h1").inner_text() == EVIL
    assert opened.page.locator(".timeline .tip").inner_text().startswith(EVIL)


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


@contextmanager
def serving(make: Callable[[str], str | None]) -> Iterator[str]:
    """The address of a server of pages."""
    with PageServer(0, make) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def test_a_served_page_updates_with_the_run(tmp_path: Path, visit: Visit) -> None:
    folder = make_run(tmp_path / "run", steps(5), is_finished=False)
    with serving(lambda path: live_page(folder)) as url:
        with run_lock(folder):
            opened = visit(url)
            first = opened.page.locator(".summary p").first
            assert "5 of 20 steps" in first.inner_text()
            opened.page.locator("summary").first.click()
            log = figure(opened, "Loss").get_by_role("button", name="Log axis")
            log.click()  # and keeps the focus
            append(folder, *steps(9)[5:])
            opened.page.locator(".summary p", has_text="9 of 20 steps").wait_for()
            assert opened.page.locator("details[open]").count() == 1, "what was open stays open"
            assert log.get_attribute("aria-pressed") == "true", "and the axis as it was chosen"
            assert log.evaluate("(button) => button === document.activeElement")
            assert path_of(figure(opened, "Loss"), 0).count("L") == 8, "of the new steps"
        opened.page.get_by_role("heading", name="Now").wait_for(state="detached")
        assert set(opened.requests) == {url} and opened.messages == []


def test_the_list_of_runs_follows_them_and_leads_to_each(tmp_path: Path, visit: Visit) -> None:
    folder = make_run(tmp_path / "runs" / "20260101-120000-vgg-small-stale-2-1", steps(5), is_finished=False)
    with serving(lambda path: runs_page(tmp_path / "runs", path)) as url:
        for scheme in ("light", "dark"):
            opened = visit(url, width=390, scheme=scheme)
            assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
        opened.page.get_by_role("cell", name="stopped").wait_for()
        with run_lock(folder):
            opened.page.get_by_role("cell", name="running").wait_for()
        opened.page.get_by_role("link", name=folder.name).click()
        opened.page.get_by_role("heading", name="vgg-small, stale 2-1").wait_for()
        assert {asked.removeprefix(url) for asked in opened.requests} == {"", f"{folder.name}/"}
        opened.page.get_by_role("link", name="All runs").click()
        opened.page.get_by_role("link", name=folder.name).wait_for()
        assert opened.messages == []


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
    for element in opened.page.locator("button, a, summary, canvas, .plot svg[tabindex]").all():
        assert names(element).strip()
    for figure in opened.page.locator("figure").all():
        caption = figure.get_attribute("aria-describedby")
        about = opened.page.locator(f"#{caption}")
        assert about.inner_text().strip() and about.bounding_box()["width"] <= 1, "for screen readers only"


def figure(opened: Opened, title: str) -> Any:
    """The section with a title."""
    return opened.page.locator("section", has=opened.page.get_by_role("heading", name=title, exact=True))


def path_of(section: Any, number: int) -> str:
    """The line of a curve, as SVG draws it."""
    return str(section.locator(f"g[data-number='{number}'] .line").last.get_attribute("d"))


def test_curves_are_read_out_smoothed_and_hidden(tmp_path: Path, visit: Visit) -> None:
    """By pointer first, then the same by keyboard alone."""
    records = [*steps(60), *(Evaluated(batch, 64, 1.5, {"top1": batch / 100}) for batch in (20, 40)), Saved(30, 9, 0.3)]
    folder = make_run(tmp_path / "run", records, summary={"predicted_images_per_second": 336.0})
    opened = visit(write_page(make_page([folder]), folder / "report.html")[0])
    keyboard, loss = opened.page.keyboard, figure(opened, "Loss")
    svg, tip = loss.locator("svg[tabindex]"), loss.locator(".tip")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()

    def point_at(share: float) -> str:
        opened.page.mouse.move(box["x"] + 33 + share * (box["width"] - 47), box["y"] + 60)
        return str(tip.inner_text())

    assert "step 60" in point_at(0.999) and "training: 0.03" in point_at(0.999)
    at_evaluation = point_at(39 / 59)
    assert "step 40" in at_evaluation and "evaluation on training data: 1.5" in at_evaluation
    assert loss.locator(".crosshair").count() == 2 and loss.locator(".dot").count() == 2 + 1, "one more in the legend"
    opened.page.mouse.move(5, 5)
    assert not tip.is_visible()

    plain, ticks = path_of(loss, 0), loss.locator(".tick").all_text_contents()
    slider, log = loss.get_by_label("Smoothing"), loss.get_by_role("button", name="Log axis")
    slider.focus()
    for _ in range(10):
        keyboard.press("ArrowRight")
    assert float(slider.input_value()) == pytest.approx(0.5) and path_of(loss, 0) != plain
    assert loss.locator(".raw").get_attribute("d") == plain, "what was measured stays in sight"
    keyboard.press("Home")
    keyboard.press("Tab")
    assert log.evaluate("(button) => button === document.activeElement")
    keyboard.press("Space")
    assert log.get_attribute("aria-pressed") == "true" and path_of(loss, 0) != plain
    ys = [float(part.split(" ")[1]) for part in re.split("[ML]", path_of(loss, 0))[1:]]
    middle = sum(ys[29:31]) / 2
    assert middle == pytest.approx((ys[0] + ys[-1]) / 2, abs=2), "halving every ten steps is a straight line"
    assert {"1", "0.1"} <= set(loss.locator(".tick").all_text_contents())
    keyboard.press("Space")
    assert path_of(loss, 0) == plain and loss.locator(".tick").all_text_contents() == ticks

    toggle = loss.get_by_role("button", name="training", exact=True)
    toggle.focus()
    keyboard.press("Enter")
    assert toggle.get_attribute("aria-pressed") == "false" and loss.locator("g[data-number='0']").count() == 0
    keyboard.press("Enter")
    svg.focus()
    for key, words in (("End", "step 60"), ("ArrowLeft", "step 59"), ("Home", "step 1"), ("ArrowRight", "step 2")):
        keyboard.press(key)
        assert words in tip.inner_text() and words in loss.locator(".live").inner_text()
    keyboard.press("Escape")
    assert not tip.is_visible()
    keyboard.press("Tab")
    assert not svg.evaluate("(svg) => svg === document.activeElement"), "the chart lets the keyboard go"

    speed = figure(opened, "Throughput")
    assert speed.locator(".mark.k-checkpoint").count() == 1 and "checkpoint" in speed.locator(".legend").inner_text()
    assert speed.locator(".reference").count() == 1
    assert opened.messages == []


def test_a_comparison_shows_the_pauses_of_each_run_in_its_lane(tmp_path: Path, visit: Visit) -> None:
    folders = [make_run(tmp_path / name, [*steps(20), Saved(12, 10, 0.25)]) for name in "ab"]
    opened = visit(write_page(make_page(folders), tmp_path / "both.html")[0])
    speed = figure(opened, "Throughput")
    lanes = [speed.locator(f"svg[tabindex] .lane.c{colour}") for colour in (0, 1)]
    pauses = speed.locator("svg[tabindex] rect.k-checkpoint")
    assert [lane.count() for lane in lanes] == [1, 1] and pauses.count() == 2
    tops = [pauses.nth(at).bounding_box()["y"] for at in (0, 1)]
    assert tops[0] != tops[1], "they do not cover each other"
    speed.locator("button.toggle").first.click()
    assert lanes[0].count() == 0 and pauses.count() == 1
    assert opened.messages == []


def test_a_pause_is_marked_and_explained_on_the_timeline(report: Path, visit: Visit, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [*steps(60), Evaluated(30, 64, 1.0)], trace=delayed(timeline(60), 120, 1))
    opened = visit(write_page(make_page([folder]), folder / "report.html")[0])
    shown = opened.timeline
    assert 7.0 < shown["from"] < shown["to"] < 13.05 or shown["to"] < 6.0, "the first view is between pauses"
    opened.page.locator("canvas").focus()
    opened.page.keyboard.press("m")
    opened.wait_drawn()
    assert "evaluation: training paused" in opened.page.locator(".timeline .tip").inner_text()
    assert opened.timeline["from"] < 6.0 < 7.0 < opened.timeline["to"]
    (violet,) = colours(opened, "evaluation")
    assert opened.page.evaluate(COUNT, violet) > 100
    opened.page.get_by_role("button", name="Show the first view").click()
    opened.wait_drawn()
    assert opened.timeline["from"] == pytest.approx(shown["from"])
    codes = opened.page.locator(".codes").inner_text()
    assert all(words in " ".join(codes.split()) for words in ("F forward", "B backward", "RG receive gradients"))


CONTRAST = """() => {
    const levels = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((value) => value / 255)
        .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const light = (colour) => { const [r, g, b] = levels(colour); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (!colour.endsWith(", 0)")) return colour;
        }
        return getComputedStyle(document.body).backgroundColor;
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
        const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!text || !element.checkVisibility() || element.closest("script, style, noscript, .hidden, .skip")) continue;
        const style = getComputedStyle(element), colour = element.closest("svg") ? style.fill : style.color;
        const [low, high] = [light(colour), light(behind(element))].sort((one, other) => one - other);
        found.push([(high + 0.05) / (low + 0.05), element.outerHTML.slice(0, 80)]);
    }
    return found.sort((one, other) => one[0] - other[0]).slice(0, 3);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_has_contrast_a_sticky_nav_and_prints_in_light(report: Path, visit: Visit, scheme: str) -> None:
    opened = visit(report, 1400, scheme)
    opened.page.get_by_role("button", name="Log axis").first.click()
    for least, *where in opened.page.evaluate(CONTRAST):
        assert least >= 4.5, where
    opened.page.get_by_role("link", name="Stages", exact=True).click()
    nav, heading = opened.page.locator("nav"), opened.page.get_by_role("heading", name="Stages")
    assert nav.bounding_box()["y"] == pytest.approx(0, abs=1), "it stays"
    assert heading.bounding_box()["y"] >= nav.bounding_box()["height"], "and does not cover where it leads"
    opened.page.emulate_media(media="print")
    opened.wait_drawn()
    assert not nav.is_visible() and not opened.page.get_by_role("button", name="Log axis").first.is_visible()
    (back,) = colours(opened, "surface")
    assert back == "#ffffff"
    pixel = opened.page.evaluate("[...document.querySelector('canvas').getContext('2d').getImageData(1, 1, 1, 1).data]")
    assert pixel[:3] == [255, 255, 255], "the timeline is drawn again for paper"
    assert opened.page.locator(".plot .tick").first.is_visible() and opened.page.locator(".tile").first.is_visible()
    assert opened.messages == []
