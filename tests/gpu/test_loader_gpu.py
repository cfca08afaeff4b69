"""Loading for a GPU: pinned batches, synthetic samples and nvJPEG crops equal those of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import NORMALIZATIONS
from stagewright.data.loader import make_loaders
from stagewright.data.order import Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import Decode, LoaderOptions
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


def test_pinned_batches_equal_those_of_the_cpu_for_many_rounds(source: ImageSource) -> None:
    (cpu,) = make_loaders(LoaderOptions(threads=2), (source, SLICE))
    (gpu,) = make_loaders(LoaderOptions(threads=2, ahead=1, device=torch.device("cuda")), (source, SLICE))
    assert source.allocate(2, is_pinned=True)[0].is_pinned()
    for number in range(40):
        (wanted, labels), (found, found_labels) = cpu.microbatch(number).values(), gpu.microbatch(number).values()
        assert found.is_cuda and torch.equal(found_labels.cpu(), labels)
        torch.testing.assert_close(found.cpu(), wanted)
    cpu.close()
    gpu.close()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_synthetic_samples_are_the_same_on_the_gpu(channels_last: bool, is_compiled: bool) -> None:
    here, there = SyntheticSource(100, 10, 30, 3), SyntheticSource(100, 10, 30, 3)
    there.to(torch.device("cuda"), channels_last=channels_last, is_compiled=is_compiled)
    (images, labels), (found, found_labels) = (source.batch(np.arange(20)).values() for source in (here, there))
    assert found.is_cuda and torch.equal(found_labels.cpu(), labels) and torch.equal(found.cpu(), images)
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_synthetic_samples_made_ahead_are_the_same_whatever_is_asked_for_next() -> None:
    (cpu,) = make_loaders(LoaderOptions(), (SyntheticSource(40, 10, 224, 3), SLICE))
    (gpu,) = make_loaders(LoaderOptions(device=torch.device("cuda")), (SyntheticSource(40, 10, 224, 3), SLICE))
    square = torch.ones(4096, 4096, device="cuda")
    kept = []
    for number in (*range(6), 20, 3, 4, 39, 38, 39):
        square = square @ square / square.norm()  # the device stays behind the host
        kept.append((number, gpu.microbatch(number)))
        if number == 4:
            gpu.close()
    for number, fields in kept:
        (wanted, labels), (found, found_labels) = cpu.microbatch(number).values(), fields.values()
        assert torch.equal(found.cpu(), wanted) and torch.equal(found_labels.cpu(), labels)
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
