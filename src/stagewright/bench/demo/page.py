"""What the demo found, for people: three sentences, the table of the terminal, and the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import hypot

from rich.console import Console

from stagewright.bench.demo.digits import uncertainty
from stagewright.bench.demo.run import BATCH, BATCHES, HELD_OUT, LINKS, LR, MODEL, OPTIMIZER, Demo, Measured
from stagewright.bench.pages import format_span
from stagewright.cluster.catalog import shipped
from stagewright.hardware.environment import read_environment
from stagewright.metrics import Timeline
from stagewright.report.columns import Column, page_table
from stagewright.report.figures import waiting
from stagewright.report.live.terminal import print_table
from stagewright.report.page import (
    Bar,
    Bars,
    Block,
    Curve,
    Curves,
    Listing,
    Look,
    Page,
    Pipeline,
    Point,
    Summary,
    Table,
    Tile,
    Tiles,
)
from stagewright.report.words import format_share

_MB = 1e6
_SHOWN = 2.0  # seconds of a timeline: a few steps of each side
_BUSY = 0.2  # cores of other programs from which the page says so


def name_of(side: Measured) -> str:
    plan = side.prediction.plan
    sizes = "+".join(str(stage.replicas) for stage in plan.stages)
    return "stock DDP" if len(plan.stages) == 1 else f"{sizes} stages, {plan.mode}"


def sentences(demo: Demo) -> tuple[str, str, str]:
    """What happened, why, and what it cost."""
    return _speed(demo), _reason(demo), _learnt(demo)


def _speed(demo: Demo) -> str:
    ours, theirs, ratio = demo.ours, demo.theirs, demo.ratio
    figures = f"{ours.rate.value:,.0f} against {theirs.rate.value:,.0f} images/s"
    turns = (
        f"interval {format_span(ratio, 2)} over {demo.length.turns} turns of each, predicted {demo.predicted_ratio:.2f}"
    )
    if demo.wins:
        return f"Two stages train {ratio.value:.2f} times as fast as stock DDP: {figures} ({turns})."
    kind = "significant speedup" if ratio.value > 1 else "speedup"
    return f"No {kind} here: two stages have {ratio.value:.2f} times the speed of stock DDP, {figures} ({turns})."


def _reason(demo: Demo) -> str:
    (cut,) = demo.ours.prediction.plan.cuts
    over = "over the link" if demo.machines.link else "between the processes"
    ours, theirs = (format_share(_computing(side)) for side in (demo.ours, demo.theirs))
    return (
        f"In every step DDP sums the gradient of every weight, {_traffic(demo.theirs):,.1f} MB {over}, so its ranks "
        f"compute {theirs} of the time; the stages, cut before {cut}, send only activations and "
        f"their gradients, {_traffic(demo.ours):,.1f} MB, and compute {ours}."
    )


def _learnt(demo: Demo) -> str:
    ours, theirs = demo.ours.accuracies[-1], demo.theirs.accuracies[-1]
    noise = hypot(uncertainty(ours, HELD_OUT), uncertainty(theirs, HELD_OUT))
    differ = "a difference within chance" if abs(ours - theirs) <= noise else f"more than chance ({noise:.1%}) apart"
    same = "equal" if ours == theirs else differ
    versions = max(stage.versions for stage in demo.ours.prediction.plan.stages)
    lag = ", the first stage with weights one update old" if versions > 1 else " without lag"
    return (
        f"Both saw the same {demo.images:,} images{lag}, and name {ours:.1%} (stages) and {theirs:.1%} (DDP) of "
        f"{HELD_OUT:,} held-out digits: {same}."
    )


def _traffic(side: Measured) -> float:
    """MB of a step in both directions, measured where that is possible."""
    return (side.prediction.traffic if side.link_bytes is None else side.link_bytes) / _MB


def _computing(side: Measured) -> float:
    """The share of the last turn that its ranks compute."""
    return 1 - waiting(side.timeline.busy_shares(side.prediction.plan.world, 0.0, side.timeline.end or 1.0))


_COLUMNS: tuple[Column[Measured], ...] = (
    Column("side", name_of, is_text=True),
    Column("images/s", lambda side: side.rate.value, "{:,.0f}"),
    Column("95 %", lambda side: format_span(side.rate)),
    Column("predicted", lambda side: side.prediction.images_per_second, "{:,.0f}"),
    Column("accuracy", lambda side: side.accuracies[-1], "{:.1%}"),
    Column("MB/step", lambda side: f"{_traffic(side):,.1f}{' (computed)' * (side.link_bytes is None)}"),
)


def show_table(console: Console, demo: Demo) -> None:
    print_table(console, _COLUMNS, (demo.theirs, demo.ours))


def warnings(demo: Demo) -> Iterator[str]:
    """What a reader should know about these figures."""
    if demo.why_local:
        yield f"This is loopback ({demo.why_local}): a real network is slower, and stages gain more there."
    if max(demo.ours.others, demo.theirs.others) > _BUSY:
        yield (
            f"Other programs kept {demo.ours.others:.1f} cores busy beside the stages and {demo.theirs.others:.1f} "
            "beside DDP: run it again on a quiet machine."
        )


def demo_page(demo: Demo) -> Page:
    over = "over 1 Gb/s" if demo.machines.link else "over loopback"
    return Page(f"Two stages beside stock DistributedDataParallel, {over}", tuple(_blocks(demo)))


def _tiles(demo: Demo) -> Tiles:
    """The figures of the stages, each beside that of DDP."""
    ours, theirs, ratio = demo.ours, demo.theirs, demo.ratio
    predicted = f"predicted {ours.prediction.images_per_second:,.0f}"
    idle = [format_share(1 - _computing(side)) for side in (ours, theirs)]
    against = f"{format_span(ratio, 2)}, predicted {demo.predicted_ratio:.2f}"
    held_out = f"on {HELD_OUT:,} held-out images; DDP {theirs.accuracies[-1]:.1%}"
    return Tiles(
        (
            Tile("Against DDP", f"{ratio.value:.2f}", "times", against),
            Tile("Throughput", f"{ours.rate.value:,.0f}", "images/s", f"{predicted}; DDP {theirs.rate.value:,.0f}"),
            Tile("Accuracy", f"{ours.accuracies[-1]:.1%}", "", held_out),
            Tile("Sent per step", f"{_traffic(ours):,.1f}", "MB", f"by both ranks; DDP {_traffic(theirs):,.1f}"),
            Tile("Waiting", idle[0], "", f"of the ranks' time; DDP {idle[1]}"),
        )
    )


def _blocks(demo: Demo) -> Iterator[Block]:
    sides = (demo.ours, demo.theirs)  # a side's place is its colour in every figure
    yield _tiles(demo)
    yield Summary((*sentences(demo), *warnings(demo)))
    bars = []
    for colour, side in enumerate(sides):
        rate, predicted = side.rate, side.prediction.images_per_second
        bars.append(Bar(name_of(side), rate.value, rate.low, rate.high, colour=colour))
        bars.append(Bar(name_of(side), predicted, is_predicted=True, colour=colour))
    yield Bars("Throughput", "images/s", tuple(bars))
    note = (
        f"Median of {demo.length.turns} turns with its 95 % interval; accuracy on {HELD_OUT:,} held-out images; MB "
        "over the link in both directions together."
    )
    yield page_table("Result", _COLUMNS, reversed(sides), note=note, colours=(1, 0))
    seconds = min(_SHOWN, *(side.timeline.end for side in sides))
    note = f"The first {seconds:.1f} s of the last turn, both sides on one scale."
    for colour, side in enumerate(sides):  # a span that reaches beyond the end is cut
        shown = Timeline(tuple(replace(s, end=min(s.end, seconds)) for s in side.timeline.spans if s.start < seconds))
        ranks = tuple(f"rank {rank}" for rank in range(side.prediction.plan.world))
        yield Pipeline(f"Timeline: {name_of(side)}", shown, ranks, note=note, colour=colour, is_shown_whole=True)
    curves = []
    for side in sides:
        points = zip(side.seconds, side.accuracies, strict=True)
        curves.append(Curve(name_of(side), tuple(Point(x, 100 * y) for x, y in points), Look.POINTS))
    yield Curves("Accuracy over time", "seconds of training", f"% of {HELD_OUT:,} held-out images", tuple(curves))
    if demo.sweep:
        yield _sweep(demo)
    yield _setup(demo)
    plan = demo.ours.prediction.plan
    command = (
        f"stagewright train --model {MODEL} --placement 0:0.1:0 --mode {plan.mode} --cut {','.join(plan.cuts)} "
        f"--batch {BATCH} --microbatches {plan.microbatches} --nodes 10.0.0.1,10.0.0.2"
    )
    yield Listing("On two machines", command)


def _sweep(demo: Demo) -> Table:
    titles = shipped().links
    rows = tuple(
        (titles[link].name, str(batch), f"{ratio:.2f}", "stages" if ratio > 1 else "data parallel")
        for link in LINKS
        for batch in BATCHES
        if (ratio := demo.sweep.get((link, batch))) is not None
    )
    note = "Predicted from the profile of this run: faster links and larger batches leave less to gain."
    return Table("Other links and batches", ("link", "batch", "stages / data parallel", "faster"), rows, note)


def _setup(demo: Demo) -> Table:
    plan = demo.ours.prediction.plan
    rows = (
        ("machines", demo.machines.title),
        ("model", f"{MODEL}, fp32, batch {BATCH}, {OPTIMIZER}, learning rate {LR:g} that falls as a cosine"),
        ("data", "digits drawn by the command; the same images in the same order for both"),
        ("stages", f"cut before {', '.join(plan.cuts)}, {plan.microbatches} microbatches, chosen by the planner"),
        ("DDP", "torch's DistributedDataParallel on gloo, half of the batch on each rank, its sums beside backward"),
        ("turns", f"{demo.length.turns} of {demo.length.steps} steps each, in processes that stay alive"),
        *read_environment().rows(),
    )
    return Table("How it was measured", ("what", "value"), rows)
