"""Loaders on the device give the CPU's samples; here the device is the CPU, and libjpeg-turbo stands in for nvJPEG."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
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
from stagewright.data.formats.records import BadRecord, Record
from stagewright.data.loader import Loader, make_loaders
from stagewright.data.on_device import DeviceLoader, draw_view, require_cacheable, torchcodec_decoder
from stagewright.data.order import EvaluationSampler, Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import Decode, LoaderOptions
from stagewright.data.sources import ImageSource
from tests.pictures import Faulty, encoded, jpeg, message, pixels, threads_called, wait_until_idle, write_parts

PLAIN = Normalization((0.0,) * 3, (1.0,) * 3)  # so that inputs are levels of 0 to 255


def decode(batch: list[bytes]) -> list[Tensor]:
    return [torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1) for data in batch]


def loaders(source: ImageSource, part: ReplicaSlice, bad_records: list[BadRecord]) -> tuple[Loader, Loader]:
    options = LoaderOptions(threads=2, ahead=2, max_bad=9)
    (cpu,) = make_loaders(options, (source, part))
    return cpu, DeviceLoader(source, part, replace(options, on_bad=bad_records.append), decode)


@pytest.mark.parametrize("cropping", list(Cropping))
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_device_samples_equal_those_of_the_cpu(cropping: Cropping, jitter: float, tmp_path: Path) -> None:
    png = encoded(Image.fromarray(pixels(5)), "PNG")
    images = [*(jpeg(index, 40 + index, 60) for index in range(9)), png, jpeg(3)[:300], b""]
    records = open_records(
        f"ofrecord:{write_parts(tmp_path, [[message(image, i % 5) for i, image in enumerate(images)]])}"
    )
    source = ImageSource(records, Augmentation(24, cropping, jitter, cutout=9), PLAIN)
    for part in (
        ReplicaSlice(TrainingSampler(Order(12, 6, seed=3), 2), 1, 8),
        ReplicaSlice(EvaluationSampler(12, 5), 1, 3),
    ):
        bad_records: list[BadRecord] = []
        cpu, gpu = loaders(source, part, bad_records)
        for number in [*range(part.stop), 1]:
            (wanted, labels), (found, found_labels) = cpu.microbatch(number).values(), gpu.microbatch(number).values()
            assert found.shape == wanted.shape and torch.equal(found_labels, labels)
            assert (found - wanted).abs().max() <= (1 if not jitter else 3)
        assert {bad.index for bad in bad_records} == {10, 11}
        cpu.close()
        gpu.close()


def reading(records: Faulty, ahead: int) -> DeviceLoader:
    source = ImageSource(records, Augmentation(24, Cropping.PADDED), PLAIN)
    part = ReplicaSlice(TrainingSampler(Order(len(records), 7, shuffle=False), 1), 1, 10**9)
    return DeviceLoader(source, part, LoaderOptions(threads=2, ahead=ahead), decode)


def test_reads_ahead_by_a_bounded_number_and_allows_jumps() -> None:
    records = Faulty(100)
    loader = reading(records, ahead=3)
    for number, read in ((0, range(28)), (1, range(35))):
        loader.microbatch(number)
        wait_until_idle(records, len(read))
        assert sorted(records.reads) == list(read)
    for number in (4, 2):
        labels = loader.microbatch(number)["label"]
        assert labels.tolist() == [index % 10 for index in range(7 * number, 7 * number + 7)]
    loader.close()


def test_close_ends_the_threads_and_the_next_microbatch_starts_them() -> None:
    before = threads_called("reader")
    records = Faulty(1000)
    loader = reading(records, ahead=50)
    first = loader.microbatch(4)["image"]
    assert before < threads_called("reader") <= before + 2  # a thread that is idle may take the next task
    loader.close()
    assert threads_called("reader") == before
    again = loader.microbatch(4)["image"]
    assert torch.equal(first, again)
    loader.close()


def test_close_cancels_queued_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, resume, cancelled = threading.Event(), threading.Event(), threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def noted(self: ThreadPoolExecutor) -> None:
        cancelled.set()
        shutdown(self)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", noted)

    class Slow(Faulty):
        def get(self, index: int) -> Record:
            if index >= 7:
                begun.set()
                resume.wait()
            return super().get(index)

    records = Slow(200)
    loader = reading(records, ahead=9)
    loader.microbatch(0)
    begun.wait()
    closing = threading.Thread(target=loader.close)
    closing.start()
    cancelled.wait()
    resume.set()
    closing.join()
    assert set(records.reads) <= set(range(21))  # two threads, a microbatch each


def test_out_of_memory_is_not_a_bad_record() -> None:
    def full(batch: list[bytes]) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    source = ImageSource(Faulty(10), Augmentation(24, Cropping.PADDED), PLAIN)
    loader = DeviceLoader(source, ReplicaSlice(EvaluationSampler(10, 5), 1, 2), LoaderOptions(), full)
    with pytest.raises(torch.OutOfMemoryError):
        loader.microbatch(0)
    loader.close()


def test_device_views_equal_those_of_the_cpu() -> None:
    image = pixels(1, 50, 70)
    for augmentation in (Augmentation(32, Cropping.RESIZED), Augmentation(32, Cropping.PADDED)):
        views = [augmentation.training_view(0, 0, index, 50, 70) for index in range(20)]
        views.append(augmentation.evaluation_view(50, 70))
        for view in views:
            target = torch.zeros(32, 32, 3, dtype=torch.uint8)
            render(image, view, target)
            found = draw_view(torch.from_numpy(image).permute(2, 0, 1), view, 32)
            assert np.abs(found.numpy().astype(int) - target.numpy()).max() <= 1


def test_decoding_on_the_gpu_needs_torchcodec() -> None:
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        with pytest.raises(ValueError, match=r"needs torchcodec .* use --decode cpu"):
            torchcodec_decoder(torch.device("cuda"))


def cacheable(folder: Path, cropping: Cropping = Cropping.PADDED, cutout: int = 0) -> ImageSource:
    png = encoded(Image.fromarray(pixels(5, 32, 32)), "PNG")
    images = [*(jpeg(index, 32, 32) for index in range(9)), png, jpeg(3, 32, 32)[:300], b""]
    parts = write_parts(folder, [[message(image, i % 5) for i, image in enumerate(images)]])
    return ImageSource(open_records(f"ofrecord:{parts}"), Augmentation(32, cropping, 0.0, cutout), PLAIN)


@pytest.mark.parametrize("cutout", [0, 7, 32])
def test_cached_samples_equal_those_decoded_anew(cutout: int, tmp_path: Path) -> None:
    images = cacheable(tmp_path, cutout=cutout)
    for part in (
        ReplicaSlice(TrainingSampler(Order(12, 6, seed=3), 2), 1, 40),
        ReplicaSlice(EvaluationSampler(12, 5), 1, 3),
    ):
        bad_records: list[BadRecord] = []
        options = LoaderOptions(threads=2, max_bad=9, on_bad=bad_records.append)
        (cached,) = make_loaders(replace(options, decode=Decode.ONCE), (images, part))
        (uncached,) = make_loaders(replace(options, on_bad=lambda bad: None), (images, part))
        for number in [*range(part.stop), 1]:
            (wanted, labels), (found, found_labels) = (
                uncached.microbatch(number).values(),
                cached.microbatch(number).values(),
            )
            assert torch.equal(found, wanted) and torch.equal(found_labels, labels)
        assert [bad.index for bad in bad_records] == [10, 11]
        cached.close()
        uncached.close()


def test_caching_reads_each_record_once_and_close_ends_the_threads() -> None:
    before = threads_called("loader-")
    records = Faulty(12)
    images = ImageSource(records, Augmentation(24, Cropping.PADDED), PLAIN)
    part = ReplicaSlice(TrainingSampler(Order(12, 6), 2), 1, 8)
    (cached,) = make_loaders(LoaderOptions(threads=2, decode=Decode.ONCE), (images, part))
    for number in range(8):  # two epochs
        cached.microbatch(number)
    assert sorted(records.reads) == list(range(12))
    assert threads_called("loader-") == before + 2
    cached.close()
    assert threads_called("loader-") == before


def test_refuses_to_cache_what_is_cropped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"caches whole images, but --crop is resized at 32 pixels; use --crop padded"):
        require_cacheable(cacheable(tmp_path, Cropping.RESIZED))
