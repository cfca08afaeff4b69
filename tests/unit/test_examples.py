"""Each script of examples/ trains what plain PyTorch does, in one process and over stages; lag is as the rules say."""

from __future__ import annotations

import difflib
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import stagewright
from stagewright.model.networks import zoo
from stagewright.model.networks.vit import VisionTransformer
from tests import reference
from tests.docs import ROOT, blocks
from tests.examples import (
    ALL,
    BATCH,
    EPOCHS,
    EXACT,
    EXAMPLES,
    FINETUNE,
    IMAGES,
    ROUNDING,
    SAMPLES,
    SIZE,
    WIDTH,
    Example,
    Trained,
    module,
    notebook_cells,
    train,
)

SYNC = ("--placement", "0:0.0:1", "--mode", "sync", "--emulate")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks where the zoo's smallest vision transformer has twelve."""
    entry = replace(zoo.ZOO["vit-tiny"], build=partial(VisionTransformer, 32, 8, 2, 2, 32))
    monkeypatch.setattr(zoo, "ZOO", {**zoo.ZOO, "vit-tiny": entry})


@pytest.mark.parametrize("example", ALL, ids=lambda example: example.name)
def test_trains_what_plain_pytorch_does(example: Example, tmp_path: Path) -> None:
    example.require()
    plain = example.plain(tmp_path)
    alone = train(example, tmp_path, *EXACT, "--placement", "0:0")
    stages = train(example, tmp_path, *EXACT, *SYNC, *example.stages)
    print(f"{example.name}: one process {alone.difference(plain):.1e}, sync 1-1 {stages.difference(plain):.1e}")
    assert alone.difference(plain) < ROUNDING and stages.difference(plain) < ROUNDING
    if example is FINETUNE:  # its head alone
        torch.manual_seed(0)
        before = module("finetune.engine").make_model("vit-tiny", 2, None).state_dict()
        for after in (alone.state, stages.state):
            moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name].double())}
            assert moved == {"heads.head.weight", "heads.head.bias"}


def test_lag_is_as_the_reference_has_it(tmp_path: Path) -> None:
    """Two replicas of the first blocks lag one update behind the others."""
    script = module("images.engine")
    shapes = script.Shapes(SAMPLES, SIZE, 1)
    images, labels = default_collate([shapes[number] for number in range(SAMPLES)])
    per_epoch = SAMPLES // BATCH
    setup = reference.Setup(
        replicas=(2, 1),
        versions=(2, 1),
        batch=BATCH,
        microbatches=4,
        steps=per_epoch * EPOCHS,
        weight_decay=5e-4,
        label_smoothing=0.1,
        lr=lambda batch: 0.05 * (1 + math.cos(math.pi * (batch // per_epoch) / EPOCHS)) / 2,
    )
    result = reference.train(
        lambda: script.make_model(WIDTH), images, labels, lambda name: int(name[0] >= "2"), ["0", "2"], setup
    )
    expected = Trained(result.losses, result.weights | result.buffers)
    plan = ("--placement", "0:0-1.0:2", "--mode", "stale", "--cut", "2", "--microbatches", "4", "--emulate")
    found = train(IMAGES, tmp_path, *EXACT, *plan)
    print(f"images: stale 2-1 {found.difference(expected):.1e} from the reference")
    assert found.difference(expected) < ROUNDING < found.difference(IMAGES.plain(tmp_path))


def test_the_notebook_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated; with real ranks every night."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stagewright, "train", partial(stagewright.train, emulate=True))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook_cells():
        exec(cell, names)
    result = names["result"]
    assert len(result.evaluations) == 8 and result.evaluations[-1].metrics["right"] > 0.9
    assert "plan stale 1-1" in repr(result)
    weights = result.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in names["net"].state_dict().items())


def changed(script: str) -> tuple[int, int]:
    """How many lines of images/plain.py a script writes anew and removes, without blank ones and its docstring."""
    texts = [(EXAMPLES / "images" / name).read_text().split('"""', 2)[2] for name in ("plain.py", script)]
    lines = [line for line in difflib.ndiff(*(text.splitlines() for text in texts)) if line[2:].strip()]
    return sum(line.startswith("+ ") for line in lines), sum(line.startswith("- ") for line in lines)


def test_the_documents_have_the_lines_that_changed() -> None:
    ours, theirs = changed("engine.py"), changed("accelerated.py")
    print(f"lines of images/plain.py written and removed: {ours} by the engine, {theirs} by accelerate")
    for page in (ROOT / "docs" / "python.md", EXAMPLES / "README.md"):
        assert all(f"| {written} | {removed} |" in page.read_text() for written, removed in (ours, theirs)), page


def test_the_difference_in_the_readme_is_the_one_of_the_scripts() -> None:
    (shown,) = (block.text for block in blocks(ROOT / "README.md") if block.language == "diff")
    plain, engine = ((EXAMPLES / "images" / name).read_text().splitlines() for name in ("plain.py", "engine.py"))
    for line in shown.splitlines():
        assert line[0] == "+" or line[1:] in plain, line
        assert line[0] == "-" or line[1:] in engine, line
    assert len(shown.splitlines()) <= 25
