"""Numbers outside an option's bounds: one line with the number, the bound and the flag, before any work."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stagewright.cli.main import main
from stagewright.cluster.placement import parse_placement
from stagewright.config.sections import options
from stagewright.config.toml import make_config
from stagewright.errors import UserError
from stagewright.plan.make import make_plan
from stagewright.plan.plan import Mode
from stagewright.schedule.check import representative_span
from tests.commands import fails

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
    "--ignore-index": ("99999999999",),
    "--lr-power": ("nan",),
    "--lr-gamma": ("-1",),
    "--lr-final": ("inf",),
    "--lr-peak": ("1.5", "nan"),
    "--lr-start-div": ("0", "inf"),
    "--lr-final-div": ("0", "-1"),
    "--layer-decay": ("0", "1", "nan"),
    "--warmup": ("-5",),
    "--context": ("0", "1048577"),
    "--workers": ("-1", "257"),
    "--timeout": ("nan", "-1", "0", "inf", "1e300"),
    "--start-timeout": ("inf", "0"),
    "--join-timeout": ("nan",),
    "--lost-timeout": ("1e300",),
    "--checkpoint-minutes": ("nan", "-1"),
    "--checkpoint-every": ("-1",),
    "--keep": ("-1",),
    "--max-restarts": ("-1",),
    "--bucket": ("-1", HUGE),
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
    "--ema": ("0", "1", "nan"),
    "--early-stop": ("0",),
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BEYOND.items() for value in values], ids=str
)
def test_an_option_outside_its_bounds_is_one_line(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", "resnet8", "--emulate", "--batch", "8", "--samples", "16", "--runs", str(tmp_path))
    line = fails(capsys, "train", *common, f"{flag}={value}")
    assert f"{flag} is {value.replace('1e300', '1e+300')}; give " in line and not list(tmp_path.iterdir())
    assert ("a finite number" in line) == (value in ("nan", "inf"))


def test_bounds_hold_wherever_a_number_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lr is nan" in fails(capsys, "train", "--set", "optimizer.lr=nan")
    with pytest.raises(ValueError, match=r"^--momentum is 1; give at least 0 and below 1$"):
        make_config({"optimizer": {"momentum": 1}})
    with pytest.raises(ValueError, match=r"^--timeout is inf; give a finite number, above 0 and at most 31536000$"):
        make_config({"run": {"timeout": math.inf}})


def test_lr_steps_are_integers(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("a,b", "1,-2", "1.5"):
        error = fails(capsys, "train", "--lr-steps", text)
        assert "--lr-steps" in error and f"'{text}'" in error and "100,200" in error
    assert make_config({"schedule": {"kind": "step", "steps": "100, 200,"}}).schedule.steps == "100, 200,"


def test_every_number_has_bounds() -> None:
    own = {"--limit", "--eval-every", "--monitor-every", "--node-index"}  # checked where more is known
    numbers = {option.flag for option in options() if option.type in (int, float)}
    assert numbers - own - BEYOND.keys() == {"--staleness"}


@pytest.mark.parametrize(
    "tables",
    [
        {"run": {"seed": 2**63 - 1, "bucket": 2**20}},
        {"run": {"seed": -(2**63) + 1}, "optimizer": {"name": "adamw", "lr": 0.0, "eps": 0.0, "label_smoothing": 1.0}},
    ],
)
def test_trains_with_options_at_their_bounds(tables: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    flags = {option.key: option.flag for option in options()}
    given = [
        f"{flags[f'{section}.{name}']}={value}" for section, values in tables.items() for name, value in values.items()
    ]
    main(["train", "--model", "resnet8", "--emulate", "--batch", "8", "--samples", "16", "--steps", "1",
          "--runs", str(tmp_path), *given])  # fmt: skip


TWO = ("--placement", "0:0.0:1")
SMALL = ("vgg-small", "--cluster", "titan-v-8")
PLAN = ("plan", *SMALL, "--batch", "64")
SIMULATE = ("simulate", *SMALL, "--batch", "99999999")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", *TWO, "--versions", "99999999999,1"), "versions 99999999999,1: a stage has at most 128; give"),
        (("train", *TWO, "--depths", "99999999999,1"), "depths 99999999999,1: a stage has at most 65536; give"),
        (("train", "--batch", "65536", "--samples", "65536", "--microbatches", "65536"), "--microbatches 16384"),
        ((*PLAN, "--lr", "inf"), "--lr is inf; give a finite number, at least 0"),
        ((*PLAN, "--lr", "nan"), "--lr is nan"),
        ((*PLAN, "--classes", "-1"), "--classes is -1; give at least 1"),
        ((*PLAN, "--classes", "0"), "--classes is 0"),
        ((*PLAN, "--image", "9999999999"), "--image is 9999999999"),
        ((*PLAN, "--momentum", "nan"), "--momentum is nan"),
        ((*PLAN, "--staleness", "-1"), "--staleness is -1"),
        ((*PLAN, "--devices", "0"), "--devices is 0; give at least 1"),
        ((*PLAN, "--microbatches", "7"), "64 is not divisible by 7"),
        (("value", *SMALL, "--batch", "0"), "--batch is 0; give at least 1"),
        (("value", *SMALL, "--batch", HUGE), f"--batch is {HUGE}"),
        ((*SIMULATE, "--microbatches", "99999999"), "more than 16384; give --microbatches 13837"),
        ((*SIMULATE, "--microbatches", "0"), "--microbatches is 0"),
        (("simulate", *SMALL, "--microbatches", "0"), "--microbatches is 0; give at least 1"),
        (("schedule", *TWO, "--forward", "0,0", "--backward", "0,0"), "--forward and --backward are 0"),
        (("schedule", *TWO, "--forward", "nan,1"), "--forward is nan; give a finite number, at least 0"),
        (("schedule", *TWO, "--backward", "1,-1"), "--backward is -1; give at least 0"),
        (("schedule", *TWO, "--transfer", "inf"), "--transfer is inf"),
        (("schedule", *TWO, "--batches", "100000000"), "--batches is 100000000; give at least 1 and at most"),
        (("schedule", *TWO, "--batches", "0"), "--batches is 0"),
        (("profile", "resnet8", "--classes", "-1"), "--classes is -1"),
        (("profile", "resnet8", "--image", "-1"), "--image is -1"),
        (("profile", "resnet8", "--image", "0"), "--image is 0"),
        (("profile", "resnet8", "--image", "9999999999"), "--image is 9999999999"),
        (("profile", "resnet8", "--samples", "99999999999,999999999999"), "at most 1048576 samples"),
        (("profile", "resnet8", "--together", "1000000"), "--together is 1000000; give at most"),
        (("profile", "resnet8", "--threads", "99999999999"), "--threads is 99999999999"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_numbers_that_other_commands_can_not_take_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, *arguments)


def test_a_plan_file_with_a_huge_depth_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    deep = {"mode": "sync", "placement": "0:0.0:1", "cuts": ["classifier"], "batch": 8, "microbatches": 2}
    file.write_text(json.dumps(deep | {"versions": [1, 1], "depths": [10**9, 1]}))
    assert "a stage has at most 65536" in fails(capsys, "simulate", *SMALL, "--plan", str(file))


def test_a_plan_that_takes_too_long_to_repeat_is_one_line() -> None:
    placement = parse_placement("0:0.0:1")
    plan = make_plan(placement, batch=16384, microbatches=16384, mode=Mode.STALE, versions=[128, 1])
    with pytest.raises(UserError, match=r"more than 1048576 .*; give fewer --microbatches, --versions or --depths"):
        representative_span(plan)
