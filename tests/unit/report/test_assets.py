"""The colours of a page can be told apart, also by people with colour blindness, in light and in dark."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

KINDS = ("forward", "backward", "update", "evaluation", "transfer", "reduce", "waiting", "checkpoint")
SEEN = {  # what is left of linear red, green and blue: Machado, Oliveira and Fernandes, 2009, severity 1
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def palettes() -> dict[str, dict[str, str]]:
    style = (files("stagewright.report") / "assets" / "page.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part)) for part in style.split("@media", 2)[:2])
    return {"light": light, "dark": light | dark}


def linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def as_seen(colour: str, matrix: tuple[tuple[float, ...], ...]) -> list[float]:
    red, green, blue = linear(colour)
    return [min(1.0, max(0.0, row[0] * red + row[1] * green + row[2] * blue)) for row in matrix]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    rows = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.072175), (0.0193339, 0.119192, 0.9503041))
    white = (0.95047, 1.0, 1.08883)
    shares = [
        sum(part * value for part, value in zip(row, rgb, strict=True)) / w for row, w in zip(rows, white, strict=True)
    ]
    x, y, z = (share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("eyes", SEEN)
def test_the_kinds_of_a_timeline_differ_in_colour(scheme: str, eyes: str) -> None:
    palette = palettes()[scheme]
    for one, other in itertools.combinations(KINDS, 2):
        first, second = (lab(as_seen(palette[name], SEEN[eyes])) for name in (one, other))
        away = sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5
        assert away > 18, (one, other, away)  # a difference of 2.3 is just seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme: str) -> None:
    palette = palettes()[scheme]
    for text, back in itertools.product(("ink", "soft", "accent"), ("back", "surface", "summary")):
        assert contrast(palette[text], palette[back]) >= 4.5, (text, back)
    for line in ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"):
        assert contrast(palette[line], palette["surface"]) >= 2.8, line
