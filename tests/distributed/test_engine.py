"""A script with an Engine over real ranks: the same bits however it is started, and faults named in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.marks import nightly
from tests.waiting import LONG

SCRIPT = """
import os
import pathlib
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stagewright

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.arange(48) % 3)
if sys.argv[2:] == ["model"]:
    torch.seed()
model = nn.Sequential(
    nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)
)
folder, wrong = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
rank = os.environ.get("RANK")
engine = stagewright.Engine(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    placement="0:0-1.0:2",
    mode="stale",
    staleness=1,
    cut="3",
    microbatches=4,
    runs=folder,
    checkpoint_every=5 if wrong == "kill" else 0,
)
for epoch in range(3):
    for step in engine.epoch(data, batch=8):
        if wrong == "raise" and step.batch == 2 and rank == "1":
            raise ValueError("no such colour")
        if wrong == "kill" and step.batch == 8 and rank == "2" and not os.path.exists(folder + "/killed"):
            open(folder + "/killed", "w").close()
            while not list(pathlib.Path(folder).glob("*/checkpoints/5/manifest.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        if engine.is_main:
            print("step", step.batch, step.loss, step.is_replayed, flush=True)
    if wrong == "branch" and rank == "1":
        engine.checkpoint()
    found = engine.evaluate(data)
    if engine.is_main:
        print("evaluated", found.loss, flush=True)
    if wrong == "batch":
        own = torch.Generator().manual_seed(int(rank or 0))
        for step in engine.epoch(DataLoader(data, 8, shuffle=True, generator=own)):
            pass
engine.save(folder + "/weights.safetensors")
"""


def line_of(text: str) -> str:
    """Where a line of the script is."""
    return f"train.py:{1 + next(number for number, line in enumerate(SCRIPT.splitlines()) if text in line)}"


def run(folder: Path, wrong: str = "", *launcher: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), str(folder), *([wrong] if wrong else [])]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, env=environment, cwd=Path.cwd())
    assert done.returncode == code, done.stderr[-2000:] + done.stdout[-500:]
    return done


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The script, run by `python`: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("python")
    return folder, run(folder).stdout.splitlines()


def same(folder: Path, other: Path) -> bool:
    weights, others = (load_file(path / "weights.safetensors") for path in (folder, other))
    return all(torch.equal(weights[name], others[name]) for name in weights)


def test_prints_once_and_sees_every_step(plain: tuple[Path, list[str]]) -> None:
    _, lines = plain
    assert [line.split()[1] for line in lines if line.startswith("step")] == [str(number) for number in range(18)]
    assert sum(line.startswith("evaluated") for line in lines) == 3


@nightly
def test_torchrun_trains_the_same_bits(plain: tuple[Path, list[str]], tmp_path: Path) -> None:
    done = run(tmp_path, "", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    assert done.stdout.splitlines() == plain[1] and same(tmp_path, plain[0])


def test_a_killed_rank_restarts_and_the_script_sees_its_steps_again(
    plain: tuple[Path, list[str]], tmp_path: Path
) -> None:
    lines = run(tmp_path, "kill").stdout.splitlines()
    replayed = [line for line in lines if line.endswith("True")]
    assert [line.split()[1] for line in replayed] == ["0", "1", "2", "3", "4"]
    assert [line.removesuffix("True").removesuffix("False") for line in lines[-21:]] == [
        line.removesuffix("False") for line in plain[1]
    ]
    assert same(tmp_path, plain[0])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "branch",
            ("different branches on two ranks", line_of("engine.checkpoint()"), line_of("engine.evaluate(data)")),
        ),
        pytest.param(
            "batch",
            ("the engine with batch", line_of("in engine.epoch(DataLoader"), "something else on rank", "manual_seed"),
            marks=nightly,
        ),
        pytest.param("model", ("Engine", line_of("engine = "), "something else on rank", "manual_seed"), marks=nightly),
        pytest.param("raise", (f"{line_of('raise ValueError')} raised ValueError: no such colour",), marks=nightly),
    ],
)
def test_what_differs_or_fails_on_a_rank_is_one_line(wrong: str, said: tuple[str, ...], tmp_path: Path) -> None:
    error = run(tmp_path, wrong, code=2).stderr
    last = error.splitlines()[-1]
    assert all(part in last for part in said), last
    assert "Traceback" not in error
