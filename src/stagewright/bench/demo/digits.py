"""Images of digits, drawn here so that an accuracy means something without a download.

Each is one of ten glyphs, turned, scaled, sheared and moved at random, in random colours under noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

CLASSES = 10
SIDE = 32
_NOISE = 0.35
_GLYPHS = (
    ".###.#...##..###.#.###..##...#.###.",
    "..#...##..#.#....#....#....#..#####",
    ".###.#...#....#...#...#...#...#####",
    "####.....#....#.###.....#....#####.",
    "...#...##..#.#.#..#.#####...#....#.",
    "######....####.....#....##...#.###.",
    ".###.#....#....####.#...##...#.###.",
    "#####....#...#...#...#....#....#...",
    ".###.#...##...#.###.#...##...#.###.",
    ".###.#...##...#.####....#....#.###.",
)


def draw_digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 32, 32) and their labels; the same seed draws the same."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    glyphs = torch.tensor([[float(dot == "#") for dot in glyph] for glyph in _GLYPHS]).view(CLASSES, 1, 7, 5)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle, shear, size = uniform(-0.25, 0.25), uniform(-0.25, 0.25), uniform(1.0, 1.4)
    rows = torch.stack(
        [
            torch.stack([1.4 * size * angle.cos(), size * (shear - angle.sin()), uniform(-0.4, 0.4)], 1),
            torch.stack([size * angle.sin(), size * angle.cos(), uniform(-0.3, 0.3)], 1),
        ],
        1,
    )
    grid = functional.affine_grid(rows, [count, 1, SIDE, SIDE], align_corners=False)
    ink = functional.grid_sample(glyphs[labels], grid, align_corners=False)
    paper, pen = uniform(-1, -0.2, 3, 1, 1), uniform(0.2, 1, 3, 1, 1)
    noise = _NOISE * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return paper + (pen - paper) * ink + noise, labels


def uncertainty(accuracy: float, count: int) -> float:
    """The half-width of a 95 % interval of an accuracy over so many images."""
    return 1.96 * math.sqrt(max(accuracy * (1 - accuracy), 1 / count) / count)
