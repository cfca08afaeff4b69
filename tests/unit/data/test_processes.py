"""Worker processes load what threads load, bit for bit, and end with their rank, whatever happens to either."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from stagewright.config.sources import SourceOptions
from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_records
from stagewright.data.decode import NORMALIZATIONS
from stagewright.data.formats.fields import Fields
from stagewright.data.formats.records import BadRecord, DataError, Record
from stagewright.data.loader import Copies, ImageLoader, Loader, Make, make_loaders
from stagewright.data.order import EvaluationSampler, Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import Batch, LoaderOptions, Pool
from stagewright.data.processes import ProcessPool, SharedBuffers
from stagewright.data.sources import ImageSource, open_source
from tests.pictures import Faulty, make_ofrecord
from tests.waiting import is_running, wait_until

SAMPLES = 53
STOP = 30  # microbatches: more than two epochs


def loader_processes() -> list[BaseProcess]:
    """Those that this process has started and that have not ended."""
    return [one for one in multiprocessing.active_children() if one.name.startswith("loader-")]


def training(batch: int = 12, microbatches: int = 4, step: int = 1) -> ReplicaSlice:
    return ReplicaSlice(TrainingSampler(Order(SAMPLES, batch, seed=11), microbatches), step, STOP)


def few(samples: int, batch: int) -> ReplicaSlice:
    return ReplicaSlice(TrainingSampler(Order(samples, batch, seed=3), 1), 1, STOP)


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[ImageSource, ReplicaSlice]]:
    """Classes in training and evaluation, masks, and numbers of a table."""
    root = tmp_path_factory.mktemp("data")
    records = open_records(f"ofrecord:{make_ofrecord(root / 'records', SAMPLES)}")
    jittered = Augmentation(24, Cropping.RESIZED, jitter=0.2, cutout=5)
    classes = ImageSource(records, jittered, NORMALIZATIONS["imagenet"])
    for number in range(7):
        for folder, colour in (("images", (30 * number, 90, 90)), ("masks", number % 3)):
            path = root / f"streets/{folder}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB" if folder == "images" else "L", (30, 20), colour).save(path)
    (root / "streets/ages.csv").write_text("path,age\n" + "".join(f"images/{n}.png,{n}.5\n" for n in range(7)))
    masks, ages = (
        open_source(text, SourceOptions(image=16))
        for text in (f"segmentation:{root}/streets", f"table:{root}/streets/ages.csv")
    )
    assert isinstance(masks, ImageSource) and isinstance(ages, ImageSource)
    evaluation = ReplicaSlice(EvaluationSampler(SAMPLES, 10), 1, 6)
    return [(classes, training()), (classes, evaluation), (masks, few(7, 3)), (ages, few(7, 2))]


def same_fields(loaders: tuple[Loader, ...], others: tuple[Loader, ...], numbers: Iterator[int]) -> int:
    """How many microbatches were compared: each loader's, of every number, in turns."""
    compared = 0
    for number in numbers:
        for ours, theirs in zip(loaders, others, strict=True):
            fields, expected = ours.microbatch(number), theirs.microbatch(number)
            assert list(fields) == list(expected)
            assert all(torch.equal(fields[name], expected[name]) for name in fields)
            compared += 1
    return compared


def test_samples_are_the_same_bits_as_with_threads(slices: list[tuple[ImageSource, ReplicaSlice]]) -> None:
    threads = make_loaders(LoaderOptions(torch.float64, threads=2), *slices)
    processes = make_loaders(LoaderOptions(torch.float64, image_workers=2, ahead=2), *slices)
    assert same_fields(processes, threads, iter([0, 1, 2, 4, 3, 3, 5])) == 28  # resumed, and asked for again
    assert len(loader_processes()) == 2  # one pair for training and evaluations
    same_fields(processes[:1], threads[:1], iter(range(12, 20)))  # over the end of the first epoch
    (step,) = make_loaders(LoaderOptions(torch.float64, image_workers=5), (slices[0][0], training(step=3)))
    same_fields((step,), threads[:1], iter(range(1, 16, 3)))
    for loader in (*threads, *processes, step):
        loader.close()
    assert not loader_processes()
    same_fields(processes[:1], threads[:1], iter([7]))  # start again
    assert len(loader_processes()) == 2
    processes[1].close()
    threads[1].close()
    assert not loader_processes()


class AheadCopies(Copies):
    """Makes fields ahead, as for a GPU; notes of which batches."""

    runs_ahead = True

    def __init__(self) -> None:
        self.begun: list[list[int]] = []

    def begin(self, batch: Batch, make: Make) -> tuple[Fields, None]:
        self.begun.append(batch.indices.tolist())
        return make(batch.images, batch.labels.clone()), None


@pytest.mark.parametrize("make_pool", [Pool, ProcessPool])
def test_the_next_batch_is_made_ahead_and_counts_when_it_is_requested(
    make_pool: type[Pool | ProcessPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: list[int] = []
    options = LoaderOptions(ahead=1, max_bad=1, on_bad=lambda one: bad.append(one.index))
    numbers = ReplicaSlice(TrainingSampler(Order(40, 4, shuffle=False), 1), 2, 10)
    pool, copies = make_pool(2), AheadCopies()
    loader = ImageLoader(images_of(Faulty(40, bad=(9, 26))), numbers, options, pool, copies)

    def labels(number: int) -> list[int]:
        return loader.microbatch(number)["label"].tolist()

    monkeypatch.setattr(pool, "is_full", lambda batch: pool.wait(batch) is None)  # it always is in time
    assert labels(0) == [0, 1, 2, 3] and copies.begun == [[0, 1, 2, 3], [8, 9, 10, 11]] and not bad
    assert labels(2) == [8, 0, 0, 1] and bad == [9] and len(copies.begun) == 3
    assert labels(8) == [2, 3, 4, 5] and labels(2) == [8, 0, 0, 1] and labels(4) == [6, 7, 8, 9]  # jumps
    with pytest.raises(DataError, match="2 bad records"):
        labels(6)
    loader.close()
    assert labels(8) == [2, 3, 4, 5]
    loader.close()


class Counting(Faulty):
    """Records whose reads are counted in every process; the first waits until it may be read."""

    def __init__(self, samples: int, bad: tuple[int, ...] = ()) -> None:
        super().__init__(samples, bad)
        context = multiprocessing.get_context("fork")
        self.count = context.Value("q")
        self.is_open = context.Event()

    def get(self, index: int) -> Record:
        with self.count.get_lock():
            self.count.value += 1
        if index == 0:
            self.is_open.wait()
        if index == 33:
            raise KeyError("a bug")
        return super().get(index)


def images_of(records: Faulty) -> ImageSource:
    return ImageSource(records, Augmentation(24, Cropping.PADDED), NORMALIZATIONS["imagenet"])


def loader_of(records: Faulty, batch: int, options: LoaderOptions, stop: int = STOP) -> Loader:
    order = Order(len(records), batch, shuffle=False)
    return make_loaders(options, (images_of(records), ReplicaSlice(TrainingSampler(order, 1), 1, stop)))[0]


def test_bad_records_are_counted_once_in_the_order_of_rows_and_errors_are_told() -> None:
    bad: list[BadRecord] = []
    records = Counting(40, bad=(7, 8, 12, 25, 26))
    records.is_open.set()
    loader = loader_of(records, 10, LoaderOptions(image_workers=2, max_bad=4, on_bad=bad.append, ahead=1))
    labels = [loader.microbatch(number)["label"].tolist() for number in (0, 1, 0)]
    assert labels[0] == labels[2] == [0, 1, 2, 3, 4, 5, 6, 9, 9, 9] and labels[1] == [0, 1, 3, 3, 4, 5, 6, 7, 8, 9]
    assert [one.index for one in bad] == [7, 8, 12] and bad[0].reason == "record 7 is bad"
    with pytest.raises(DataError, match=r"5 bad records .* 4; the last: record 26 is bad; .*--max-bad"):
        loader.microbatch(2)
    with pytest.raises(RuntimeError, match=r"(?s)Traceback .*KeyError: 'a bug'"):
        loader.microbatch(3)
    assert loader.microbatch(0)["label"].tolist() == labels[0]  # buffers are free again
    loader.close()
    nothing = loader_of(Faulty(5, bad=range(5)), 5, LoaderOptions(image_workers=1, max_bad=9))
    with pytest.raises(DataError, match="all 5 records are bad; the first: record"):
        nothing.microbatch(0)
    nothing.close()


def test_loads_as_far_ahead_as_asked() -> None:
    records = Counting(30)
    records.is_open.set()
    loader = loader_of(records, 3, LoaderOptions(image_workers=3, ahead=2), stop=10)
    loader.microbatch(0)
    wait_until(lambda: records.count.value == 9)
    loader.microbatch(1)
    wait_until(lambda: records.count.value == 12)
    loader.close()
    assert records.count.value == 12


def test_takes_more_tasks_than_a_pipe_holds_and_leaves_out_what_is_abandoned() -> None:
    records = Counting(2000)
    source, pool = images_of(records), ProcessPool(1)
    first, *others = (Batch(np.arange(20), None, buffers) for buffers in pool.reserve(source, 20, 800))
    assert isinstance(first.buffers, SharedBuffers)
    pool.submit(first, source.load)  # the only worker waits in its first row
    wait_until(lambda: records.count.value == 1)
    for batch in others:
        pool.submit(batch, source.load)  # 2,397 tasks of 56 bytes
    abandoning = threading.Thread(target=pool.abandon, args=(first,))
    abandoning.start()  # which waits for the row
    wait_until(lambda: first.buffers.ticket[0] == 0)
    for batch in others[:-1]:
        batch.buffers.ticket[0] = 0
    records.is_open.set()
    abandoning.join()
    for batch in others[:-1]:
        pool.abandon(batch)
    wait_until(lambda: pool.is_full(others[-1]))
    assert others[-1].labels.tolist() == [index % 10 for index in range(20)]
    assert records.count.value == 1 + 20
    pool.close()


def test_a_killed_worker_is_named_in_one_line_and_others_take_over() -> None:
    loader = loader_of(Faulty(100), 10, LoaderOptions(image_workers=2, ahead=0))
    expected = loader.microbatch(0)["image"]
    victim = loader_processes()[0]
    victim.kill()
    victim.join()
    with pytest.raises(DataError, match=rf"process {victim.pid}, one of 2 .* SIGKILL; .* --workers") as caught:
        for number in range(1, 5):
            loader.microbatch(number)
    assert "\n" not in str(caught.value) and not loader_processes()
    assert torch.equal(loader.microbatch(0)["image"], expected)
    loader.close()


def test_an_interrupt_leaves_workers_to_their_rank() -> None:
    """Ctrl-C reaches every process of a terminal; the rank still saves a checkpoint."""
    loader = loader_of(Faulty(100), 10, LoaderOptions(image_workers=2, ahead=0))
    expected = loader.microbatch(0)["image"]
    wait_until(lambda: all(_ignores_interrupts(process.pid) for process in loader_processes()))
    for process in loader_processes():
        os.kill(process.pid, signal.SIGINT)
    assert torch.equal(loader.microbatch(0)["image"], expected) and len(loader_processes()) == 2
    loader.close()


def _ignores_interrupts(pid: int) -> bool:
    (ignored,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def test_workers_end_with_a_rank_that_is_killed() -> None:
    reading, writing = os.pipe()

    def rank() -> None:
        loaders = [loader_of(Faulty(100), 10, LoaderOptions(image_workers=2)) for _ in range(2)]
        for loader in loaders:  # the second one's workers have the pipes of the first, too
            loader.microbatch(0)
        os.write(writing, " ".join(str(one.pid) for one in loader_processes()).encode())
        signal.pause()

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    pids = list(map(int, os.read(reading, 1000).split()))
    assert len(pids) == 4 and all(map(psutil.pid_exists, pids))
    process.kill()
    process.join()
    wait_until(lambda: not any(map(is_running, pids)))
    os.close(reading)
    os.close(writing)


def test_memory_that_can_not_be_had_is_one_line() -> None:
    numbers = ReplicaSlice(EvaluationSampler(2**50, 2**50), 1, 1)
    with pytest.raises(DataError, match=r"1125899906842624 samples .* need 1,811,939,328.0 GiB .*; reduce --image"):
        make_loaders(LoaderOptions(image_workers=2), (images_of(Faulty(100)), numbers))
