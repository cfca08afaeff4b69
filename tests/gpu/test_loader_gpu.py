"""Loading for a GPU: pinned batches, synthetic samples and nvJPEG crops equal those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import NORMALIZATIONS
from stagewright.data.formats.fields import Fields
from stagewright.data.loader import CudaCopies, make_loaders
from stagewright.data.order import Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import Batch, Decode, LoaderOptions, arrive
from stagewright.data.processes import ProcessPool
from stagewright.data.sources import ImageSource
from stagewright.data.synthetic import SyntheticSource
from tests.pictures import make_ofrecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; run on a machine with a GPU"),
]
SLICE = ReplicaSlice(TrainingSampler(Order(40, 20, seed=1), 2), 1, 40)


@pytest.fixture
def source(tmp_path: Path) -> ImageSource:
    records = open_records(f"ofrecord:{make_ofrecord(tmp_path, 40)}")
    return ImageSource(records, Augmentation(32, Cropping.RESIZED), NORMALIZATIONS["imagenet"])


def used(fields: Fields) -> Fields:
    """What a later kernel reads of a microbatch that is freed at once, on a device that is behind the host.

    A copy to the GPU for which that kernel does not wait, or memory that a later microbatch takes over before it, gives
    other numbers.
    """
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(4):
        square = square @ square / square.norm()
    return {name: tensor.clone() for name, tensor in fields.items()}


@pytest.mark.parametrize("image_workers", [0, 2])
def test_pinned_batches_equal_those_of_the_cpu_for_many_rounds(image_workers: int, source: ImageSource) -> None:
    options = LoaderOptions(threads=2, ahead=1, device=torch.device("cuda"), image_workers=image_workers)
    (cpu,), (gpu,) = (make_loaders(one, (source, SLICE)) for one in (LoaderOptions(threads=2), options))
    assert all(memory.is_pinned() for memory in source.allocate(2, is_pinned=True))
    for _ in range(2):  # the second time in workers that start after memory was pinned
        kept = [(cpu.microbatch(number), used(gpu.microbatch(number))) for number in (*range(40), 7, 8, 3)]
        for wanted, found in kept:
            assert found["image"].is_cuda and torch.equal(found["label"].cpu(), wanted["label"])
            torch.testing.assert_close(found["image"].cpu(), wanted["image"])
        cpu.close()
        gpu.close()


def test_memory_of_workers_is_pinned(source: ImageSource) -> None:
    pool = ProcessPool(1)
    (buffers,) = pool.reserve(source, 4, 1)
    batch = Batch(np.arange(4), None, buffers)
    pool.submit(batch, source.load)
    pool.wait(batch)
    copies = CudaCopies(torch.device("cuda"))
    fields, made = copies.begin(batch, lambda images, labels: {"image": images, "label": labels})
    assert buffers.images.is_pinned() and buffers.labels.is_pinned()
    arrive(fields, made)
    assert torch.equal(fields["image"].cpu(), buffers.images) and torch.equal(fields["label"].cpu(), buffers.labels)
    pool.close()
    assert not buffers.images.is_pinned()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_synthetic_samples_are_the_same_on_the_gpu(channels_last: bool, is_compiled: bool) -> None:
    here, there = SyntheticSource(100, 10, 30, 3), SyntheticSource(100, 10, 30, 3)
    there.to(torch.device("cuda"), channels_last=channels_last, is_compiled=is_compiled)
    (images, labels), (found, found_labels) = (source.batch(np.arange(20)).values() for source in (here, there))
    assert found.is_cuda and torch.equal(found_labels.cpu(), labels) and torch.equal(found.cpu(), images)
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"dtype": torch.float16, "is_compiled": True}])
def test_synthetic_samples_made_ahead_are_the_same_whatever_is_asked_for_next(options: dict[str, Any]) -> None:
    dtype = options.get("dtype", torch.float32)
    (cpu,) = make_loaders(LoaderOptions(dtype), (SyntheticSource(40, 10, 224, 3), SLICE))
    there = LoaderOptions(device=torch.device("cuda"), **options)
    (gpu,) = make_loaders(there, (SyntheticSource(40, 10, 224, 3), SLICE))
    kept = []
    for number in (*range(6), 20, 3, 4, 39, 38, 39):
        kept.append((number, used(gpu.microbatch(number))))
        if number == 4:
            gpu.close()
    for number, fields in kept:
        (wanted, labels), (found, found_labels) = cpu.microbatch(number).values(), fields.values()
        assert found.dtype is dtype and torch.equal(found.cpu(), wanted) and torch.equal(found_labels.cpu(), labels)
    gpu.close()


def test_nvjpeg_decodes_the_same_crops(source: ImageSource) -> None:
    try:
        from torchcodec.decoders import decode_jpeg  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"torchcodec can't be used here: {error}")
    (cpu,) = make_loaders(LoaderOptions(), (source, SLICE))
    (gpu,) = make_loaders(LoaderOptions(device=torch.device("cuda"), decode=Decode.GPU), (source, SLICE))
    for number in range(6):
        (wanted, labels), (found, found_labels) = cpu.microbatch(number).values(), gpu.microbatch(number).values()
        assert torch.equal(found_labels.cpu(), labels)
        assert (found.cpu() - wanted).abs().mean() < 0.05  # about three levels of 255
    cpu.close()
    gpu.close()
