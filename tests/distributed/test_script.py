"""Scripts and notebooks: their own objects train in rank processes, which never import them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from stagewright.runtime.checkpoint.folder import list_folders
from tests.distributed.test_command import ROOT, ranks_of
from tests.marks import nightly
from tests.waiting import LONG

SCRIPT = '''
import json, os, sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import stagewright
from beside import SCALE  # a module in the script's folder

MARK, RUNS = Path(sys.argv[1]), sys.argv[2]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * SCALE


class Numbers(torch.utils.data.Dataset):
    """Ends its process once, at a sample of the second batch."""

    def __init__(self):
        self.rows = list(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == 12 and os.environ.get("RANK") and not MARK.exists():
            MARK.touch()
            os._exit(7)
        return self.rows[index], int(self.rows[index].sum() > 0)


def loss(outputs, target):
    return functional.cross_entropy(outputs, target) * SCALE


def right(outputs, target):
    return (outputs.argmax(1) == target).double().sum(), len(target)


net = nn.Sequential(Block(), Block(), nn.Linear(6, 2))
given = dict(data=Numbers(), val=Numbers(), loss=loss, metrics={"share": right}, placement="0:0.0:1", mode="stale",
             batch=8, epochs=1, shuffle=False, checkpoint_every=1, monitor_every=0, runs=RUNS)
emulated = stagewright.train(net, emulate=True, **given)
seen = []
real = stagewright.train(net, callbacks=lambda record: seen.append(type(record).__name__), **given)
ours, theirs = real.weights(), emulated.weights()
print(json.dumps({
    "same": all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys(),
    "losses": [[step.loss for step in run.steps] for run in (real, emulated)],
    "metrics": [dict(run.evaluations[-1].metrics) for run in (real, emulated)],
    "seen": seen,
}))
'''
NOTEBOOK = """
import code, sys
cells = [
    "import torch, stagewright",
    "class Net(torch.nn.Linear):\\n    def forward(self, x):\\n        return super().forward(x) * 2\\n",
    "samples = [(torch.full((3,), float(n)), n % 2) for n in range(8)]",
    "result = stagewright.train(lambda: Net(3, 2), samples, batch=4, steps=2, monitor_every=0, runs=sys.argv[1])",
    "print(len(result.steps), sorted(result.weights()))",
    "result",
]
console = code.InteractiveConsole(vars(sys.modules["__main__"]))
for cell in cells:
    assert not console.runsource(cell + "\\n", symbol="single" if cell == "result" else "exec")
"""


@nightly
def test_a_script_trains_its_own_objects_over_two_ranks_and_after_a_restart(tmp_path: Path) -> None:
    """With the same bits as emulated, though a rank was lost, and with modules of the script's folder."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("SCALE = 1.5\n")
    script = tmp_path / "scripts" / "mine.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "mark"), str(tmp_path / "runs")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (tmp_path / "mark").exists() and found["seen"].count("Restarted") == 1
    assert found["same"] and found["losses"][0] == found["losses"][1] and found["metrics"][0] == found["metrics"][1]
    assert list(found["metrics"][0]) == ["share"] and len(found["losses"][0]) == 4
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 2 and all(list_folders(run) for run in runs) and ranks_of(tmp_path) == []
    assert not [path for run in runs for path in run.rglob("*") if b"Ends its process once" in read(path)]  # no pickle


def read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@nightly
def test_classes_and_functions_of_notebook_cells_train_in_a_rank(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(tmp_path / "runs")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "2 ['bias', 'weight']" and second.startswith("Result(model _lambda_, plan ") and "steps 2" in second
