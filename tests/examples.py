"""The scripts of examples/, small: trained by the engine in this process, or as plain PyTorch trains the same batches.

Both sides are in fp64 and take the samples in one order, so that they differ by rounding alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import stagewright
from stagewright.cli.main import main
from stagewright.model.networks import zoo
from stagewright.model.networks.libraries import import_library, is_installed
from stagewright.run.script import OPTIONS

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EXACT = ("--precision", "fp64", "--set", "data.shuffle=false", "--monitor-every", "0")
BATCH = 8
ROUNDING = 1e-10  # of fp64, through AdamW's quotients


@dataclass(frozen=True)
class Trained:
    """What a run leaves: the loss of every batch, and the weights and buffers by name."""

    losses: list[float]
    state: dict[str, Tensor]

    def difference(self, other: Trained) -> float:
        """The largest difference of losses and state, each relative to the largest number of its tensor."""
        assert self.state.keys() == other.state.keys() and len(self.losses) == len(other.losses) > 0
        pairs = [(torch.tensor(self.losses), torch.tensor(other.losses))]
        pairs += [(self.state[name].double(), other.state[name].double()) for name in self.state]
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


@dataclass(frozen=True)
class Example:
    """A script with arguments that make it small, and what plain PyTorch makes of the same."""

    name: str
    arguments: Callable[[Path], tuple[str, ...]]  # of a folder for its files
    plain: Callable[[Path], Trained]
    stages: tuple[str, ...]  # how to make two stages of it

    @property
    def script(self) -> Path:
        return EXAMPLES / self.name / "engine.py"

    def require(self) -> None:
        """Skip the test where what the script imports is not installed."""
        if self is TEXT:
            if not is_installed("transformers"):
                pytest.skip("transformers is not installed")
            import_library("transformers")


def train(example: Example, folder: Path, *options: str) -> Trained:
    """Train an example in this process, by `stagewright run`; its own output is in the folder."""
    engines: list[stagewright.Engine] = []

    class Kept(stagewright.Engine):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            engines.append(self)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("excepthook", sys.excepthook), ("argv", []), ("path", [*sys.path])):
            patch.setattr(sys, name, value)
        patch.setenv(OPTIONS, "{}")
        patch.setattr(stagewright, "Engine", Kept)
        arguments = (*example.arguments(folder), "--weights", str(folder / "weights.safetensors"))
        main(["run", str(example.script), *options, "--runs", str(folder / "runs"), "--", *arguments])
        (engine,) = engines
        state = load_file(engine.save(folder / "last.safetensors"))
        engine.close()
    return Trained(losses_of(engine.folder), state)


def losses_of(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


def notebook_cells() -> list[str]:
    """The code of the notebook, cell by cell."""
    cells = json.loads((EXAMPLES / "notebook" / "train.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


# --- Plain PyTorch ----------------------------------------------------------------------------------------------------

LossOf = Callable[[nn.Module, Any], Tensor]
Order = Callable[[int, int], Sequence[int]]  # of an epoch and a number of samples


def as_they_are(epoch: int, samples: int) -> Sequence[int]:
    return range(samples)


def train_plainly(
    model: nn.Module,
    data: Any,
    loss_of: LossOf,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    clip: float | None = None,
    after: Callable[[], object] = lambda: None,
    order: Order = as_they_are,
) -> Trained:
    """A loop of plain PyTorch over whole batches."""
    model.double().train()
    losses = []
    for epoch in range(epochs):
        for batch in batches(data, order(epoch, len(data))):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            after()
            losses.append(loss.item())
    return Trained(losses, dict(model.state_dict()))


def batches(data: Any, order: Sequence[int]) -> Iterator[Any]:
    for first in range(0, len(order) - BATCH + 1, BATCH):
        yield doubled(default_collate([data[index] for index in order[first : first + BATCH]]))


def doubled(batch: Any) -> Any:
    """A batch with its floating-point numbers in double precision."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {name: doubled(value) for name, value in batch.items()}
    return [doubled(value) for value in batch]


def module(name: str) -> Any:
    return importlib.import_module(f"examples.{name}")


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# --- Images -----------------------------------------------------------------------------------------------------------

SAMPLES, SIZE, WIDTH, EPOCHS = 48, 12, 4, 2


def image_arguments(folder: Path) -> tuple[str, ...]:
    numbers = {"samples": SAMPLES, "size": SIZE, "width": WIDTH, "batch": BATCH, "epochs": EPOCHS}
    return tuple(word for name, number in numbers.items() for word in (f"--{name}", str(number)))


def plain_images(folder: Path) -> Trained:
    """`plain.py` itself, with its data in order and in double precision."""
    losses: list[float] = []
    models: list[nn.Module] = []

    def load(data: Any, batch: int, shuffle: bool = False, drop_last: bool = False) -> Any:
        return DataLoader(data, batch, drop_last=drop_last, collate_fn=lambda few: doubled(default_collate(few)))

    def make_model(width: int) -> nn.Module:
        models.append(original(width).double())
        return models[-1]

    def criterion(label_smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(outputs: Tensor, labels: Tensor) -> Tensor:
            made = nn.functional.cross_entropy(outputs, labels, label_smoothing=label_smoothing)
            losses.append(made.item())
            return made

        return loss

    script = module("images.plain")
    original = script.make_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "DataLoader", load)
        patch.setattr(script, "make_model", make_model)
        patch.setattr(script.nn, "CrossEntropyLoss", criterion)
        patch.setattr(sys, "argv", ["plain.py", *image_arguments(folder), "--weights", os.devnull])
        patch.setattr(script, "save_file", lambda state, file: None)
        script.main()
    return Trained(losses, dict(models[0].state_dict()))


# --- Photos, reviews and text -----------------------------------------------------------------------------------------


def photo_arguments(folder: Path) -> tuple[str, ...]:
    """Two colours of photos, twelve of each, a fourth of which are held back."""
    photos = folder / "photos"
    for name, colour in (("blue", (40, 40, 200)), ("red", (200, 40, 40))):
        (photos / name).mkdir(parents=True, exist_ok=True)
        for number in range(12):
            pixels = tuple(part + 4 * number for part in colour)
            Image.new("RGB", (30 + number, 40), pixels).save(photos / name / f"{number:02}.png")
    return (str(photos), "--model", "vit-tiny", "--batch", str(BATCH), "--epochs", "1", "--lr", "0.001")


def plain_photos(folder: Path) -> Trained:
    script = module("finetune.engine")
    photo_arguments(folder)
    torch.manual_seed(0)
    photos = script.Photos(folder / "photos", 32)
    held_in = [photos[number] for number in range(len(photos)) if number % 4]
    model = script.make_model("vit-tiny", 2, None).double()
    optimizer = torch.optim.AdamW(trained(model), lr=0.001, weight_decay=0.01)
    return train_plainly(model, held_in, pair_loss, optimizer, epochs=1)


def pair_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


REVIEWS = {"samples": 32, "tokens": 6, "vocabulary": 40, "width": 16, "depth": 2, "epochs": 1}


def review_arguments(folder: Path) -> tuple[str, ...]:
    numbers = REVIEWS | {"batch": BATCH, "dropout": 0}
    return tuple(word for name, number in numbers.items() for word in (f"--{name}", str(number)))


def plain_reviews(folder: Path) -> Trained:
    script = module("text.engine")
    torch.manual_seed(0)
    data = script.Reviews(REVIEWS["samples"], REVIEWS["tokens"], REVIEWS["vocabulary"], 1)
    model = script.make_model(*(REVIEWS[name] for name in ("width", "depth", "tokens", "vocabulary")), 0.0).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    return train_plainly(model, data, lambda net, batch: net(**batch).loss, optimizer, epochs=1, clip=1.0)


TEXT_EPOCHS, WARMUP = 2, 3


def gpt_arguments(folder: Path) -> tuple[str, ...]:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}. " for number in range(90)))
    return (str(text), "--model", "gpt-micro", "--batch", str(BATCH), "--epochs", str(TEXT_EPOCHS), "--warmup", "3")


def plain_gpt(folder: Path, order: Order = as_they_are) -> Trained:
    script = module("gpt.engine")
    gpt_arguments(folder)
    torch.manual_seed(0)
    model = zoo.build("gpt-micro").double()
    pieces = script.Bytes(folder / "text.txt", 64)
    held_in = [pieces[number] for number in range(len(pieces)) if number % 10]
    optimizer = script.make_optimizer(list(model.named_parameters()), lr=0.001)
    scheduler = script.make_scheduler(optimizer, WARMUP, len(held_in) // BATCH * TEXT_EPOCHS)

    def loss_of(net: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())

    return train_plainly(model, held_in, loss_of, optimizer, TEXT_EPOCHS, 1.0, scheduler.step, order)


# BatchNorm's statistics are of a microbatch, so only whole batches are as in plain PyTorch.
IMAGES = Example("images", image_arguments, plain_images, ("--cut", "2", "--microbatches", "1"))
FINETUNE = Example("finetune", photo_arguments, plain_photos, ("--cut", "encoder.layers.encoder_layer_1"))
TEXT = Example("text", review_arguments, plain_reviews, ("--cut", "bert.encoder.layer.1"))
GPT = Example("gpt", gpt_arguments, plain_gpt, ("--cut", "h.1"))
ALL = (IMAGES, FINETUNE, TEXT, GPT)
