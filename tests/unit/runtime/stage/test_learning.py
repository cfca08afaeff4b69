"""On real images lag costs what it should, extrapolation recovers half of that, and injected faults show.

    sync < lag 3 with --predict < lag 3      (loss after four epochs)

Lag must cost something: a pipeline whose weights do not lag is as wrong as one that lags too far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import avg_pool2d

from stagewright.api.training import train
from stagewright.config.sources import SourceOptions
from stagewright.data.sources import open_source
from stagewright.errors import RunFailed
from stagewright.runtime.stage import optimizer
from stagewright.runtime.stage.versions import Slot, VersionRing
from tests.marks import nightly
from tests.shared import shared_file

_SAMPLES = 2048
_COST = (0.15, 0.6)  # of lag 3, in loss
_RECOVERED = (0.3, 0.75)  # of that cost, by extrapolation


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Photographs, eight pixels wide."""
    source = open_source(f"ofrecord:{shared_file('data/cifar10/train')}", SourceOptions(limit=_SAMPLES))
    pictures, labels = source.batch(np.arange(_SAMPLES)).values()
    path = tmp_path_factory.mktemp("learning") / "images.safetensors"
    save_file({"images": avg_pool2d(pictures, 4).contiguous(), "labels": labels}, path)
    return f"tensors:{path}"


def loss_of(images: str, folder: Path, **options: Any) -> float:
    """The loss over all images, after four epochs in four stages."""
    settings = {"placement": "0:0.0:1.0:2.0:3", "cut": "3,5,7", "batch": 64, "microbatches": 4, "epochs": 4}
    result = train(
        "tests.models:learner",
        data=images,
        lr=0.05,
        seed=1,
        eval_every=0,
        emulate=True,
        monitor_every=0.0,
        runs=str(folder),
        **settings,
        **options,
    )
    return result.evaluations[-1].loss


@pytest.fixture(scope="module")
def without_lag(images: str, tmp_path_factory: pytest.TempPathFactory) -> float:
    return loss_of(images, tmp_path_factory.mktemp("sync"), mode="sync")


def require_expected_losses(sync: float, images: str, folder: Path) -> None:
    """Raise unless lag costs what it should and extrapolation recovers its share."""
    lagged = loss_of(images, folder, mode="stale", staleness=3)
    extrapolated = loss_of(images, folder, mode="stale", staleness=3, predict=True)
    cost, recovered = lagged - sync, (lagged - extrapolated) / (lagged - sync)
    assert _COST[0] < cost < _COST[1], f"lag 3 costs {cost:.3f} over {sync:.3f}"
    assert _RECOVERED[0] < recovered < _RECOVERED[1], f"extrapolation recovers {recovered:.2f} of it"


def test_lag_costs_loss_and_extrapolation_recovers_half(without_lag: float, images: str, tmp_path: Path) -> None:
    require_expected_losses(without_lag, images, tmp_path)


def wrong_slot() -> AbstractContextManager[object]:
    def use(ring: VersionRing, update: int) -> Slot:
        return right(ring, update + 1)

    right = VersionRing.use
    return mock.patch.object(VersionRing, "use", use)


def no_stash() -> AbstractContextManager[object]:
    """Write the newest weights to every slot, where autograd does not see it."""

    def refill(ring: VersionRing, update: int, version: int, fill: Callable[[Tensor], None] | None = None) -> None:
        slot = ring.slots[ring.slot_of(update)]
        slot.version = version
        with torch.no_grad():
            slot.flat.data.copy_(ring.master)
            if fill is not None:
                fill(slot.flat.data)
            for other in ring.slots:
                other.flat.data.copy_(slot.flat.data)

    return mock.patch.object(VersionRing, "refill", refill)


def wrong_sign() -> AbstractContextManager[object]:
    right = optimizer.momentum_distance
    return mock.patch.object(
        optimizer, "momentum_distance", lambda momentum, updates, nesterov: -right(momentum, updates, nesterov=nesterov)
    )


@nightly
@pytest.mark.parametrize("fault", [wrong_slot, no_stash, wrong_sign])
def test_faults_change_the_losses(
    fault: Callable[[], AbstractContextManager[object]], without_lag: float, images: str, tmp_path: Path
) -> None:
    with fault(), pytest.raises((AssertionError, RunFailed)):
        require_expected_losses(without_lag, images, tmp_path)
