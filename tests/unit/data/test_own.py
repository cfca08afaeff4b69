"""A user's own Dataset as a source: fields, exact randomness, worker processes, and errors in one line."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from stagewright import objects
from stagewright.config.sources import SourceOptions
from stagewright.data.formats.records import DataError
from stagewright.data.loader import make_loaders
from stagewright.data.order import EvaluationSampler, Order, ReplicaSlice, TrainingSampler
from stagewright.data.own import DatasetSource, fields_of
from stagewright.data.pool import LoaderOptions
from stagewright.data.sources import open_source
from stagewright.errors import UserError


class Noisy:
    """Pairs whose inputs draw from all three global generators."""

    def __init__(self, samples: int = 12) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()]), index % 3


def loader_of(source: DatasetSource, microbatches: int, workers: int = 0, step: int = 1):
    order = Order(len(source), 4, seed=5)
    numbers = ReplicaSlice(TrainingSampler(order, microbatches), step, 6 * microbatches)
    return make_loaders(LoaderOptions(torch.float64, workers=workers), (source, numbers))[0]


def test_a_sample_draws_the_same_whatever_the_microbatches_and_workers() -> None:
    source = DatasetSource(Noisy(), "noisy", seed=5)
    whole, halves = loader_of(source, 1), loader_of(source, 2, workers=2)
    for batch in range(6):
        pieces = [halves.microbatch(2 * batch + piece) for piece in range(2)]
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in ("input", "target")}
        expected = whole.microbatch(batch)
        assert torch.equal(expected["input"], joined["input"]) and torch.equal(expected["target"], joined["target"])
    halves.close()


def test_epochs_draw_anew_and_evaluations_always_the_same() -> None:
    source = DatasetSource(Noisy(), "noisy", seed=5)
    loader = loader_of(source, 1)
    batches = torch.cat([loader.microbatch(number)["input"] for number in range(6)])
    draws = {int(row[0]): [] for row in batches}
    for row in batches:
        draws[int(row[0])].append(row[1:].tolist())
    assert all(first != second for first, second in draws.values())
    evaluation = ReplicaSlice(EvaluationSampler(12, 12), 1, 1)
    (once,) = make_loaders(LoaderOptions(), (source, evaluation))
    assert torch.equal(once.microbatch(0)["input"], once.microbatch(0)["input"])


def test_loading_leaves_global_generators_alone() -> None:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(()).item(), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    loader_of(DatasetSource(Noisy(), "noisy"), 1).microbatch(0)
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected


def test_samples_are_paired_where_a_tuple_ends_with_the_target() -> None:
    ones = torch.ones(3)
    for samples, is_paired in (([(ones, 1)], True), ([(ones, ones, 1)], True), ([ones], False)):
        assert DatasetSource(samples, "x").is_paired == is_paired
    assert not DatasetSource([{"input": ones, "target": 1}], "x").is_paired


def test_fields_are_named_by_dicts_and_by_places_in_tuples() -> None:
    ones = torch.ones(2, 3)
    assert list(fields_of(ones, "x")) == ["input"]
    assert list(fields_of((ones, ones), "x")) == ["input", "target"]
    assert list(fields_of((ones, ones, ones), "x")) == ["input0", "input1", "target"]
    assert list(fields_of({"input_ids": ones, "labels": ones}, "x")) == ["input_ids", "labels"]
    with pytest.raises(UserError, match="'name' of x is of type list"):
        fields_of({"image": ones, "name": ["a", "b"]}, "x")
    with pytest.raises(UserError, match=r"'target' of x is \[3\] for 2 samples"):
        fields_of((ones, torch.ones(3)), "x", 2)


def test_a_dataset_that_changes_its_length_is_refused() -> None:
    dataset = Noisy()
    source = DatasetSource(dataset, "noisy")
    dataset.samples = 11
    with pytest.raises(UserError, match="had 12 samples and has 11 now"):
        source.batch(np.arange(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises_is_named(workers: int) -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            if index == 1:
                raise OSError("no such file: 1.jpg")
            return super().__getitem__(index)

    loader = loader_of(DatasetSource(Broken(), "photos"), 1, workers)
    with pytest.raises(UserError, match=r"sample 1 of dataset photos raised OSError: no such file: 1.jpg"):
        for number in range(3):
            loader.microbatch(number)


@pytest.mark.parametrize("error", [RuntimeError("DataLoader worker (pid 7) is killed"), EOFError(), OSError("reset")])
def test_a_worker_that_ends_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> Iterator[object]:
        raise error
        yield

    monkeypatch.setattr("stagewright.data.own.DataLoader", lost)  # of a real one torch's signal handler may tell first
    loader = loader_of(DatasetSource(Noisy(), "noisy"), 1, workers=2)
    with pytest.raises(DataError, match=r"one of 2 processes that load dataset noisy ended \(.*\); .*--workers"):
        loader.microbatch(0)


def test_fingerprint_tells_datasets_apart() -> None:
    assert DatasetSource(Noisy(), "a").fingerprint == DatasetSource(Noisy(), "b").fingerprint
    assert DatasetSource(Noisy(), "a").fingerprint != DatasetSource(Noisy(13), "a").fingerprint


def test_opens_an_object_a_factory_and_part_of_one_by_name() -> None:
    name = objects.put(Noisy())
    for known in (name, objects.put(Noisy, "make")):
        source = open_source(f"python:{known}", SourceOptions(image=0))
        assert (len(source), source.targets, source.classes) == (12, ("target",), 3)
    objects.remove(name)
    with pytest.raises(UserError, match="given as an object by a script"):
        open_source(f"python:{name}", SourceOptions(image=0))
