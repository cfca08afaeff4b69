"""The page of a run and the comparison of several: finished, interrupted, resumed, emulated and damaged ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.events import Evaluated, Replaced, Restarted, Resumed, Saved, Step
from stagewright.metrics import Span, Timeline
from stagewright.report.html import as_html
from stagewright.report.markdown import as_markdown
from stagewright.report.numbers import table_of
from stagewright.report.page import Bars, Curves, Look, Note, Page, Pipeline, Stacks, Summary, Table
from stagewright.run.report import make_page, open_run
from tests.made_runs import make_run, steps, timeline, usage


def page(folder: Path) -> Page:
    """The page of a run, after making sure that both forms can be drawn."""
    made = make_page([folder])
    assert as_html(made) and as_markdown(made)
    return made


def summary(made: Page) -> str:
    return "\n".join(line for block in made.blocks if isinstance(block, Summary) for line in block.lines)


def block(made: Page, title: str, kind: type[Any]) -> Any:
    return next(found for found in made.blocks if isinstance(found, kind) and getattr(found, "title", "") == title)


def titles(made: Page) -> list[str]:
    return [getattr(found, "title", "") for found in made.blocks]


def test_the_page_of_a_finished_run(tmp_path: Path) -> None:
    made = page(make_run(tmp_path / "run", summary={"predicted_images_per_second": 336.0}, monitor=usage()))
    assert summary(made).splitlines() == [
        "vgg-small, stale 2-1: 20 steps of 64 images, 320 images/s, in 4 s.",
        "The prediction was 336 images/s, 5.0% above the measured speed.",
        "The busiest is rank 2 (stage 1): it computes 100% of the time. "
        "Over all ranks, 39% of the time is not spent computing.",
        "The other ranks wait for it: give its stage more devices or fewer layers.",
        "The loss went from 2 to 0.5359.",
        "Evaluated after step 20 on 512 samples of the training data: loss 0.5, top-1 75.0%, top-5 99.0%.",
        "Rank 2 (stage 1) used the most memory: 106 MiB.",
    ]
    assert titles(made)[2:] == [
        "Throughput",
        "Loss",
        "Timeline",
        "Computing",
        "Memory",
        "Cores",
        "Stages",
        "Epochs",
        "Configuration",
        "Machine",
        "Command",
    ]
    measured, predicted = block(made, "Throughput", Curves).curves
    assert (measured.look, predicted.look, predicted.points[-1].y) == (Look.LINE, Look.REFERENCE, 336.0)
    assert [curve.look for curve in block(made, "Loss", Curves).curves] == [Look.LINE, Look.POINTS]
    assert block(made, "Epochs", Table).rows[0] == ("1", "8", "1.6 s", "320", "1.589")
    assert block(made, "Stages", Table).rows == (
        ("0", "0:0-1", "", "2", "3", "105"),
        ("1", "0:2", "classifier.0", "1", "1", "106"),
    )
    assert "stagewright train --steps 20" in as_markdown(made)
    shares = block(made, "Computing", Curves).curves
    assert {round(point.y) for point in shares[2].points[:50]} == {100}


def test_tiles_sentences_and_tables_show_the_same_numbers(tmp_path: Path) -> None:
    """An evaluation in the timeline once made a rank 98 % busy in the sentence and 89 % in the table."""
    late = tuple(
        replace(span, start=span.start + 9, end=span.end + 9)
        if int(re.findall(r"[A-Z]+(\d+)", span.name)[0]) >= 8
        else span
        for span in timeline(4).spans
    )
    records = [*steps(2), Evaluated(2, 512, 0.5, {"top1": 0.75}), *steps(4)[2:]]
    folder = make_run(
        tmp_path / "run", records, trace=Timeline(late), monitor=usage(), summary={"predicted_images_per_second": 336.0}
    )
    made = page(folder)
    assert [(tile.label, tile.value, tile.unit) for tile in made.blocks[0].tiles] == [
        ("Throughput", "320", "images/s"),
        ("Top-1", "75.0%", ""),
        ("Time", "800 ms", ""),
        ("Memory", "106", "MiB"),
        ("Waiting", "40%", ""),
    ]
    text = summary(made)
    assert (
        "it computes 100% of the time. Over all ranks, 40%" in text and "320 images/s" in text and ": 106 MiB" in text
    )
    shown = block(made, "Timeline", Pipeline)
    numbers = table_of(shown)
    assert numbers.columns[1] == "computes" and [row[1] for row in numbers.rows] == ["41%", "41%", "100%"]
    assert [(mark.kind, round(mark.start, 2), round(mark.end, 2)) for mark in shown.marks] == [("evaluation", 0.4, 9.4)]
    both = make_page([folder, make_run(tmp_path / "b")])
    row = dict(zip(block(both, "Overview", Table).columns, block(both, "Overview", Table).rows[0], strict=True))
    assert (row["images/s"], row["top-1"], row["time"], row["waiting"]) == ("320", "75.0%", "800 ms", "40%")
    details = [tile.detail for tile in made.blocks[0].tiles]
    assert (
        details[0] == "predicted 336, 5.0% above" and details[1] == "on 512 samples of the training data, after step 2"
    )


def test_tiles_name_the_validation_data_or_why_there_is_no_figure(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", monitor=usage())
    config = (
        (folder / "config.toml")
        .read_text()
        .replace('source = "synthetic"', 'source = "folder:a"\nval = "folder:/x/val"')
    )
    (folder / "config.toml").write_text(config)
    assert page(folder).blocks[0].tiles[1].detail.startswith("on 512 samples of the validation data (folder:val)")
    bare = make_run(tmp_path / "bare", steps(3), is_finished=False)
    tiles = page(bare).blocks[0].tiles
    assert [tile.value for tile in tiles][1:] == ["\N{EN DASH}", "600 ms", "\N{EN DASH}", "\N{EN DASH}"]
    assert "no evaluation yet" in tiles[1].detail and "when the run ends" in tiles[4].detail
    assert "when the run ends" in block(page(bare), "Timeline", Note).text


def test_evaluations_and_checkpoints_are_marked_on_throughput(tmp_path: Path) -> None:
    delayed = [replace(step, seconds=step.seconds + (3.0 if step.batch >= 8 else 0.0)) for step in steps(20)]
    records = [*delayed, Evaluated(8, 512, 0.5), Saved(8, 10, 0.5), Saved(12, 10, 0.25)]
    shown = block(page(make_run(tmp_path / "run", records)), "Throughput", Curves)
    assert [(mark.kind, round(mark.start, 2), round(mark.end, 2)) for mark in shown.marks] == [
        ("evaluation", 1.6, 4.1),
        ("checkpoint", 4.1, 4.6),
        ("checkpoint", 5.4, 5.65),
    ]
    assert len(shown.curves[0].points) == 19 and {round(point.y) for point in shown.curves[0].points} == {320}
    both = make_page([tmp_path / "run", make_run(tmp_path / "other", [*steps(20), Saved(12, 10, 0.25)])])
    assert [mark.curve for mark in block(both, "Throughput", Curves).marks] == [0, 0, 0, 1], "whose pause it is"


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    records = [*steps(8_000), *(Evaluated(batch, 8, 1.0, {"top1": 0.5, "top5": 0.5}) for batch in range(0, 8_000, 10))]
    made = page(make_run(tmp_path / "run", records, trace=timeline(2_000), monitor=usage(3_000, gpus=4)))
    assert len(as_html(made).encode()) < 1_000_000 and len(as_markdown(made)) < 50_000
    table = block(made, "Epochs", Table)
    assert len(table.rows) == 100 and table.rows[-1][0] == "1000" and "900 epochs" in table.note


def test_a_resumed_run_names_its_own_steps_and_its_checkpoint(tmp_path: Path) -> None:
    made_before = Resumed(6, "/runs/first/checkpoints/6", "dp 2")
    records = [*steps(6), made_before, *steps(20)[6:]]
    assert summary(page(make_run(tmp_path / "own", records))).splitlines()[:2] == [
        "vgg-small, stale 2-1: steps 7-20 of 64 images, 320 images/s, in 2.8 s.",
        "Resumed from first at step 6; earlier steps ran under dp 2.",
    ]
    same = [replace(made_before, plan="stale 2-1"), *steps(9)[6:]]
    folder = make_run(tmp_path / "new", same, is_finished=False)
    assert "\nResumed from first at step 6.\n" in summary(page(folder))
    assert open_run(folder).images_per_second == pytest.approx(320)
    text = summary(make_page([tmp_path / "own", tmp_path / "new"]))
    assert "own: resumed from first at step 6; earlier steps ran under dp 2. The busiest" in text


def test_a_resumed_run_reports_the_memory_of_its_current_plan(tmp_path: Path) -> None:
    records = [*steps(6), Resumed(6, "/runs/first/checkpoints/6", "dp 2"), *steps(20)[6:]]
    own = [replace(sample, start=6) for sample in usage(2)]
    made = page(make_run(tmp_path / "run", records, monitor=[*usage(50), *own]))
    assert "Rank 2 (stage 1) used the most memory: 103 MiB." in summary(made)
    assert [row[-1] for row in block(made, "Stages", Table).rows] == ["102", "103"]
    curves = block(made, "Cores", Curves).curves
    assert len(curves[0].points) == 52, "time continues over both parts"


def test_an_interrupted_run_is_not_finished(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps(7), is_finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "batch": 7, "epo')
    made = page(folder)
    assert summary(made).startswith(
        "vgg-small, stale 2-1: not finished; 7 of 20 steps of 64 images so far, 320 images/s over the last 7."
    )
    assert isinstance(block(made, "Timeline", Note), Note)


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    assert summary(page(make_run(tmp_path / "whole", []))).startswith("The run had no steps to train.")
    assert summary(page(make_run(tmp_path / "not", [], is_finished=False))).startswith("No step was trained.")


def test_the_summary_names_faults(tmp_path: Path) -> None:
    scaled = [replace(step, loss_scale=65536.0 / 2 ** (step.batch > 3)) for step in steps(9)]
    records = [
        *scaled,
        Replaced(3, "a.jpg is no image"),
        Restarted(4, "stage 0 replica 1 (rank 1) was killed"),
        Saved(4, 10, 0.1),
    ]
    made = page(make_run(tmp_path / "run", records, summary={"skipped_updates": [3, 1]}))
    text = summary(made)
    assert ": 3 of stage 0, 1 of stage 1." in text
    assert "1 bad record;" in text
    assert "restarted once, last after step 4: stage 0 replica 1 (rank 1) was killed" in text
    assert {point.y for point in block(made, "Loss scale", Curves).curves[0].points} == {65536.0, 32768.0}


def test_an_emulated_run_claims_no_speed_of_devices(tmp_path: Path) -> None:
    monitor = [replace(sample, ranks=sample.ranks[:1]) for sample in usage()]
    predicted = {"predicted_images_per_second": 900.0}
    folder = make_run(tmp_path / "run", emulate=True, trace=Timeline(()), monitor=monitor, summary=predicted)
    made = page(folder)
    text = summary(made)
    assert "nothing about real devices" in text and "busiest" not in text
    assert "900 images/s are predicted" in text and "above" not in text
    assert [curve.label for curve in block(made, "Throughput", Curves).curves] == ["measured"]
    assert "used at most 104 MiB" in text and "rank 0" not in text
    (stack,) = block(made, "Memory", Stacks).stacks
    assert stack.label == block(made, "Cores", Curves).curves[0].label == "all ranks, one process"
    assert made.blocks[0].tiles[0].value == "\N{EN DASH}" and "--emulate" in block(made, "Timeline", Note).text
    assert "peak MiB, measured" not in block(made, "Stages", Table).columns


def test_emulated_runs_are_not_compared_by_speed(tmp_path: Path) -> None:
    plan = {"mode": "dp", "placement": "0:0", "cuts": [], "versions": [1], "depths": [1]}
    folders = [
        make_run(tmp_path / "a", emulate=True, monitor=usage()),
        make_run(tmp_path / "b", emulate=True, plan=plan, monitor=usage(), trace=Timeline(())),
    ]
    made = make_page(folders)
    text = summary(made)
    assert "Emulated: stale 2-1, dp 1." in text and "not ranked by speed" in text
    assert not re.search(r"fastest|images/s|\d times ", text)
    assert "not ranked by speed" in block(made, "Speed", Note).text
    assert not {"Throughput", "Memory"} & set(titles(made))
    assert [row[1] for row in block(made, "Overview", Table).rows] == ["\N{EN DASH}", "\N{EN DASH}"]
    real = make_page([*folders, make_run(tmp_path / "c"), make_run(tmp_path / "d")])
    assert re.search(r"^c is the fastest: 320 images/s, 1.00 times d", summary(real))
    assert [bar.label for bar in block(real, "Speed", Bars).bars] == ["c", "d"]


def test_reports_gpus_of_several_machines(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", plan={"placement": "0:0,1:0.1:1"}, monitor=usage(gpus=2))
    (folder / "monitor-1.jsonl").write_text((folder / "monitor.jsonl").read_text())
    (folder / "env.json").write_text(json.dumps({"topology": [["X", "NV4"], ["NV4", "X"]], "gpus": [{"name": "H200"}]}))
    made = page(folder)
    assert "Throttled: GPU 1 (power)." in summary(made)
    rows = block(made, "GPUs, machine 1", Table).rows
    assert rows[1] == ("1", "90%", "2,000", "250", "1.00", "61 °C", "power", "0")
    text = as_markdown(made)
    assert "| GPU0 | X | NV4 |" in text and "| gpus 0, name | H200 |" in text
    assert block(made, "Stages", Table).rows[0][1] == "0:0,1:0"


def test_reports_predicted_memory_by_part(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    parts = {"weights": 3 * 2**20, "context": 0.0, "buffers": 2**20}
    (folder / "memory.json").write_text(json.dumps({"ranks": [parts, parts, parts]}))
    stack = block(page(folder), "Memory by part", Stacks).stacks[2]
    assert stack.label == "rank 2 (stage 1)" and stack.parts == (("weights", 3.0), ("buffers", 1.0))


def test_pauses_do_not_count_as_waiting(tmp_path: Path) -> None:
    """An evaluation in the middle, for which the pipeline drains, does not make ranks less busy."""
    spans = timeline(2).spans
    gap = tuple(
        replace(span, start=span.start + 9, end=span.end + 9)
        if int(re.findall(r"[A-Z]+(\d+)", span.name)[0]) >= 4
        else span
        for span in spans
    )
    records = [*steps(1), Evaluated(1, 8, 1.0, {"top1": 0.5, "top5": 0.5}), *steps(2)[1:]]
    text = summary(page(make_run(tmp_path / "run", records, trace=Timeline(gap))))
    assert "it computes 100% of the time. Over all ranks, 39%" in text


def test_the_timeline_begins_where_all_ranks_have_actions(tmp_path: Path) -> None:
    spans = tuple(span for span in timeline(10).spans if span.rank != 2 or span.start > 0.9)
    shown = block(page(make_run(tmp_path / "run", trace=Timeline(spans))), "Timeline", Pipeline).timeline
    assert min(span.start for span in shown.spans if span.rank == 2) == 0
    assert shown.end == pytest.approx(Timeline(spans).end - 0.95, abs=0.06)


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "monitor.jsonl",
        "trace.json",
        "summary.json",
        "env.json",
        "config.toml",
        "job.json",
        "memory.json",
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00{",
        b"[]",
        b'{"traceEvents": 3, "ranks": 4, "plan": []}',
        b'{"kind": "step", "batch": "x"}\n7\n',
        b'{"kind": "resumed", "batch": "x", "checkpoint": 3, "plan": null}\n',
        b"[" * 100_000,
    ],
)
def test_damaged_and_missing_files_are_tolerated(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_run(tmp_path / "run", monitor=usage())
    (folder / name).write_bytes(content)
    page(folder)
    (folder / name).unlink()
    page(folder)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[" * 100_000, b'{"mode": 1}'])
def test_a_folder_without_a_plan_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "plan.json").unlink()
    if content is not None:
        (folder / "plan.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"plan|run folder"):
        make_page([folder])


def evaluations(*batches: int, **metrics: float) -> list[Evaluated]:
    """Evaluations whose metrics grow with the batch."""
    return [Evaluated(batch, 512, 0.5, {name: value * batch for name, value in metrics.items()}) for batch in batches]


def test_every_metric_is_drawn_and_the_best_of_the_first_is_told(tmp_path: Path) -> None:
    scored = evaluations(5, 10, 20, perplexity=2.0, mae=0.1, top1=0.01, my_accuracy=0.02, iou=0.03)
    scored = [replace(one, metrics=one.metrics | {"iou/0": 0.25, "iou/1": 0.5}) for one in scored]
    made = page(make_run(tmp_path / "run", [*steps(20), *scored]))
    text = summary(made)
    assert "loss 0.5, perplexity 40, MAE 2, top-1 20.0%, my_accuracy 40.0%, mean IoU 60.0%." in text
    assert "Perplexity was best after step 5: 10." in text, "lower is better"
    drawn = [found for found in made.blocks if isinstance(found, Curves) and found.x == "step"]
    assert [(found.title, found.y, found.is_small) for found in drawn] == [
        ("Loss", "loss", False),
        ("Perplexity", "perplexity", False),
        ("MAE", "MAE", True),
        ("Accuracy", "%", True),
        ("Mean IoU", "%", True),
    ]
    assert [curve.label for curve in drawn[3].curves] == ["top-1 on training data", "my_accuracy on training data"]
    assert [point.y for point in drawn[3].curves[0].points] == pytest.approx([5.0, 10.0, 20.0])
    assert block(made, "Mean IoU by class", Table).rows == (("0", "25.0%"), ("1", "50.0%"))
    assert as_html(made).count('class="half"') >= 2


def test_a_run_without_metrics_shows_its_losses_alone(tmp_path: Path) -> None:
    made = page(make_run(tmp_path / "run", [*steps(20), *evaluations(10, 20)]))
    assert "of the training data: loss 0.5." in summary(made) and titles(made).count("Loss") == 1
    assert "Accuracy" not in titles(made)


def test_runs_are_compared_by_their_first_common_metric_and_in_one_unit(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [*steps(20), *evaluations(20, perplexity=2.0, top1=0.01)])
    b = make_run(tmp_path / "b", [*steps(20), *evaluations(20, perplexity=1.0)])
    for folder, unit in ((a, "tokens"), (b, "tokens")):
        (folder / "job.json").write_text(json.dumps({"batches": 20, "unit": unit, "per_sample": 256}))
    made = make_page([a, b])
    assert "b has the best perplexity on training data at the end: 20 (others: a 40)." in summary(made)
    assert "81,920 tokens/s" in summary(made) and block(made, "Speed", Bars).unit == "tokens/s"
    overview = block(made, "Overview", Table)
    assert overview.columns[1:4] == ("tokens/s", "perplexity", "top-1")
    assert [row[2:4] for row in overview.rows] == [("40", "20.0%"), ("20", "\N{EN DASH}")]
    (b / "job.json").write_text(json.dumps({"batches": 20}))
    mixed = make_page([a, b])
    assert block(mixed, "Speed", Bars).unit == "samples/s" and "320 samples/s" in summary(mixed)
    c = make_run(tmp_path / "c", [*steps(20), *evaluations(20)])
    assert "has the best loss on training data at the end: 0.5" in summary(make_page([a, c]))


def test_compares_several_runs(tmp_path: Path) -> None:
    slow = [*steps(20, speed=160.0), Evaluated(20, 512, 0.6, {"top1": 0.5, "top5": 0.9})]
    plan = {"mode": "dp", "placement": "0:0", "cuts": [], "versions": [1], "depths": [1]}
    one_rank = Timeline((Span(0, "compute", "F", "0F0@0", 0, 1),))
    folders = [
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", slow, plan=plan, summary={"images_per_second": 160.0}, trace=one_rank),
    ]
    made = make_page(folders)
    assert as_html(made) and as_markdown(made)
    text = summary(made)
    assert "stale 2-1 is the fastest: 320 images/s, 2.00 times dp 1 (160)." in text
    assert (
        "stale 2-1 has the best top-1 on training data at the end: 75.0% (others: dp 1 50.0%)." in text
        and "may be chance" in text
    )
    assert "dp 1: the only rank computes 100% of the time." in text
    assert [(bar.label, bar.colour) for bar in block(made, "Speed", Bars).bars] == [("stale 2-1", 0), ("dp 1", 1)]
    assert [curve.colour for curve in block(made, "Loss", Curves).curves] == [0, 0, 1, 1], "one colour per run"
    assert [curve.colour for curve in block(made, "Throughput", Curves).curves] == [0, 1]
    assert block(made, "Timeline: dp 1", Pipeline).colour == 1 and block(made, "Overview", Table).colours == (0, 1)
    overview = block(made, "Overview", Table)
    assert [dict(zip(overview.columns, row, strict=True)) for row in overview.rows] == [
        {
            "run": run,
            "steps": "20",
            "time": time,
            "images/s": speed,
            "training loss": "0.5359",
            "evaluation loss": loss,
            "top-1": top1,
            "top-5": top5,
            "measured on": "512 samples of the training data",
            "waiting": waiting,
            "folder": folder,
        }
        for run, time, speed, loss, top1, top5, waiting, folder in [
            ("stale 2-1", "4 s", "320", "0.5", "75.0%", "99.0%", "39%", "a"),
            ("dp 1", "8 s", "160", "0.6", "50.0%", "90.0%", "0%", "b"),
        ]
    ]
    assert block(made, "Configurations", Table).rows[0] == ("mode", "stale", "dp")


def test_runs_of_one_shape_are_named_by_their_folders(tmp_path: Path) -> None:
    made = make_page([make_run(tmp_path / "one"), make_run(tmp_path / "two")])
    assert made.title == "2 runs: one; two"
    made = make_page([make_run(tmp_path / "x" / "one"), tmp_path / "one"])
    assert f"{tmp_path}/x/one" in made.title


def test_a_title_does_not_repeat_what_an_id_says(tmp_path: Path) -> None:
    for name, shown in (("20260101-120000-vgg-small-stale-2-1", "20260101-120000"), ("stale-2-1", "stale-2-1")):
        assert make_page([make_run(tmp_path / name)]).title == f"vgg-small, stale 2-1: {shown}"


def test_steps_without_duration_are_tolerated(tmp_path: Path) -> None:
    records = [Step(0, 0, float("nan"), 0.1, 0.0, 0.0), Step(1, 0, float("inf"), 0.1, 0.0, float("inf"))]
    page(make_run(tmp_path / "run", records, is_finished=False))


@pytest.mark.parametrize("program", ["/bin/stagewright", "/x/stagewright/__main__.py", "/x/stagewright/cli.py"])
def test_the_command_is_one_that_a_shell_takes(program: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "env.json").write_text(json.dumps({"command": [program, "train", "--steps", "20"]}))
    assert "\nstagewright train --steps 20\n" in as_markdown(make_page([folder]))
