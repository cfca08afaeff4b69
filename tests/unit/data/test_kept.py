"""Images that are decoded once give the samples of those decoded anew, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import Normalization
from stagewright.data.loader import make_loaders
from stagewright.data.microbatches import Decode, Loading, Pieces, Share, Training
from stagewright.data.on_device import require_keepable
from stagewright.data.order import Order
from stagewright.data.sources import Bad, ImageSource
from tests.pictures import Faulty, encoded, jpeg, message, pixels, threads_called, write_parts

PLAIN = Normalization((0.0,) * 3, (1.0,) * 3)


def source(folder: Path, cropping: Cropping = Cropping.PADDED, jitter: float = 0.0, cutout: int = 0) -> ImageSource:
    png = encoded(Image.fromarray(pixels(5, 32, 32)), "PNG")
    images = [*(jpeg(index, 32, 32) for index in range(9)), png, jpeg(3, 32, 32)[:300], b""]
    parts = write_parts(folder, [[message(image, i % 5) for i, image in enumerate(images)]])
    return ImageSource(open_records(f"ofrecord:{parts}"), Augmentation(32, cropping, jitter, cutout), PLAIN)


@pytest.mark.parametrize("cutout", [0, 7, 32])
def test_the_samples_are_those_decoded_anew(cutout: int, tmp_path: Path) -> None:
    images = source(tmp_path, cutout=cutout)
    for share in (Share(Training(Order(12, 6, seed=3), 2), 1, 40), Share(Pieces(12, 5), 1, 3)):
        told: list[Bad] = []
        loading = Loading(threads=2, max_bad=9, tell=told.append)
        (kept,) = make_loaders(replace(loading, decode=Decode.ONCE), (images, share))
        (anew,) = make_loaders(replace(loading, tell=lambda bad: None), (images, share))
        for number in [*range(share.stop), 1]:
            (wanted, labels), (found, found_labels) = anew.microbatch(number), kept.microbatch(number)
            assert torch.equal(found, wanted) and torch.equal(found_labels, labels)
        assert [bad.index for bad in told] == [10, 11]
        kept.close()
        anew.close()


def test_each_record_is_read_once_and_threads_end_with_the_loader() -> None:
    before = threads_called("loader-")
    records = Faulty(12)
    images = ImageSource(records, Augmentation(24, Cropping.PADDED), PLAIN)
    share = Share(Training(Order(12, 6), 2), 1, 8)
    (kept,) = make_loaders(Loading(threads=2, decode=Decode.ONCE), (images, share))
    for number in range(8):  # two epochs
        kept.microbatch(number)
    assert sorted(records.reads) == list(range(12))
    assert threads_called("loader-") == before + 2
    kept.close()
    assert threads_called("loader-") == before


@pytest.mark.parametrize(
    ("cropping", "jitter", "message"),
    [
        (Cropping.RESIZED, 0.0, r"keeps whole images, but --crop is resized at 32 pixels; use --crop padded"),
        (Cropping.PADDED, 0.3, r"changes no colours, but --jitter is 0.3; leave one out"),
    ],
)
def test_what_can_not_be_kept_is_refused(cropping: Cropping, jitter: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        require_keepable(source(tmp_path, cropping, jitter))
