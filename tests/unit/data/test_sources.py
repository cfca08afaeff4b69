"""Sources give the same sample for the same index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stagewright.config.sources import SourceOptions
from stagewright.data.formats.tensors import TensorSource
from stagewright.data.loader import make_loaders
from stagewright.data.order import EvaluationSampler, ReplicaSlice
from stagewright.data.pool import LoaderOptions
from stagewright.data.sources import (
    LimitedSource,
    Source,
    cast,
    only_pair,
    open_source,
)
from stagewright.data.synthetic import SyntheticSource
from stagewright.errors import UserError
from stagewright.metrics import SAMPLES


def test_a_synthetic_sample_depends_only_on_its_index() -> None:
    one, other = (SyntheticSource(100, 10, 8, seed=3) for _ in range(2))
    images, labels = one.batch(np.array([5, 17, 99])).values()
    again, same = other.batch(np.array([99, 5, 17])).values()
    assert torch.equal(images, again[[1, 2, 0]]) and torch.equal(labels, same[[1, 2, 0]])
    assert images.shape == (3, 3, 8, 8) and labels.max() < 10


def test_synthetic_data_has_all_classes_and_they_differ() -> None:
    source = SyntheticSource(1000, 10, 8, seed=3)
    images, labels = source.batch(np.arange(1000)).values()
    assert torch.equal(labels.unique(), torch.arange(10))
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    assert torch.pdist(means.flatten(1)).min() > 1.0  # the means of the classes differ


@pytest.mark.parametrize("image", [8, 24])
def test_a_synthetic_image_is_noise_and_a_coarse_pattern(image: int) -> None:
    both, noise = (
        SyntheticSource(100, 10, image, 3, is_learnable).batch(np.arange(20)) for is_learnable in (True, False)
    )
    pattern = (both["image"] - noise["image"]).double()
    coarse = torch.nn.functional.interpolate(pattern, (8, 8))
    torch.testing.assert_close(torch.nn.functional.interpolate(coarse, (image, image)), pattern, atol=1e-6, rtol=0)
    assert pattern[both["label"] == 4].std(0).max() < 1e-6 < pattern.std()  # the same for a class


def test_floats_are_kept_and_bytes_become_fractions(tmp_path: Path) -> None:
    labels = torch.arange(4)
    floats, small = torch.randn(4, 3, 2, 2, dtype=torch.float64), torch.arange(48, dtype=torch.uint8).view(4, 3, 2, 2)
    for images, expected in ((floats, floats), (small, small.float() / 255)):
        save_file({"images": images, "labels": labels}, tmp_path / "data.safetensors")
        source = TensorSource(str(tmp_path / "data.safetensors"))
        assert isinstance(source, Source)  # it has all members
        found, found_labels = source.batch(np.array([2, 0])).values()
        assert torch.equal(found, expected[[2, 0]]) and found_labels.tolist() == [2, 0]
        assert (len(source), source.classes) == (4, 4)


def test_synthetic_samples_are_made_on_the_device() -> None:
    source = SyntheticSource(100, 10, 8, seed=3)
    elsewhere = torch.device("meta")
    (loader,) = make_loaders(
        LoaderOptions(torch.float64, device=elsewhere), (source, ReplicaSlice(EvaluationSampler(100, 10), 1, 10))
    )
    made = source.batch(np.arange(10))["image"]
    images, labels = loader.microbatch(0).values()
    assert made.device == images.device == labels.device == elsewhere and images.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_synthetic_images_are_made_in_the_room_that_they_are_given(dtype: torch.dtype) -> None:
    plain, typed = (SyntheticSource(100, 10, 8, seed=3, is_learnable=False) for _ in range(2))
    typed.to(torch.device("cpu"), dtype)
    room = typed.allocate(6)
    images = typed.batch(np.arange(6), room)["image"]
    assert images.data_ptr() == room.data_ptr() and torch.equal(images, plain.batch(np.arange(6))["image"].to(dtype))


def test_unlearnable_synthetic_samples_are_noise() -> None:
    images, labels = SyntheticSource(1000, 10, 8, seed=3, is_learnable=False).batch(np.arange(1000)).values()
    shown, same = SyntheticSource(1000, 10, 8, seed=3).batch(np.arange(1000)).values()
    assert torch.equal(labels, same) and not torch.equal(images, shown)
    assert torch.equal(images[0], images[64])  # noise alone, whatever the class


def test_a_limit_is_evenly_spread_and_changes_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "data.safetensors"
    save_file({"images": torch.arange(20.0).view(10, 2), "labels": torch.arange(10)}, path)
    whole = TensorSource(str(path))
    some = LimitedSource(whole, 4)
    assert (len(some), some.classes) == (4, 10) and some.batch(np.arange(4))["labels"].tolist() == [0, 2, 5, 7]
    same = open_source(f"tensors:{path}", SourceOptions(limit=4))
    assert same.fingerprint == some.fingerprint != whole.fingerprint
    save_file({"images": torch.arange(20.0).view(10, 2), "labels": torch.arange(10).flip(0)}, path)
    assert TensorSource(str(path)).fingerprint != whole.fingerprint
    synthetic = {SyntheticSource(10, 2, 8, seed, shown).fingerprint for seed in (0, 1) for shown in (True, False)}
    assert len(synthetic) == 4


def test_fields_get_the_type_that_the_run_computes_with() -> None:
    fields = {
        "image": torch.zeros(1, dtype=torch.float64),
        "mask": torch.zeros(1, dtype=torch.bool),
        "ids": torch.zeros(1, dtype=torch.int32),
        "target": torch.zeros(1, dtype=torch.float16),
    }
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        found = [tensor.dtype for tensor in cast(fields, ("target",), dtype).values()]
        assert found == [dtype, torch.bool, torch.int32, wide]


def test_where_one_input_and_one_target_are_needed_others_are_named() -> None:
    one = torch.zeros(1)
    assert only_pair({"label": one, "x": one + 1}, ("label",)) == (one + 1, one)
    with pytest.raises(UserError, match=r"2 inputs \(a, b\) and 0 targets \(none\)"):
        only_pair({"a": one, "b": one}, ("label",))


def save_fields(path: Path, **fields: torch.Tensor) -> str:
    save_file(fields, path)
    return str(path)


def test_any_fields_are_inputs_or_targets_by_their_names(tmp_path: Path) -> None:
    fields = {
        "ids": torch.arange(12).view(4, 3).to(torch.uint16),
        "mask": torch.tensor([True, False, True, True]),
        "weight": torch.arange(4, dtype=torch.float64),
        "label": torch.tensor([0, -100, 2, 1], dtype=torch.int8),
        "label_pixels": torch.full((4, 2, 2), 6, dtype=torch.uint8),
        "target_age": torch.arange(4, dtype=torch.float16),
        "targets": torch.zeros(4, 5, dtype=torch.bool),
    }
    source = TensorSource(save_fields(tmp_path / "t", **fields))
    assert source.targets == ("label", "targets") and source.classes == 3 and source.has_ignored
    assert source.unit == SAMPLES and len(source) == 4
    found = source.batch(np.array([3, 1]))
    assert found.keys() == fields.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.double(), fields[name].double()[[3, 1]]), name
    kinds = [found[name].dtype for name in ("ids", "label", "label_pixels", "mask", "target_age")]
    assert kinds == [torch.int64, torch.int64, torch.uint8, torch.bool, torch.float16]


def test_the_fingerprint_covers_names_types_and_numbers(tmp_path: Path) -> None:
    one, two = torch.zeros(3, 2), torch.arange(3)
    variants = [
        {"x": one, "label": two},
        {"y": one, "label": two},
        {"x": one + 1, "label": two},
        {"x": one, "label": two.flip(0)},
        {"x": one.half(), "label": two},
        {"x": one, "label": two, "z": one + 1},
    ]
    found = {TensorSource(save_fields(tmp_path / "t", **fields)).fingerprint for fields in variants}
    assert len(found) == len(variants)
    old = TensorSource(save_fields(tmp_path / "t", images=torch.arange(6.0).view(3, 2), labels=two))
    assert old.fingerprint == "224eb53890de7af95310c9761f955bfc"  # checkpoints of earlier versions hold it


@pytest.mark.parametrize(
    ("fields", "piece"),
    [
        ({"label": torch.zeros(2)}, "contains label; it needs an input"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, r"x \[2\] and y \[3\]"),
        ({"x": torch.zeros(())}, r"x \[\] needs at least 1"),
        ({"images": torch.zeros(3), "labels": torch.zeros(3)}, r"images \[3\] needs at least 2"),
        ({"x": torch.zeros(2), "target": torch.tensor([3, -1])}, "smallest number of 'target' is -1"),
        ({"x": torch.zeros(2), "labels": torch.tensor([[3], [-101]])}, "is -101"),
        ({"x": torch.zeros(2).to(torch.float8_e4m3fn)}, "float8"),
        ({f"x{number}": torch.zeros(2) for number in range(65)}, "65 fields; at most 64"),
    ],
)
def test_fields_that_do_not_fit_are_one_line(fields: dict[str, torch.Tensor], piece: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=piece):
        TensorSource(save_fields(tmp_path / "t", **fields))


def test_synthetic_images_have_the_channels_that_are_asked_for() -> None:
    grey, plain = SyntheticSource(100, 10, 8, seed=3, channels=1), SyntheticSource(100, 10, 8, seed=3)
    assert grey.batch(np.arange(2))["image"].shape == (2, 1, 8, 8)
    assert grey.fingerprint != plain.fingerprint == SyntheticSource(100, 10, 8, seed=3, channels=3).fingerprint
