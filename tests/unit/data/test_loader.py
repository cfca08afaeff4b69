"""The stream of samples is one sequence: threads, replicas, stops and resumes do not change it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import NORMALIZATIONS, Decoder
from stagewright.data.formats.records import BadRecord, DataError, Limited, Record
from stagewright.data.loader import ImageLoader, make_loaders
from stagewright.data.order import (
    AugmentSeed,
    DataChanged,
    EvaluationSampler,
    Order,
    Position,
    ReplicaSlice,
    TrainingSampler,
)
from stagewright.data.pool import LoaderOptions, Pool
from stagewright.data.sources import ImageSource
from stagewright.metrics import MIB
from tests.marks import nightly
from tests.pictures import Faulty, make_ofrecord, threads_called, wait_until_idle

SAMPLES, BATCH, MICROBATCHES, SEED = 53, 12, 4, 11
ORDER = Order(SAMPLES, BATCH, SEED)
TRAINING = TrainingSampler(ORDER, MICROBATCHES)
EPOCH = ORDER.batches * MICROBATCHES


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ImageSource:
    root = make_ofrecord(tmp_path_factory.mktemp("data"), SAMPLES)
    return ImageSource(
        open_records(f"ofrecord:{root}"), Augmentation(24, Cropping.RESIZED, jitter=0.2), NORMALIZATIONS["imagenet"]
    )


Sample = tuple[int, object, int, bytes]  # index, view, label, pixels


def stream(source: ImageSource, numbers: Iterable[int], threads: int, step: int = 1, ahead: int = 3) -> list[Sample]:
    """The samples of some microbatches, as one loader gives them."""
    part = ReplicaSlice(TRAINING, step, 3 * EPOCH)
    loader = ImageLoader(source, part, LoaderOptions(threads=threads, ahead=ahead), Pool(threads))
    found = []
    for number in numbers:
        images, labels = loader.pixels(number)
        seed = TRAINING.augment_seed(number)
        for row, index in enumerate(TRAINING.indices(number)):
            view = source.augmentation.training_view(seed.seed, seed.epoch, int(index), 40, 48)
            found.append((int(index), view, int(labels[row]), images[row].numpy().tobytes()))
    loader.close()
    return found


@pytest.fixture(scope="module")
def expected(source: ImageSource) -> list[Sample]:
    """Two epochs and a bit, one sample at a time in one thread, without a loader."""
    found, decoder = [], Decoder()
    for number in range(2 * EPOCH + 5):
        epoch, position = divmod(number // MICROBATCHES, ORDER.batches)
        shuffled = np.random.Generator(np.random.Philox(key=np.array([SEED, epoch], np.uint64))).permutation(SAMPLES)
        first = position * BATCH + number % MICROBATCHES * (BATCH // MICROBATCHES)
        for index in map(int, shuffled[first : first + BATCH // MICROBATCHES]):
            target, label = torch.zeros(24, 24, 3, dtype=torch.uint8), torch.tensor(0)
            source.load(index, AugmentSeed(SEED, epoch), target, label, decoder)
            view = source.augmentation.training_view(SEED, epoch, index, 40, 48)
            found.append((index, view, int(label), target.numpy().tobytes()))
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_stream_is_the_same_for_every_number_of_threads(
    threads: int, source: ImageSource, expected: list[Sample]
) -> None:
    assert stream(source, range(2 * EPOCH + 5), threads) == expected
    assert {label for _, _, label, _ in expected} == {0, 1, 2, 3} and len({s[3] for s in expected}) > 90


@pytest.mark.parametrize("replicas", [1, 7])
def test_the_stream_is_the_same_for_every_number_of_replicas(
    replicas: int, source: ImageSource, expected: list[Sample]
) -> None:
    total, size = 2 * EPOCH + 5, BATCH // MICROBATCHES
    merged: dict[int, list[Sample]] = {}
    for replica in range(replicas):
        own = range(replica, total, replicas)
        samples = stream(source, own, 2, step=replicas)
        merged |= {number: samples[at * size : (at + 1) * size] for at, number in enumerate(own)}
    assert [sample for number in range(total) for sample in merged[number]] == expected


@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_the_stream_does_not_depend_on_how_far_it_loads_ahead(
    ahead: int, source: ImageSource, expected: list[Sample]
) -> None:
    assert stream(source, range(EPOCH), 2, ahead=ahead) == expected[: EPOCH * 3]


def test_resumes_in_mid_epoch_with_another_number_of_threads(source: ImageSource, expected: list[Sample]) -> None:
    stopped = ORDER.batches + 2  # batches done: two into the second epoch
    before = stream(source, range(stopped * MICROBATCHES), 5)
    saved = Position.at(ORDER, stopped, source.fingerprint)
    assert (saved.seed, saved.epoch, saved.batch) == (SEED, 1, 2)
    first = saved.resume(Order(SAMPLES, BATCH, SEED), source.fingerprint) * MICROBATCHES
    assert before + stream(source, range(first, 2 * EPOCH + 5), 2) == expected


def test_refuses_to_resume_if_the_samples_would_differ(source: ImageSource, tmp_path: Path) -> None:
    saved = Position.at(ORDER, 2, source.fingerprint)
    root = make_ofrecord(tmp_path, SAMPLES)
    assert open_records(f"ofrecord:{root}").fingerprint == source.fingerprint  # a copy of the data is the same data
    part = root / "part-00002"
    part.write_bytes(part.read_bytes()[:-1] + b"\1")  # the last label
    changed = open_records(f"ofrecord:{root}").fingerprint
    with pytest.raises(DataChanged, match=f"fingerprint is {changed}, but the checkpoint .*{source.fingerprint}"):
        saved.resume(ORDER, changed)
    limited = Limited(source.records, 50).fingerprint
    with pytest.raises(DataChanged):
        saved.resume(Order(50, BATCH, SEED), limited)
    with pytest.raises(DataChanged, match="--seed is 3 but the checkpoint was made with 11"):
        saved.resume(Order(SAMPLES, BATCH, 3), source.fingerprint)
    with pytest.raises(DataChanged, match="batch 2 of its epoch, but an epoch has 2 batches of 26"):
        saved.resume(Order(SAMPLES, 26, SEED), source.fingerprint)


def test_microbatches_may_be_requested_in_any_order(source: ImageSource, expected: list[Sample]) -> None:
    numbers = [0, 1, 9, 10, 3, 3, 20]
    wanted = [sample for number in numbers for sample in expected[number * 3 : number * 3 + 3]]
    assert stream(source, numbers, 5) == wanted


def test_microbatches_are_normalized_and_have_the_data_type(source: ImageSource, expected: list[Sample]) -> None:
    part = ReplicaSlice(TRAINING, 1, EPOCH)
    (loader,) = make_loaders(LoaderOptions(torch.float64, threads=2), (source, part))
    inputs, labels = loader.microbatch(0).values()
    images = np.stack([np.frombuffer(sample[3], np.uint8).reshape(24, 24, 3) for sample in expected[:3]])
    wanted = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    torch.testing.assert_close(inputs, torch.from_numpy(wanted.transpose(0, 3, 1, 2)))
    assert inputs.dtype == torch.float64 and labels.tolist() == [sample[2] for sample in expected[:3]]
    again = loader.microbatch(1)["image"]
    torch.testing.assert_close(inputs, torch.from_numpy(wanted.transpose(0, 3, 1, 2)))  # not overwritten
    assert not torch.equal(inputs, again)
    loader.close()
    (other,) = make_loaders(LoaderOptions(torch.float64, channels_last=True), (source, part))
    stored = other.microbatch(0)["image"]
    assert torch.equal(stored, inputs) and stored.is_contiguous(memory_format=torch.channels_last)
    other.close()


def test_evaluation_loads_the_centre_of_every_sample_once(source: ImageSource) -> None:
    (loader,) = make_loaders(LoaderOptions(threads=3), (source, ReplicaSlice(EvaluationSampler(SAMPLES, 10), 1, 6)))
    for _ in range(2):  # buffers of the short last microbatch are reused for full ones
        pieces = [loader.microbatch(number).values() for number in range(6)]
        assert [len(labels) for _, labels in pieces] == [10, 10, 10, 10, 10, 3]
        inputs, labels = source.batch(np.arange(SAMPLES)).values()
        assert torch.equal(torch.cat([images for images, _ in pieces]), inputs)
        assert torch.equal(torch.cat([found for _, found in pieces]), labels)
    loader.close()


def plain(records: Faulty, order: Order, options: LoaderOptions, step: int = 1) -> ImageLoader:
    source = ImageSource(records, Augmentation(24, Cropping.PADDED), NORMALIZATIONS["imagenet"])
    return ImageLoader(source, ReplicaSlice(TrainingSampler(order, 1), step, 10**9), options, Pool(options.threads))


def test_a_bad_record_is_replaced_by_the_next_good_one_named_and_counted_once() -> None:
    bad_records: list[BadRecord] = []
    records = Faulty(40, bad=(7, 8, 39))
    loader = plain(
        records, Order(40, 10, shuffle=False), LoaderOptions(threads=3, max_bad=3, on_bad=bad_records.append)
    )
    labels = [int(label) for number in range(8) for label in loader.microbatch(number)["label"]]
    loader.close()
    epoch = [index % 10 for index in range(40)]
    epoch[7] = epoch[8] = 9  # record 9
    epoch[39] = 0  # wraps around to the first record
    assert labels == epoch * 2
    assert [bad.index for bad in bad_records] == [7, 8, 39] and bad_records[0].reason == "record 7 is bad"


def test_undecodable_bytes_are_bad_records() -> None:
    bad_records: list[BadRecord] = []
    records = Faulty(10)
    records.empty = (3,)  # type: ignore[attr-defined]
    loader = plain(records, Order(10, 10, shuffle=False), LoaderOptions(max_bad=1, on_bad=bad_records.append))
    assert loader.microbatch(0)["label"].tolist() == [0, 1, 2, 4, 4, 5, 6, 7, 8, 9]
    assert [bad.reason for bad in bad_records] == ["record 3: is empty"]
    loader.close()


def test_raises_after_max_bad_records() -> None:
    loader = plain(Faulty(40, bad=(3, 12, 25)), Order(40, 10, shuffle=False), LoaderOptions(threads=2, max_bad=2))
    for number in (0, 1):
        loader.microbatch(number)
    with pytest.raises(DataError, match=r"3 bad records .* 2; the last: record 25 is bad; .*--max-bad"):
        loader.microbatch(2)
    loader.close()


def test_a_data_set_without_good_records_is_an_error() -> None:
    loader = plain(Faulty(5, bad=range(5)), Order(5, 5), LoaderOptions(threads=2, max_bad=100))
    with pytest.raises(DataError, match="all 5 records are bad; the first: record"):
        loader.microbatch(0)
    loader.close()


def test_loads_ahead_by_a_bounded_number_and_not_past_the_end() -> None:
    records = Faulty(100)
    loader = plain(records, Order(100, 10, shuffle=False), LoaderOptions(threads=2, ahead=3))
    loader.microbatch(0)
    wait_until_idle(records, 40)
    assert sorted(records.reads) == list(range(40))
    loader.microbatch(1)
    wait_until_idle(records, 50)
    assert sorted(records.reads) == list(range(50))
    loader.close()
    short = Faulty(100)
    source = ImageSource(short, Augmentation(24, Cropping.PADDED), NORMALIZATIONS["imagenet"])
    order = Order(100, 10, shuffle=False)
    ending = ImageLoader(source, ReplicaSlice(TrainingSampler(order, 1), 2, 5), LoaderOptions(ahead=9), Pool(1))
    ending.microbatch(0)
    wait_until_idle(short, 30)
    assert sorted(short.reads) == [*range(10), *range(20, 30), *range(40, 50)]  # 0, 2 and 4
    ending.close()


def test_loads_ahead_by_the_step_of_its_slice() -> None:
    records = Faulty(100)
    loader = plain(records, Order(100, 10, shuffle=False), LoaderOptions(threads=2, ahead=1), step=2)
    for number, least in ((0, 20), (2, 30), (4, 40)):
        loader.microbatch(number)
        wait_until_idle(records, least)
    assert sorted(records.reads) == [index for first in (0, 20, 40, 60) for index in range(first, first + 10)]
    loader.close()


def test_buffers_are_not_reused_while_a_thread_still_fills_them() -> None:
    """A jump away from a microbatch waits for its only sample, which is half loaded."""
    begun, resume = threading.Event(), threading.Event()

    class Slow(Faulty):
        def get(self, index: int) -> Record:
            if index == 1:
                begun.set()
                resume.wait()
            return super().get(index)

    records = Slow(10)
    loader = plain(records, Order(10, 1, shuffle=False), LoaderOptions(threads=2, ahead=1))
    loader.microbatch(0)
    begun.wait()
    jump = threading.Thread(target=loader.microbatch, args=(5,))
    jump.start()
    jump.join(0.2)
    assert jump.is_alive() and 5 not in records.reads
    resume.set()
    jump.join()
    assert records.reads[:2] == [0, 1] and 5 in records.reads
    loader.close()


def test_buffers_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    allocate = ImageSource.allocate
    monkeypatch.setattr(ImageSource, "allocate", lambda self, n, **k: made.append(n) or allocate(self, n, **k))
    loader = plain(Faulty(100), Order(100, 10), LoaderOptions(threads=2, ahead=3))
    for number in [*range(60), 7, 3, *range(30)]:
        loader.microbatch(number)
    assert made == [10] * 4  # three ahead and the one in use
    loader.close()


def test_close_ends_the_threads_and_the_next_microbatch_starts_them() -> None:
    before = threads_called("loader-")
    loader = plain(Faulty(100), Order(100, 10), LoaderOptions(threads=3))
    assert threads_called("loader-") == before
    first = loader.microbatch(4)["image"]
    assert threads_called("loader-") == before + 3
    loader.close()
    assert threads_called("loader-") == before
    again = loader.microbatch(4)["image"]
    assert torch.equal(first, again)
    loader.close()


EPOCH_SAMPLES = int(os.environ.get("STAGEWRIGHT_EPOCH_SAMPLES", "20000"))  # `make soak` sets a million
LARGE_BATCH = 250


def resident() -> int:
    """Bytes of memory this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
@pytest.mark.timeout(1800)
def test_memory_stays_flat_over_three_epochs() -> None:
    records = Faulty(EPOCH_SAMPLES, bad=range(0, EPOCH_SAMPLES, EPOCH_SAMPLES // 10))
    records.reads = _Forgetful()
    loader = plain(records, Order(EPOCH_SAMPLES, LARGE_BATCH), LoaderOptions(threads=2, max_bad=10))
    batches, held = EPOCH_SAMPLES // LARGE_BATCH, []
    for number in range(3 * batches):
        loader.pixels(number)
        if number in (batches // 2, batches - 1, 2 * batches - 1, 3 * batches - 1):
            held.append(resident())
    loader.close()
    print(f"MiB after half an epoch, one, two, three: {[round(bytes_held / MIB, 1) for bytes_held in held]}")
    order = 8 * EPOCH_SAMPLES  # bytes of an epoch's order; two are cached, and a third exists while it is drawn
    assert max(held) - held[0] < 8 * MIB + 2 * order


class _Forgetful(list[int]):
    """Drops what is appended, so that the test itself does not grow."""

    def append(self, item: int) -> None:
        pass
