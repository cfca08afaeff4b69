"""Every fault of an image folder at once: what stock loaders can show is shown, the rest is named and replaced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import Normalization
from stagewright.data.loader import make_loaders
from stagewright.data.microbatches import Loading, Pieces, Share
from stagewright.data.sources import Bad, ImageSource
from tests.pictures import encoded, jpeg, pillow, pixels
from tests.unit.data.test_folder import make_folder

SIDE = 32


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return jpeg(4, SIDE, SIDE, exif=exif.tobytes())


FILES = {
    "0/a-good.jpg": jpeg(0, SIDE, SIDE),
    "0/b-truncated.jpg": jpeg(1, SIDE, SIDE)[:-60],
    "0/c-png-inside.jpg": encoded(Image.fromarray(pixels(2, SIDE, SIDE)), "PNG"),
    "1/d-cmyk.jpg": jpeg(3, SIDE, SIDE, mode="CMYK"),
    "1/e-rotated.jpg": rotated(),
    "1/f-zero-bytes.jpg": b"",
    "2/g-grey.jpg": jpeg(5, SIDE, SIDE, mode="L"),
    "2/h-text.jpg": b"this is no image",
}


def test_a_folder_of_faults(tmp_path: Path) -> None:
    text = make_folder(tmp_path, FILES)
    (tmp_path / "2/i-unreadable.jpg").symlink_to(tmp_path / "nowhere")
    plain = Normalization((0.0,) * 3, (1.0,) * 3)
    source = ImageSource(open_records(text), Augmentation(SIDE, Cropping.PADDED), plain)
    told: list[Bad] = []
    (loader,) = make_loaders(Loading(threads=2, max_bad=4, tell=told.append), (source, Share(Pieces(9, 9), 1, 1)))
    images, labels = loader.microbatch(0)
    loader.close()
    names = sorted(FILES)
    shown = [0, 2, 2, 3, 4, 6, 6, 0, 0]  # whose picture each of the nine shows
    assert labels.tolist() == [int(names[index][0]) for index in shown]
    for image, index in zip(images, shown, strict=True):
        expected = pillow(FILES[names[index]])
        assert np.abs(image.permute(1, 2, 0).numpy() - expected).max() <= 1
    assert [bad.index for bad in told] == [1, 5, 7, 8]
    for bad, words in zip(told, ("no whole JPEG", "is empty", "no image", "No such file"), strict=True):
        assert words in bad.reason and str(tmp_path) in bad.reason
    assert images.dtype == torch.float32
