"""Values of wrong types in a run folder are left out, or refused in one line by every command that reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.main import main
from stagewright.events import (
    Evaluated,
    GpuUsage,
    RankUsage,
    Replaced,
    Restarted,
    Resumed,
    Saved,
    Step,
    Unsaved,
    Usage,
    read_records,
    read_usage,
)
from tests.made_runs import PLAN, make_run, steps, timeline, usage
from tests.marks import daily

WRONG: tuple[Any, ...] = (None, "many", inf, nan, -inf, [], [1], {}, True, 10**400, -1, 1.5)
RECORDS = (
    Step(20, 2, 0.5, 0.02, 4.2, 320.0, 1024.0),
    Evaluated(20, 512, 0.5, {"top1": 0.75, "top5": 0.99}),
    Replaced(3, "a.jpg: cut"),
    Saved(10, 1000, 0.1),
    Unsaved(10, "disk full"),
    Restarted(10, "rank 1 died"),
    Resumed(0, "runs/a/checkpoints/10", "stale 2-1"),
)
MAY_BE = {
    "loss": (inf, nan, -inf, -1),
    "seconds": (-1,),
    "waited": (-1,),
    "lr": (-1,),
    "images_per_second": (-1,),
    "loss_scale": (None, -1),
    "best": (None,),
}
MAY_BE |= {"metrics": ({},), "cores": (-1,), "torch_memory": (None,), "memory": ()}
FILES: dict[str, dict[str, Any]] = {
    "plan.json": PLAN,
    "job.json": {"batches": 20, "unit": "tokens", "per_sample": 256},
    "summary.json": {
        "images_per_second": 320.0,
        "predicted_images_per_second": 300.0,
        "skipped_updates": [0, 1],
    },
    "memory.json": {"ranks": [{"weights": 1e6}] * 3},
    "env.json": {"host": {"cores": 2}, "gpus": [], "topology": [["X"]], "command": ["a"], "libraries": {}},
    "trace.json": timeline().chrome_trace(),
}
CASES = [
    (file, name, value)
    for file, content in FILES.items()
    for name in content
    for value in (None, "many", inf, 7, [["x"]], 10**400)
]


def line(record: Any) -> dict[str, Any]:
    return {"kind": type(record).__name__.lower(), **asdict(record)}


def require_readers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads a run ends well, or with one line that names what it read."""
    other = folder.parent / "other"
    for arguments in (
        ["report", str(folder)],
        ["report", str(folder), str(other), "-o", str(folder.parent / "both.html")],
        ["watch", "--once", str(folder)],
        ["watch", "--json", str(folder)],
        ["compare", str(folder), str(other)],
    ):
        try:
            main(arguments)
        except SystemExit as end:
            said = capsys.readouterr().err
            assert end.code == 2 and said.count("\n") == 1 and f"plan {folder}" in said, (arguments, said)


@pytest.mark.parametrize(
    ("record", "name"),
    [(record, field.name) for record in RECORDS for field in fields(record)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_record_with_a_wrong_value_is_left_out(
    record: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "other")
    folder = make_run(tmp_path / "run", [*steps(20), record], monitor=usage())
    text = isinstance(getattr(record, name), str)
    wrong = [value for value in WRONG if not (text and isinstance(value, str))]
    kept = MAY_BE.get(name, ())
    if isinstance(getattr(record, name), float):
        kept = (*kept, 1.5)
    for value in wrong:
        found = list(read_records([json.dumps(line(record) | {name: value}).encode()]))
        assert bool(found) == (repr(value) in map(repr, kept)), (name, value)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line(record) | {name: value})}\n" for value in wrong)
    require_readers(folder, capsys)


@pytest.mark.parametrize(
    ("part", "name"),
    [(kind.__name__, field.name) for kind in (Usage, GpuUsage, RankUsage) for field in fields(kind)],
)
def test_a_sample_with_a_wrong_value_is_left_out(
    part: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "other")
    folder = make_run(tmp_path / "run", monitor=usage(gpus=2))
    (sample,) = usage(1, gpus=2)
    lines = []
    for value in WRONG:
        fields_of = json.loads(json.dumps(asdict(sample)))
        changed = {"Usage": fields_of, "GpuUsage": fields_of["gpus"][0], "RankUsage": fields_of["ranks"][0]}[part]
        changed[name] = value
        lines.append(json.dumps(fields_of))
    assert not list(read_usage([lines[1].encode()])) or name == "uuid"
    with (folder / "monitor.jsonl").open("a") as file:
        file.writelines(f"{text}\n" for text in lines)
    require_readers(folder, capsys)


@pytest.mark.parametrize(("file", "name", "value"), daily(CASES, 11), ids=lambda value: str(value)[:12])
def test_a_file_with_a_wrong_value_breaks_no_command(
    file: str, name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "other")
    folder = make_run(tmp_path / "run", monitor=usage())
    (folder / file).write_text(json.dumps(FILES[file] | {name: value}))
    require_readers(folder, capsys)


@pytest.mark.parametrize("value", [None, "many", inf, [], -1], ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("name", ["pid", "tid", "ts", "dur", "cat", "name", "ph"])
def test_a_trace_with_a_wrong_value_breaks_no_command(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "other")
    folder = make_run(tmp_path / "run")
    trace = timeline().chrome_trace()
    trace["traceEvents"][-1][name] = value
    (folder / "trace.json").write_text(json.dumps(trace))
    require_readers(folder, capsys)
