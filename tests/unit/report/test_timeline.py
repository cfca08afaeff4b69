"""The encoding that a page's script reads, decoded here independently."""

from __future__ import annotations

import base64
import random
from dataclasses import replace

import pytest

from stagewright.metrics import Span, Timeline
from stagewright.report.page import Mark, Pipeline
from stagewright.report.timeline import ACTION_WORDS, action_words, encode, first_view, kind_of, start_of_last
from stagewright.schedule.action import Op
from tests.made_runs import timeline


def decoded(encoded: dict[str, object]) -> list[tuple[int, str, str, str, float, float]]:
    """Rank, lane, kind, name, start and end of every bar."""
    raw = base64.b64decode(str(encoded["bars"]))
    numbers, value, shift = [], 0, 0
    for byte in raw:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(value)
            value = shift = 0
    bars = iter(numbers)
    found = []
    for rank, lane, count in encoded["lanes"]:  # type: ignore[attr-defined]
        start, parts = 0, [0, 0, 0, 0]
        for _ in range(count):
            start += next(bars)
            length, operation = next(bars), next(bars)
            deltas = [next(bars) for _ in range(4)]
            parts = [
                part + (delta // 2 if delta % 2 == 0 else -(delta + 1) // 2)
                for part, delta in zip(parts, deltas, strict=True)
            ]
            mark, kind, _ = encoded["operations"][operation]  # type: ignore[index]
            stage, microbatch, version, peer = parts
            if mark == "?":
                name = encoded["names"][stage]  # type: ignore[index]
            else:
                name = f"{stage}{mark}" + (f"{microbatch}" if microbatch >= 0 else "")
                name += (f"@{version}" if version >= 0 else "") + (
                    f"{'>' if mark[0] == 'S' else '<'}{peer}" if peer >= 0 else ""
                )
            tick = float(encoded["tick"])  # type: ignore[arg-type]
            found.append(
                (rank, ("compute", "transfer", "wait")[lane], kind, name, start * tick, (start + length) * tick)
            )
    assert next(bars, None) is None
    return sorted(found)


def expected(spans: tuple[Span, ...]) -> list[tuple[int, str, str, str, float, float]]:
    return sorted((span.rank, span.lane, kind_of(span), span.name, span.start, span.end) for span in spans)


def check_decoding(spans: tuple[Span, ...]) -> None:
    found, wanted = decoded(encode(Timeline(spans))), expected(spans)
    assert [bar[:4] for bar in found] == [bar[:4] for bar in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one[4:] == pytest.approx(other[4:], abs=1e-8 * Timeline(spans).end)


def test_decodes_to_the_same_timeline() -> None:
    check_decoding(timeline(5).spans)


def test_decodes_any_names_and_overlaps() -> None:
    random.seed(3)
    names = (
        "0F3@2",
        "12B900719925@0",
        "0U@4",
        "1SA3>7",
        "1RA3<0",
        "0F7",
        "1A@1",
        "0R@9",
        "what is this",
        "<b>",
        "3XY4",
        "",
        "0F3@",
    )
    spans = []
    for number in range(3000):
        start = random.random() * 100
        name = names[number % len(names)]
        kind = name.lstrip("0123456789")[:2].rstrip("0123456789@") or "?"
        spans.append(
            Span(number % 5, ("compute", "transfer", "wait")[number % 3], kind, name, start, start + random.random())
        )
    check_decoding(tuple(spans))


def test_encodes_an_empty_timeline() -> None:
    assert decoded(encode(Timeline(()))) == []


def test_a_bar_takes_few_bytes() -> None:
    spans = timeline(500).spans
    assert len(str(encode(Timeline(spans))["bars"])) < 16 * len(spans)


def test_the_last_bars_of_all_ranks_begin_together_and_keep_their_marks() -> None:
    whole = Pipeline(
        "p", timeline(100), ("a", "b", "c"), marks=(Mark("evaluation", 1, 2), Mark("checkpoint", 19.5, 19.6))
    )
    moment = start_of_last(whole.timeline, 1000)
    cut = whole.since(moment)
    spans = cut.timeline.spans
    assert 990 <= len(spans) <= 1001 and min(span.start for span in spans) == 0
    assert {span.rank for span in spans} == {0, 1, 2}
    assert cut.marks == (Mark("checkpoint", 19.5 - moment, 19.6 - moment),)
    assert whole.since(start_of_last(whole.timeline, 10**6)) is whole


def test_the_first_view_is_steady_training() -> None:
    """Start-up of 4 s, then training with an evaluation and a checkpoint in it."""
    slow = (Span(2, "compute", "F", "1F900@0", 0.0, 4.0),)
    spans = (*slow, *(replace(span, start=span.start + 4, end=span.end + 4) for span in timeline(100).spans))
    marks = (Mark("evaluation", 9.0, 12.0), Mark("checkpoint", 13.0, 13.1))
    start, end = first_view(Pipeline("p", Timeline(spans), ("a", "b", "c"), marks=marks))
    assert 13.1 < start < end < 24 and (start + end) / 2 == pytest.approx((13.1 + 24) / 2, abs=0.2)
    assert end - start == pytest.approx(1.0, abs=0.1), "forty bars of the busiest rank"
    assert first_view(Pipeline("few", timeline(10), ("a", "b", "c"))) == (0, timeline(10).end)


def test_every_action_has_words() -> None:
    assert set(ACTION_WORDS) == {op.value for op in Op}
    assert action_words("0F3@2") == "forward of microbatch 3 at stage 0 on version 2"
    assert action_words("0F3") == "forward of microbatch 3 at stage 0 in an evaluation"
    assert action_words("1RA3<0") == "receive activations of microbatch 3 at stage 1 from rank 0"
    assert action_words("0U@4") == "update at stage 0 of version 4" and action_words("starting") == "starting"
