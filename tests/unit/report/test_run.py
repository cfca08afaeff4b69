"""The page of a run and the comparison of several: finished, interrupted, resumed, emulated and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagewright.events import Evaluated, Replaced, Restarted, Resumed, Saved, Step
from stagewright.metrics import Span, Timeline
from stagewright.report.html import as_html
from stagewright.report.markdown import as_markdown
from stagewright.report.page import Page, Table
from stagewright.run.report import make_page
from tests import golden
from tests.made_runs import delayed, make_run, steps, timeline, usage

DATA_PARALLEL = {"mode": "dp", "placement": "0:0", "cuts": [], "versions": [1], "depths": [1]}
PREDICTED = {"predicted_images_per_second": 336.0}
RESUMED = Resumed(6, "/runs/first/checkpoints/6", "dp 2")


def page(*folders: Path) -> Page:
    """The page of some runs, after making sure that both forms can be drawn."""
    made = make_page(folders)
    assert as_html(made) and as_markdown(made)
    return made


def rewritten(folder: Path, name: str, **values: Any) -> Path:
    """A run with another JSON file."""
    (folder / name).write_text(json.dumps(values))
    return folder


def evaluations(*batches: int, **metrics: float) -> list[Evaluated]:
    """Evaluations whose metrics grow with the batch."""
    return [Evaluated(batch, 512, 0.5, {name: value * batch for name, value in metrics.items()}) for batch in batches]


# --- Runs, each with a golden file of its page ------------------------------------------------------------------------


def finished(at: Path) -> list[Path]:
    return [make_run(at / "run", summary=PREDICTED, monitor=usage())]


def evaluated_in_the_middle(at: Path) -> list[Path]:
    """An evaluation in the timeline once made a rank 98 % busy in the sentence and 89 % in the table."""
    records = [*steps(2), Evaluated(2, 512, 0.5, {"top1": 0.75}), *steps(4)[2:]]
    return [make_run(at / "run", records, trace=delayed(timeline(4), 8, 9), monitor=usage(), summary=PREDICTED)]


def evaluated_beside_another(at: Path) -> list[Path]:
    return [*evaluated_in_the_middle(at), make_run(at / "b")]


def paused(at: Path) -> list[Path]:
    """The pipeline drains for an evaluation, which makes ranks no less busy."""
    records = [*steps(1), Evaluated(1, 8, 1.0, {"top1": 0.5, "top5": 0.5}), *steps(2)[1:]]
    return [make_run(at / "run", records, trace=delayed(timeline(2), 4, 9))]


def validated(at: Path) -> list[Path]:
    folder = make_run(at / "run", monitor=usage())
    config = (folder / "config.toml").read_text()
    other = config.replace('source = "synthetic"', 'source = "folder:a"\nval = "folder:/x/val"')
    (folder / "config.toml").write_text(other)
    return [folder]


def bare(at: Path) -> list[Path]:
    return [make_run(at / "bare", steps(3), is_finished=False)]


def marked(at: Path) -> list[Path]:
    late = [replace(step, seconds=step.seconds + (3.0 if step.batch >= 8 else 0.0)) for step in steps(20)]
    return [make_run(at / "run", [*late, Evaluated(8, 512, 0.5), Saved(8, 10, 0.5), Saved(12, 10, 0.25)])]


def marked_beside_another(at: Path) -> list[Path]:
    return [*marked(at), make_run(at / "other", [*steps(20), Saved(12, 10, 0.25)])]


def resumed(at: Path) -> list[Path]:
    return [make_run(at / "own", [*steps(6), RESUMED, *steps(20)[6:]])]


def resumed_by_the_same_plan(at: Path) -> list[Path]:
    return [make_run(at / "new", [replace(RESUMED, plan="stale 2-1"), *steps(9)[6:]], is_finished=False)]


def resumed_both(at: Path) -> list[Path]:
    return [*resumed(at), *resumed_by_the_same_plan(at)]


def resumed_with_a_monitor(at: Path) -> list[Path]:
    """Its memory is that of its current plan; time continues over both parts."""
    own = [replace(sample, start=6) for sample in usage(2)]
    return [make_run(at / "run", [*steps(6), RESUMED, *steps(20)[6:]], monitor=[*usage(50), *own])]


def interrupted(at: Path) -> list[Path]:
    folder = make_run(at / "run", steps(7), is_finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "batch": 7, "epo')
    return [folder]


def without_steps(at: Path) -> list[Path]:
    return [make_run(at / "whole", [])]


def not_begun(at: Path) -> list[Path]:
    return [make_run(at / "not", [], is_finished=False)]


def faulty(at: Path) -> list[Path]:
    scaled = [replace(step, loss_scale=65536.0 / 2 ** (step.batch > 3)) for step in steps(9)]
    killed = Restarted(4, "stage 0 replica 1 (rank 1) was killed")
    records = [*scaled, Replaced(3, "a.jpg is no image"), killed, Saved(4, 10, 0.1)]
    return [make_run(at / "run", records, summary={"skipped_updates": [3, 1]})]


def emulated(at: Path) -> list[Path]:
    """It claims no speed of devices."""
    monitor = [replace(sample, ranks=sample.ranks[:1]) for sample in usage()]
    predicted = {"predicted_images_per_second": 900.0}
    return [make_run(at / "run", emulate=True, trace=Timeline(()), monitor=monitor, summary=predicted)]


def emulated_both(at: Path) -> list[Path]:
    """They are not compared by speed."""
    plan = {"emulate": True, "plan": DATA_PARALLEL, "monitor": usage(), "trace": Timeline(())}
    return [make_run(at / "a", emulate=True, monitor=usage()), make_run(at / "b", **plan)]


def emulated_beside_real(at: Path) -> list[Path]:
    return [*emulated_both(at), make_run(at / "c"), make_run(at / "d")]


def gpus_of_two_machines(at: Path) -> list[Path]:
    folder = make_run(at / "run", plan={"placement": "0:0,1:0.1:1"}, monitor=usage(gpus=2))
    (folder / "monitor-1.jsonl").write_text((folder / "monitor.jsonl").read_text())
    return [rewritten(folder, "env.json", topology=[["X", "NV4"], ["NV4", "X"]], gpus=[{"name": "H200"}])]


def predicted_memory(at: Path) -> list[Path]:
    parts = {"weights": 3 * 2**20, "context": 0.0, "buffers": 2**20}
    return [rewritten(make_run(at / "run"), "memory.json", ranks=[parts, parts, parts])]


def late_actions(at: Path) -> list[Path]:
    """The timeline begins where all ranks have actions."""
    spans = tuple(span for span in timeline(10).spans if span.rank != 2 or span.start > 0.9)
    return [make_run(at / "run", trace=Timeline(spans))]


def many_metrics(at: Path) -> list[Path]:
    """The best of the first is told; of a perplexity the lower is better."""
    scored = evaluations(5, 10, 20, perplexity=2.0, mae=0.1, top1=0.01, my_accuracy=0.02, iou=0.03)
    classes = {"iou/0": 0.25, "iou/1": 0.5}
    return [make_run(at / "run", [*steps(20), *(replace(one, metrics=one.metrics | classes) for one in scored)])]


def without_metrics(at: Path) -> list[Path]:
    return [make_run(at / "run", [*steps(20), *evaluations(10, 20)])]


def of_tokens(at: Path) -> list[Path]:
    """Runs are compared by their first common metric."""
    folders = [
        make_run(at / "a", [*steps(20), *evaluations(20, perplexity=2.0, top1=0.01)]),
        make_run(at / "b", [*steps(20), *evaluations(20, perplexity=1.0)]),
    ]
    return [rewritten(folder, "job.json", batches=20, unit="tokens", per_sample=256) for folder in folders]


def of_several_units(at: Path) -> list[Path]:
    first, second = of_tokens(at)
    return [first, rewritten(second, "job.json", batches=20)]


def compared_by_loss(at: Path) -> list[Path]:
    return [of_tokens(at)[0], make_run(at / "c", [*steps(20), *evaluations(20)])]


def compared(at: Path) -> list[Path]:
    """A run has one colour in every figure."""
    slow = [*steps(20, speed=160.0), Evaluated(20, 512, 0.6, {"top1": 0.5, "top5": 0.9})]
    one_rank = Timeline((Span(0, "compute", "F", "0F0@0", 0, 1),))
    plan = {"plan": DATA_PARALLEL, "summary": {"images_per_second": 160.0}, "trace": one_rank}
    return [make_run(at / "a"), make_run(at / "b", slow, **plan)]


PAGES: tuple[Callable[[Path], list[Path]], ...] = (
    *(finished, evaluated_in_the_middle, evaluated_beside_another, paused, validated, bare, marked),
    *(marked_beside_another, resumed, resumed_by_the_same_plan, resumed_both, resumed_with_a_monitor, interrupted),
    *(without_steps, not_begun, faulty, emulated, emulated_both, emulated_beside_real, gpus_of_two_machines),
    *(predicted_memory, late_actions, many_metrics, without_metrics, of_tokens, of_several_units, compared_by_loss),
    compared,
)


@pytest.mark.parametrize("make", PAGES, ids=lambda make: make.__name__)
def test_a_page_is_its_golden_file(make: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    golden.check(f"run/{make.__name__}", page(*make(tmp_path)))


# --- What a golden file does not show ---------------------------------------------------------------------------------


def test_the_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    records = [*steps(8_000), *(Evaluated(batch, 8, 1.0, {"top1": 0.5, "top5": 0.5}) for batch in range(0, 8_000, 10))]
    made = page(make_run(tmp_path / "run", records, trace=timeline(2_000), monitor=usage(3_000, gpus=4)))
    assert len(as_html(made).encode()) < 1_000_000 and len(as_markdown(made)) < 50_000
    (table,) = [found for found in made.blocks if isinstance(found, Table) and found.title == "Epochs"]
    assert len(table.rows) == 100 and table.rows[-1][0] == "1000" and "900 epochs" in table.note


FILES = "metrics.jsonl monitor.jsonl trace.json summary.json env.json config.toml job.json memory.json"


@pytest.mark.parametrize("name", FILES.split())
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
