"""Sources give the same sample for the same index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from stagewright.data.sources import SyntheticSource, TensorSource


def test_a_synthetic_sample_depends_on_its_index_alone() -> None:
    one, other = (SyntheticSource(100, 10, 8, seed=3) for _ in range(2))
    images, labels = one.batch(np.array([5, 17, 99]))
    again, same = other.batch(np.array([99, 5, 17]))
    assert torch.equal(images, again[[1, 2, 0]]) and torch.equal(labels, same[[1, 2, 0]])
    assert images.shape == (3, 3, 8, 8) and labels.max() < 10


def test_synthetic_classes_are_all_there_and_differ() -> None:
    source = SyntheticSource(1000, 10, 8, seed=3)
    images, labels = source.batch(np.arange(1000))
    assert torch.equal(labels.unique(), torch.arange(10))
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])
    assert torch.pdist(means.flatten(1)).min() > 1.0  # a class can be told by its mean


def test_tensors_come_as_they_are_and_bytes_as_fractions(tmp_path: Path) -> None:
    labels = torch.arange(4)
    floats, small = torch.randn(4, 3, 2, 2, dtype=torch.float64), torch.arange(48, dtype=torch.uint8).view(4, 3, 2, 2)
    for images, expected in ((floats, floats), (small, small.float() / 255)):
        save_file({"images": images, "labels": labels}, tmp_path / "data.safetensors")
        source = TensorSource(str(tmp_path / "data.safetensors"))
        found, found_labels = source.batch(np.array([2, 0]))
        assert torch.equal(found, expected[[2, 0]]) and found_labels.tolist() == [2, 0]
        assert (len(source), source.classes) == (4, 4)
