"""Decoding on the device gives the CPU's samples; here the device is the CPU and libjpeg-turbo plays the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.device import DeviceLoader, draw_view, require_decoder
from stagewright.data.images import Bad, ImageSource
from stagewright.data.loader import Loader, make_loaders
from stagewright.data.loading import Loading
from stagewright.data.normalize import Normalization
from stagewright.data.numbering import Pieces, Share, Training
from stagewright.data.order import Order
from stagewright.data.render import render
from tests.pictures import encoded, jpeg, message, pixels, write_parts

PLAIN = Normalization((0.0,) * 3, (1.0,) * 3)  # so that inputs are levels of 0 to 255


def decode(batch: list[bytes]) -> list[Tensor]:
    return [torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1) for data in batch]


def loaders(source: ImageSource, share: Share, told: list[Bad]) -> tuple[Loader, Loader]:
    loading = Loading(threads=2, ahead=2, max_bad=9)
    (cpu,) = make_loaders(loading, (source, share))
    return cpu, DeviceLoader(source, share, replace(loading, tell=told.append), decode)


@pytest.mark.parametrize("cropping", list(Cropping))
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_the_samples_are_those_of_the_cpu(cropping: Cropping, jitter: float, tmp_path: Path) -> None:
    png = encoded(Image.fromarray(pixels(5)), "PNG")
    images = [*(jpeg(index, 40 + index, 60) for index in range(9)), png, jpeg(3)[:300], b""]
    records = open_records(
        f"ofrecord:{write_parts(tmp_path, [[message(image, i % 5) for i, image in enumerate(images)]])}"
    )
    source = ImageSource(records, Augmentation(24, cropping, jitter, cutout=9), PLAIN)
    for share in (Share(Training(Order(12, 6, seed=3), 2), 1, 8), Share(Pieces(12, 5), 1, 3)):
        told: list[Bad] = []
        cpu, gpu = loaders(source, share, told)
        for number in [*range(share.stop), 1]:
            (wanted, labels), (found, found_labels) = cpu.microbatch(number), gpu.microbatch(number)
            assert found.shape == wanted.shape and torch.equal(found_labels, labels)
            assert (found - wanted).abs().max() <= (1 if not jitter else 3)
        assert {bad.index for bad in told} == {10, 11}
        cpu.close()
        gpu.close()


def test_views_are_drawn_as_on_the_cpu() -> None:
    image = pixels(1, 50, 70)
    for augmentation in (Augmentation(32, Cropping.RESIZED), Augmentation(32, Cropping.PADDED)):
        views = [augmentation.training(0, 0, index, 50, 70) for index in range(20)] + [augmentation.evaluation(50, 70)]
        for view in views:
            target = torch.zeros(32, 32, 3, dtype=torch.uint8)
            render(image, view, target)
            found = draw_view(torch.from_numpy(image).permute(2, 0, 1), view, 32)
            assert np.abs(found.numpy().astype(int) - target.numpy()).max() <= 1


def test_without_a_gpu_or_torchcodec_the_error_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="--decode gpu needs --device cuda, but the device is cpu; use --decode cpu"):
        require_decoder("gpu", "cpu")
    require_decoder("cpu", "cpu")
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        with pytest.raises(ValueError, match=r"needs torchcodec .* use --decode cpu"):
            require_decoder("gpu", "cuda")
