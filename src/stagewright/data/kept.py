"""Small images decoded once and kept on the device, where each epoch shifts and mirrors them anew."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from stagewright.data.augment import Cropping
from stagewright.data.images import Draw, ImageSource
from stagewright.data.loading import BadRecords, Loading
from stagewright.data.numbering import Share
from stagewright.data.order import Indices
from stagewright.data.pool import Batch, Pool


def require_keepable(source: ImageSource) -> None:
    """An error where an epoch asks for more than whole images, shifted and mirrored."""
    asked = source.augmentation
    if asked.cropping is not Cropping.PADDED:
        raise ValueError(
            f"--decode once keeps whole images, but --crop is {asked.cropping} at {asked.side} pixels; "
            "use --crop padded or --decode cpu"
        )
    if asked.jitter:
        raise ValueError(f"--decode once changes no colours, but --jitter is {asked.jitter:g}; leave one out")


class KeptLoader:
    """The samples of an image source, as the loader that decodes them anew gives them."""

    def __init__(self, source: ImageSource, share: Share, loading: Loading, pool: Pool) -> None:
        require_keepable(source)
        self._source = source
        self._share = share
        self._loading = loading
        self._pool = pool

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        images, labels = self._kept
        indices, draw = self._share.numbering.indices(number), self._share.numbering.draw(number)
        rows = torch.from_numpy(indices).to(self._loading.device, non_blocking=True)
        pixels = images[rows] if draw is None else self._views(images, rows, indices, draw)
        return self._source.normalization.apply(pixels, self._loading.dtype), labels[rows]

    def close(self) -> None:
        self._pool.close()

    @cached_property
    def _kept(self) -> tuple[Tensor, Tensor]:
        """Every image, whole, and its label; bad ones are told of now."""
        images, labels = self._source.empty(len(self._source))
        batch = Batch(np.arange(len(self._source)), None, images, labels)
        self._pool.submit(batch, self._source.load)
        self._pool.wait(batch)
        bad_records = BadRecords(self._loading)
        for row in sorted(batch.bad):
            for bad in batch.bad[row]:
                bad_records.count(bad)
        return images.to(self._loading.device), torch.from_numpy(labels).to(self._loading.device)

    def _views(self, images: Tensor, rows: Tensor, indices: Indices, draw: Draw) -> Tensor:
        """What training sees of the samples in these rows."""
        augmentation = self._source.augmentation
        shifts = torch.from_numpy(augmentation.shifts(draw.seed, draw.epoch, indices))
        down, right, mirrored, top, left = shifts.to(images.device, non_blocking=True).unbind(1)
        seen = _windows(images, rows, down, right, mirrored.bool())
        return seen * ~_squares(top, left, augmentation.cutout, augmentation.side) if augmentation.cutout else seen


def _windows(images: Tensor, rows: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """A window of each row's image, of the image's size; black where it reaches beyond."""
    side = images.shape[1]
    steps = torch.arange(side, device=images.device)
    lines, columns = down[:, None] + steps, right[:, None] + steps
    columns = torch.where(mirrored[:, None], side - 1 - columns, columns)
    seen = images[rows[:, None, None], lines.clamp(0, side - 1)[:, :, None], columns.clamp(0, side - 1)[:, None]]
    return seen * _squares(-down, -right, side, side)


def _squares(top: Tensor, left: Tensor, side: int, whole: int) -> Tensor:
    """Which pixels of `whole` x `whole` images lie in a square each, as [images, rows, columns, 1]."""
    steps = torch.arange(whole, device=top.device)
    in_rows, in_columns = ((steps >= first[:, None]) & (steps < first[:, None] + side) for first in (top, left))
    return (in_rows[:, :, None] & in_columns[:, None])[..., None]
