"""Pages as HTML: one file, nothing loaded, all text escaped, every figure with words and numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

from stagewright.metrics import Span, Timeline
from stagewright.report.html import as_html
from stagewright.report.page import (
    Bar,
    Bars,
    Curve,
    Curves,
    Listing,
    Note,
    Page,
    Pipeline,
    Point,
    Stack,
    Stacks,
    Summary,
    Table,
    Tile,
    Tiles,
)
from tests.made_runs import timeline

EVIL = "</script></pre><img src=x onerror=alert(1)>\"'&"


def whole(name: str = "x") -> Page:
    """A page with every kind of block and the same text everywhere."""
    return Page(
        name,
        (
            Tiles((Tile(name, name, name, name),)),
            Summary((name,)),
            Table(name, (name, "n"), ((name, "1"), ("b", "22.5 %")), name),
            Bars(name, name, (Bar(name, 3.0, 2.0, 4.0, note=name), Bar("p", 5.0, is_predicted=True))),
            Stacks(name, name, (Stack(name, ((name, 2.0), ("q", 1.0)), 4.0),)),
            Curves(name, name, name, (Curve(name, (Point(0, 1), Point(1, 2, 1.5, 2.5), Point(2, 3, 2.5, 3.5))),)),
            Pipeline(name, Timeline((*timeline().spans, Span(0, "compute", "F", name, 0.7, 0.8))), (name, "r1", "r2")),
            Listing(name, name),
            Note(name, name),
        ),
    )


class Reader(HTMLParser):
    """Collects tags with their attributes, and texts with their elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))


def test_all_text_is_escaped() -> None:
    plain, evil = Reader(as_html(whole("x"))), Reader(as_html(whole(EVIL)))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in plain.tags]
    assert [list(attributes) for _, attributes in evil.tags] == [list(attributes) for _, attributes in plain.tags]
    assert "img" not in [tag for tag, _ in evil.tags]


def test_the_policy_allows_only_the_style_and_script_of_the_page() -> None:
    page = as_html(whole())
    policy = next(a["content"] for tag, a in Reader(page).tags if tag == "meta" and a.get("http-equiv"))
    style, script = re.search(r"<style>(.*?)</style>", page, re.S), re.search(r"<script>(.*?)</script>", page, re.S)
    assert policy is not None and style is not None and script is not None
    for part in (style[1], script[1]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "connect-src" not in policy
    assert "connect-src 'self'" in unescape(as_html(whole(), poll=2.0))
    assert "fetch(" not in script[1] and "XMLHttpRequest" not in script[1]


def test_the_page_links_to_nothing_outside() -> None:
    for tag, attributes in Reader(as_html(whole())).tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, name, value)
        assert "style" not in attributes and not [name for name in attributes if name.startswith("on")]
    assert "url(http" not in as_html(whole()) and "@import" not in as_html(whole())


def test_every_figure_has_a_name_a_description_and_numbers() -> None:
    reader = Reader(as_html(whole()))
    identities = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    figures = [attributes for tag, attributes in reader.tags if tag == "figure"]
    assert len(figures) == 4 and [tag for tag, _ in reader.tags].count("details") == 4 + 1, (
        "and how to use the timeline"
    )
    for attributes in figures:
        assert {attributes["aria-labelledby"], attributes["aria-describedby"]} <= identities
    canvas = next(attributes for tag, attributes in reader.tags if tag == "canvas")
    assert canvas["tabindex"] == "0" and "3 ranks over" in str(canvas["aria-label"])
    for tag, attributes in reader.tags:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes.get("aria-label"), "the caption describes it"
        if tag == "button" and "aria-pressed" not in attributes:
            assert attributes.get("aria-label") or attributes.get("data-copies") in identities


def test_two_small_figures_share_the_width() -> None:
    small = Curves("c", "x", "y", (Curve("k", (Point(0, 1),)),), is_small=True)
    assert as_html(Page("p", (small, small, small))).count('class="half"') == 2


def test_bars_are_as_long_as_their_values() -> None:
    bars = Bars("B", "u", (Bar("a", 50.0, 40.0, 100.0), Bar("b", 0.0), Bar("c", float("nan"))))
    page = as_html(Page("p", (bars,)))
    assert '<rect class="measured p0" width="50.00%" height="20"/>' in page
    assert 'x1="40.00%" x2="100.00%"' in page and '<rect class="measured p0" width="0.00%"' in page
    assert '<rect class="measured p0" width="0%"' in page, "NaN has no length"


def test_a_script_gets_all_points_and_the_means_of_those_that_were_left_out() -> None:
    curve = Curve("c", (Point(0, 0.0), Point(5, 10.0), Point(10, 5.25), Point(11, float("nan"))))
    data = plot_data(as_html(Page("p", (Curves("C", "x", "y", (curve,)),))))
    assert (data["curves"][0]["x"], data["curves"][0]["y"]) == ([0, 5, 10, 11], [0, 10, 5.25, None])
    assert "mean" not in data["curves"][0]
    noisy = Curve("n", tuple(Point(x, 9.0 if x % 10 == 5 else 1.0) for x in range(4000)))
    long = plot_data(as_html(Page("p", (Curves("C", "x", "y", (noisy,)),))))["curves"][0]
    assert set(long["y"]) == {1, 9} and len(long["y"]) <= 400, "peaks stay"
    assert 1.5 < sum(long["mean"][1:-1]) / len(long["mean"][1:-1]) < 2.1, "smoothing is not drawn to the peaks"


def plot_data(page: str) -> dict[str, Any]:
    """What the script of the first plot of a page reads."""
    found = re.search(r'class="curves".*?<script type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def test_controls_are_those_that_a_plot_can_use() -> None:
    def controls(y: str, *values: float) -> tuple[bool, bool]:
        points = tuple(Point(x, value) for x, value in enumerate(values))
        page = as_html(Page("p", (Curves("C", "x", y, (Curve("c", points),)),)))
        return 'type="range"' in page, 'class="log"' in page

    assert controls("loss", *(2.0,) * 20) == (True, True)
    assert controls("loss", 2.0, 1.0) == (False, True), "two points can't be smoothed"
    assert controls("loss", *(0.0,) * 20) == (True, False) and controls("%", *(50.0,) * 20) == (True, False)


def test_captions_give_ends_and_extremes() -> None:
    values = (146.2, 290.0, float("nan"), 115.0, 245.9)
    curve = Curve("images/s", tuple(Point(x, y) for x, y in enumerate(values)))
    page = as_html(Page("p", (Curves("C", "x", "y", (curve, Curve("none", (Point(0, float("nan")),)))),)))
    assert ">images/s: first 146, last 246, lowest 115, highest 290; none: first nan, last nan.<" in page
    rising = Curve("rising", tuple(Point(x, y) for x, y in enumerate((0.1, 0.7, 0.92, 0.9))))
    page = as_html(Page("p", (Curves("C", "x", "y", (rising,)),)))
    assert ">rising: first 0.1, last 0.9, highest 0.92.<" in page


def test_the_help_of_a_timeline_covers_mouse_touch_and_keyboard() -> None:
    page = as_html(whole())
    note = re.search(r'<p class="note">(Drag.*?)</p>', page)
    assert note is not None and all(word in note[1] for word in ("pinch", "touch", "wheel", "keyboard"))


def test_a_large_page_stays_below_a_megabyte() -> None:
    spans = timeline(10_000).spans
    curves = tuple(Curve(f"run {n}", tuple(Point(x, x % 7 / 3) for x in range(20_000))) for n in range(12))
    blocks = (
        *(Curves(f"C{n}", "x", "y", curves) for n in range(4)),
        *(Pipeline(f"P{n}", Timeline(spans), ("a", "b", "c")) for n in range(3)),
    )
    page = as_html(Page("large", blocks))
    assert len(page.encode()) < 1_000_000
    assert "the last 10,0" in page and "of 240,000;" in page


def test_an_empty_page_is_valid() -> None:
    blocks = (
        Summary(()),
        Table("t", ("a",), ()),
        Bars("b", "u", ()),
        Stacks("s", "u", ()),
        Curves("c", "x", "y", ()),
        Pipeline("p", Timeline(()), ()),
    )
    assert "</html>" in as_html(Page("", blocks))


def test_the_timeline_is_data_and_not_code() -> None:
    page = as_html(whole(EVIL))
    data = re.search(r'class="timeline".*?<script type="application/json">(.*?)</script>', page, re.S)
    assert data is not None and "<" not in data[1]
    assert json.loads(data[1])["ranks"][0] == EVIL and EVIL in json.loads(data[1])["names"]
