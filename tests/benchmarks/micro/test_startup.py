"""Start-up: the parts of a command end at its lines, and add up to the whole."""

from pathlib import Path

import pytest

from benchmarks.micro.startup import OPTIONS, PARTS, STEPS, make_outcome, split
from benchmarks.timed_command import Printed
from stagewright.cli.main import main
from stagewright.errors import RunFailed

LINES = (
    (2.0, "resnet18, mode dp: stage 0 on 0:0"),
    (2.1, f"batch 64 in 1 microbatch, {STEPS} steps, files in runs/mode dp"),
    (2.5, f"epoch 1  step  1/{STEPS}  loss 6.9"),
    (3.0, f"epoch 1  step 11/{STEPS}  loss 6.9"),
    (3.5, f"done: {STEPS} steps, 600 images/s"),
    (3.6, "files: runs/x"),
)


def test_parts_end_at_the_lines_of_the_command_and_add_up() -> None:
    parts = split([], Printed(LINES, 4.0))
    assert parts == pytest.approx(dict(zip(PARTS, (2.0, 0.5, 1.0, 0.5), strict=True)) | {"in all": 4.0})
    for number in (0, 2, 4):
        with pytest.raises(RunFailed, match="files: runs/x"):
            split([], Printed(LINES[:number] + LINES[number + 1 :], 4.0))


def test_every_part_is_a_row_in_seconds() -> None:
    outcome = make_outcome({name: [1.0, 2.0, 3.0] for name in (*PARTS, "in all")})
    assert [row.name for row in outcome.rows] == [*PARTS, "in all"] and outcome.unit == "seconds"
    assert all(row.rate is not None and row.rate.value == 2.0 for row in outcome.rows)


def test_the_lines_are_those_that_train_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smaller = ("--model", "resnet8", "--batch", "8", "--emulate", "--runs", str(tmp_path))
    main(["train", *OPTIONS.split(), *smaller])
    lines = tuple((float(at), line) for at, line in enumerate(capsys.readouterr().out.splitlines(), 1))
    parts = split([], Printed(lines, len(lines) + 1.0))
    assert all(seconds > 0 for seconds in parts.values())
