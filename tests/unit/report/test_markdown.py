"""Pages as Markdown: valid tables, and text that is never markup."""

from __future__ import annotations

from stagewright.report.markdown import as_markdown
from stagewright.report.page import (
    Bar,
    Bars,
    Curve,
    Curves,
    Listing,
    Page,
    Pipeline,
    Point,
    Stack,
    Stacks,
    Summary,
    Table,
)
from tests.made_runs import timeline


def lines_of(*blocks: object) -> list[str]:
    return as_markdown(Page("A page", tuple(blocks))).splitlines()  # type: ignore[arg-type]


def test_a_page_becomes_headings_and_tables() -> None:
    bars = Bars("Speed", "images/s", (Bar("stale", 341.0, 330.0, 352.0), Bar("dp", 302.0, is_predicted=True, note="x")))
    assert lines_of(Summary(("Fast.", "Small.")), bars) == [
        "# A page",
        "",
        "- Fast.",
        "- Small.",
        "",
        "## Speed",
        "",
        "|  | images/s | 95 % interval | how | note |",
        "|---|--:|--:|---|---|",
        "| stale | 341 | 330 to 352 | measured |  |",
        "| dp | 302 |  | predicted | x |",
    ]


def test_text_is_escaped() -> None:
    table = Table("T", ("a|b", "c"), (("<b>x</b>", "one\ntwo"), ("*y* _z_ a_b", "`k` [l](m) \\")))
    rows = lines_of(table)[4:]
    assert rows[0] == "| a\\|b | c |"
    assert rows[2] == "| \\<b\\>x\\</b\\> | one two |"
    assert rows[3] == "| \\*y\\* \\_z\\_ a_b | \\`k\\` \\[l\\](m) \\\\ |"


def test_a_listing_may_contain_fences() -> None:
    assert lines_of(Listing("L", "```\nx\n````"))[4:] == ["`````text", "```", "x", "````", "`````"]


def test_stacks_show_a_total_and_a_limit() -> None:
    stacks = Stacks(
        "Memory", "MiB", (Stack("rank 0", (("weights", 10), ("buffers", 5.5)), 100), Stack("rank 1", (("buffers", 2),)))
    )
    assert lines_of(stacks)[-2:] == ["| rank 0 | 10 | 5.5 | 15.5 | 100 |", "| rank 1 |  | 2 | 2 |  |"]


def test_a_long_curve_keeps_its_ends_and_its_peak() -> None:
    points = [Point(x, 1.0) for x in range(1000)]
    points[637] = Point(637, 9.0)
    rows = lines_of(Curves("C", "step", "loss", (Curve("c", tuple(points)),)))[6:]
    assert len(rows) <= 12 and rows[0] == "| c | 0 | 1 |" and rows[-1] == "| c | 999 | 1 |"
    assert "| c | 637 | 9 |" in rows


def test_a_pipeline_becomes_a_table_of_ranks() -> None:
    rows = lines_of(Pipeline("P", timeline(), ("r0", "r1", "r2"), shares=(0.4, 0.4, 1.0)))
    assert rows[6].startswith("| r0 | 40% | 90 ms | 150 ms | 30 ms | 360 ms |")
    assert rows[8].startswith("| r2 | 100% | 240 ms | 360 ms | 0 s | 0 s | 24 |")
    assert rows[-1] == "Measured over 650 ms; the HTML page beside this file draws it."
