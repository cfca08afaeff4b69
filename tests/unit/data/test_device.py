"""Decoding on the device gives the CPU's samples; here the device is the CPU and libjpeg-turbo plays the GPU."""

from __future__ import annotations

import threading
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
from stagewright.data.decode import Normalization, render
from stagewright.data.loader import Loader, make_loaders
from stagewright.data.microbatches import Loading, Pieces, Share, Training
from stagewright.data.on_device import DeviceLoader, draw_view, require_decoder
from stagewright.data.order import Order
from stagewright.data.records import Record
from stagewright.data.sources import Bad, ImageSource
from tests.pictures import Faulty, encoded, jpeg, message, pixels, settled, threads_called, write_parts

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


def reading(records: Faulty, ahead: int) -> DeviceLoader:
    source = ImageSource(records, Augmentation(24, Cropping.PADDED), PLAIN)
    share = Share(Training(Order(len(records), 7, shuffle=False), 1), 1, 10**9)
    return DeviceLoader(source, share, Loading(threads=2, ahead=ahead), decode)


def test_it_reads_ahead_by_a_bounded_number_and_jumps() -> None:
    records = Faulty(100)
    loader = reading(records, ahead=3)
    for number, read in ((0, range(28)), (1, range(35))):
        loader.microbatch(number)
        settled(records)
        assert sorted(records.reads) == list(read)
    for number in (4, 2):
        _, labels = loader.microbatch(number)
        assert labels.tolist() == [index % 10 for index in range(7 * number, 7 * number + 7)]
    loader.close()


def test_threads_end_with_the_loader_and_start_again() -> None:
    before = threads_called("reader")
    records = Faulty(1000)
    loader = reading(records, ahead=50)
    first, _ = loader.microbatch(4)
    assert threads_called("reader") == before + 2
    loader.close()
    assert threads_called("reader") == before
    again, _ = loader.microbatch(4)
    assert torch.equal(first, again)
    loader.close()


def test_what_is_left_to_read_is_not_read_after_a_close() -> None:
    begun, going_on = threading.Event(), threading.Event()

    class Slow(Faulty):
        def get(self, index: int) -> Record:
            if index >= 7:
                begun.set()
                going_on.wait()
            return super().get(index)

    records = Slow(200)
    loader = reading(records, ahead=9)
    loader.microbatch(0)
    begun.wait()
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(0.1)
    going_on.set()
    closing.join()
    assert set(records.reads) <= set(range(21))  # two threads, a microbatch each


def test_a_device_without_memory_is_no_bad_record() -> None:
    def full(batch: list[bytes]) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    source = ImageSource(Faulty(10), Augmentation(24, Cropping.PADDED), PLAIN)
    loader = DeviceLoader(source, Share(Pieces(10, 5), 1, 2), Loading(), full)
    with pytest.raises(torch.OutOfMemoryError):
        loader.microbatch(0)
    loader.close()


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
