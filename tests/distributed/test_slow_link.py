"""A slow link between two machines costs what the simulator says: between two stages, and inside one.

The first plan sends activations over the link, the second gradients. Both are simulated on a profile taken here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.namespaces import ROOT, Machines, machines
from tests.marks import soak
from tests.waiting import LONG

RATES = {"100mbit": 100e6 / 8 * 0.94, "1gbit": 0.1175e9}  # bytes per second over TCP
PLANS = {"between stages": ("stale", "0:0.1:0"), "inside a stage": ("dp", "0:0,1:0")}
BATCH, MICROBATCHES, STEPS = 64, 4, 14
CLUSTER = """
[link.slow]
bandwidth = {bandwidth}
latency = 200e-6
[cluster.pair]
network = "slow"
[[cluster.pair.machines]]
device = "cpu"
devices = 1
count = 2
"""


def stagewright(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "stagewright", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(pair: Machines, folder: Path, mode: str, placement: str, cut: list[str]) -> float:
    """Images per second of the same command on both machines."""
    common = ("--model", "vgg-small", "--mode", mode, "--placement", placement, "--nodes", pair.nodes, *cut)
    size = ("--batch", str(BATCH), "--microbatches", str(MICROBATCHES), "--steps", str(STEPS))
    both = [pair.start(m, "train", *common, *size, "--runs", str(folder / str(m)), "--json") for m in range(2)]
    outputs = [process.communicate(timeout=LONG) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    return float(json.loads(outputs[0][0])["images_per_second"])


@soak
@pytest.mark.parametrize("rate", RATES)
def test_a_slow_link_costs_what_the_simulator_says(rate: str, tmp_path: Path) -> None:
    profile, cluster = tmp_path / "profile.json", tmp_path / "cluster.toml"
    sizes = sorted({BATCH // MICROBATCHES, BATCH // MICROBATCHES * 2})
    stagewright("profile", "vgg-small", "--samples", ",".join(map(str, sizes)), "--together", "2", "-o", str(profile))
    cluster.write_text(CLUSTER.format(bandwidth=RATES[rate]))
    speeds: dict[str, tuple[float, float]] = {}
    with machines(2, rate) as pair:
        for name, (mode, placement) in PLANS.items():
            cut = ["--cut", "classifier.0"] if "." in placement else []
            setting = ("--profile", str(profile), "--cluster", str(cluster), "--mode", mode, "--placement", placement)
            size = ("--batch", str(BATCH), "--microbatches", str(MICROBATCHES))
            predicted = stagewright("simulate", "vgg-small", *setting, *size, *cut)["images_per_second"]
            speeds[name] = (predicted, measured(pair, tmp_path, mode, placement, cut))
    between, inside = (speeds[name] for name in PLANS)
    for name, (predicted, found) in speeds.items():
        print(f"{rate} {name}: predicted {predicted:.1f}, measured {found:.1f} images/s ({predicted / found - 1:+.0%})")
    ratios = [between[side] / inside[side] for side in range(2)]
    print(f"{rate} between stages / inside a stage: predicted {ratios[0]:.2f}, measured {ratios[1]:.2f}")
    assert (ratios[0] > 1) == (ratios[1] > 1) and 0.5 < ratios[0] / ratios[1] < 2
