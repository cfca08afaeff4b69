"""profile, plan, simulate and train, as a user would type them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from stagewright.runtime.process.link_test import measure_links
from tests.marks import soak
from tests.waiting import LONG

ROOT = Path(__file__).parents[2]


def stagewright(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stagewright", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@soak
def test_plans_runs_and_predicts_a_measured_model(tmp_path: Path) -> None:
    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    shown = stagewright("profile", "vgg-small", "--samples", "4,16", "--together", "2", "-o", profile)
    assert "link 0-1" in shown and "classifier.0" in shown
    choice = json.loads(stagewright("plan", "vgg-small", "--profile", profile, "--batch", "32", "-o", plan, "--json"))
    best = choice["candidates"][choice["best"]]
    assert any(candidate["plan"]["mode"] == "dp" for candidate in choice["candidates"])
    alone = json.loads(stagewright("simulate", "vgg-small", "--profile", profile, "--plan", plan, "--json"))
    assert abs(alone["images_per_second"] / best["images_per_second"] - 1) < 1e-9
    run = ["train", "--model", "vgg-small", "--plan", plan, "--profile", profile, "--steps", "4", "--json"]
    summary = json.loads(stagewright(*run, "--runs", str(tmp_path / "runs")))
    assert summary["plan"] == best["plan"]
    assert abs(summary["predicted_images_per_second"] / best["images_per_second"] - 1) < 1e-9
    assert summary["images_per_second"] > 0


def test_measures_the_link_of_every_pair() -> None:
    found = measure_links(3, timeout=LONG)
    assert [(entry["source"], entry["target"]) for entry in found["transfers"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(entry["bandwidth"] > 1e4 and 0 < entry["latency"] < 60 for entry in found["transfers"])
    assert found["reduce"] > 1e4 and found["wrong"] == []
