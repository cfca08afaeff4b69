"""Fine-tunes a vision transformer on a folder of photos, FOLDER/CLASS/NAME.jpg: its trunk is frozen, a new head trains.

Start from weights: any file of torchvision's for the model, as safetensors.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import stagewright
from stagewright.model.networks import zoo

MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
HELD_BACK = 4  # each fourth photo is for evaluation


class Photos(Dataset[tuple[Tensor, int]]):
    """Photos as squares of `size` pixels, with the number of their class."""

    def __init__(self, folder: Path, size: int) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [path for name in self.classes for path in sorted((folder / name).iterdir())]
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        with Image.open(file) as image:
            square = image.convert("RGB").resize((self.size, self.size))
        pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(self.size, self.size, 3)
        return ((pixels / 255 - MEAN) / DEVIATION).permute(2, 0, 1), self.classes.index(file.parent.name)


def make_model(name: str, classes: int, weights: str | None) -> nn.Module:
    """A model of the zoo with a new head, which alone is trained."""
    model = zoo.build(name, classes)
    if weights is not None:
        trunk = {key: tensor for key, tensor in load_file(weights).items() if not key.startswith("heads.")}
        model.load_state_dict(trunk, strict=False)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.startswith("heads."))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="vit_b_16", choices=["vit_b_16", "vit_tiny_16", "vit-tiny"])
    parser.add_argument("--init", help="weights to start from")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weights", default="finetuned.safetensors", help="file for the trained weights")
    parser.add_argument("--plan", help="a plan file, or auto: the fastest plan for this machine")
    args = parser.parse_args()

    torch.manual_seed(0)
    photos = Photos(args.folder, zoo.ZOO[args.model].image)
    held_back = set(range(0, len(photos), HELD_BACK))
    train_set = torch.utils.data.Subset(photos, [n for n in range(len(photos)) if n not in held_back])
    val_set = torch.utils.data.Subset(photos, sorted(held_back))
    model = make_model(args.model, len(photos.classes), args.init)
    adamw = partial(torch.optim.AdamW, lr=args.lr, weight_decay=0.01)
    engine = stagewright.Engine(model, loss=nn.CrossEntropyLoss(), optimizer=adamw, plan=args.plan)
    for epoch in range(args.epochs):
        for _ in engine.epoch(train_set, args.batch):
            pass
        found = engine.evaluate(val_set, "top1")
        if engine.is_main:
            print(f"epoch {epoch}: loss {found.loss:.3f}, top1 {found.metrics['top1']:.1%}")
    engine.save(args.weights)


if __name__ == "__main__":
    main()
