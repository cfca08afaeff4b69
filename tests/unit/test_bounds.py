"""Numbers beyond what an option can mean: one line with the number, the bound and the flag, before any work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli import main
from stagewright.config import make_config, options
from tests.unit.test_cli import fails

HUGE = "99999999999999999999999999"
BEYOND = {
    "--lr": ("nan", "inf", "-1"),
    "--weight-decay": ("nan", "-1"),
    "--clip": ("nan", "0", "-1"),
    "--momentum": ("5", "1", "nan"),
    "--beta1": ("2", "1"),
    "--beta2": ("nan",),
    "--eps": ("-1", "inf"),
    "--label-smoothing": ("nan", "1.5"),
    "--lr-power": ("nan",),
    "--lr-gamma": ("-1",),
    "--lr-final": ("inf",),
    "--warmup": ("-5",),
    "--timeout": ("nan", "-1", "0", "inf", "1e300"),
    "--start-timeout": ("inf", "0"),
    "--join-timeout": ("nan",),
    "--lost-timeout": ("1e300",),
    "--checkpoint-minutes": ("nan", "-1"),
    "--checkpoint-every": ("-1",),
    "--keep": ("-1",),
    "--max-restarts": ("-1",),
    "--bucket": ("0", HUGE),
    "--ahead": ("-1", HUGE),
    "--loader-threads": ("0", HUGE),
    "--threads": ("0", "99999999999999"),
    "--samples": (HUGE, "0"),
    "--image": ("1000000", "0"),
    "--classes": ("999999999999", "0"),
    "--batch": ("0", HUGE),
    "--microbatches": ("0",),
    "--steps": (HUGE,),
    "--epochs": (HUGE,),
    "--seed": (HUGE, f"-{HUGE}"),
    "--log-every": ("0",),
    "--jitter": ("nan", "1"),
    "--cutout": ("-1",),
    "--max-bad": ("-1",),
    "--loss-scale": ("nan", "0.5", "1e300"),
    "--growth-interval": ("0",),
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BEYOND.items() for value in values], ids=str
)
def test_an_option_beyond_its_bounds_is_one_line(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", "resnet8", "--emulate", "--batch", "8", "--samples", "16", "--runs", str(tmp_path))
    line = fails(capsys, "train", *common, f"{flag}={value}")
    assert f"{flag} is {value.replace('1e300', '1e+300')}; give " in line and not list(tmp_path.iterdir())
    assert ("a finite number" in line) == (value in ("nan", "inf"))


def test_a_number_is_held_to_its_bounds_wherever_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lr is nan" in fails(capsys, "train", "--set", "optimizer.lr=nan")
    with pytest.raises(ValueError, match=r"^--momentum is 1; give at least 0 and below 1$"):
        make_config({"optimizer": {"momentum": 1}})
    with pytest.raises(ValueError, match=r"^--timeout is inf; give a finite number, above 0 and at most 31536000$"):
        make_config({"run": {"timeout": math.inf}})


def test_batches_at_which_the_rate_falls_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("a,b", "1,-2", "1.5"):
        assert f"--lr-steps '{text}' are not whole numbers" in fails(capsys, "train", "--lr-steps", text)
    assert make_config({"schedule": {"steps": "100, 200,"}}).schedule.steps == "100, 200,"


def test_every_number_has_bounds() -> None:
    own = {"--limit", "--eval-every", "--monitor-every", "--node-index"}  # checked where more is known
    numbers = {option.flag for option in options() if option.type in (int, float)}
    assert numbers - own - BEYOND.keys() == {"--staleness"}


@pytest.mark.parametrize(
    "tables",
    [
        {"run": {"seed": 2**63 - 1, "timeout": 365 * 86400.0, "bucket": 2**20}},
        {"run": {"seed": -(2**63) + 1}, "optimizer": {"lr": 0.0, "eps": 0.0, "label_smoothing": 1.0}},
    ],
)
def test_the_bounds_themselves_can_be_trained_with(tables: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    flags = {option.key: option.flag for option in options()}
    given = [
        f"{flags[f'{section}.{name}']}={value}" for section, values in tables.items() for name, value in values.items()
    ]
    main(["train", "--model", "resnet8", "--emulate", "--batch", "8", "--samples", "16", "--steps", "1",
          "--runs", str(tmp_path), *given])  # fmt: skip
