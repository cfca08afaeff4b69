"""Views are a pure function of seed, epoch and index, and are drawn as the published recipe draws them."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from PIL import Image

from stagewright.data.augment import Augmentation, Cropping, Cutout, Jitter, View, default_cropping
from stagewright.data.decode import NORMALIZATIONS, Normalization, jittered, parse_normalization, render
from tests.pictures import pixels

RESIZED = Augmentation(224, Cropping.RESIZED)
PADDED = Augmentation(32, Cropping.PADDED)


def rendered(image: np.ndarray, view: View, side: int) -> np.ndarray:
    target = torch.full((side, side, 3), 77, dtype=torch.uint8)
    render(image, view, target)
    return target.numpy()


def test_views_depend_only_on_seed_epoch_and_index() -> None:
    first = [RESIZED.training_view(3, 1, index, 375, 500) for index in range(50)]
    assert first == [RESIZED.training_view(3, 1, index, 375, 500) for index in range(50)]
    for other in ([RESIZED.training_view(4, 1, index, 375, 500) for index in range(50)],
                  [RESIZED.training_view(3, 2, index, 375, 500) for index in range(50)],
                  [RESIZED.training_view(3, 1, index + 1, 375, 500) for index in range(50)]):  # fmt: skip
        assert sum(one == two for one, two in zip(first, other, strict=True)) <= 1
    assert RESIZED.training_view(-3, 0, 0, 9, 9) == RESIZED.training_view(2**64 - 3, 0, 0, 9, 9)


@pytest.mark.parametrize("jitter", [0.0, 0.4])
@pytest.mark.parametrize("cutout", [0, 16])
def test_views_come_from_hashes_of_a_counter(jitter: float, cutout: int) -> None:
    """Another generator would silently change every run; this one is written down twice."""
    seed, epoch, index = 7, 2, 43
    blocks = [hashlib.blake2b(struct.pack("<4Q", seed, epoch, index, block)).digest() for block in range(2)]
    draws = iter([word // 2**11 / 2**53 for word in struct.unpack("<16Q", b"".join(blocks))])
    mirror = next(draws)
    factors = [1 - jitter + 2 * jitter * next(draws) for _ in range(3)] if jitter else []
    area, aspect, down, right = (next(draws) for _ in range(4))
    pixels_of_box = 375 * 500 * (0.08 + 0.92 * area)
    shape = 0.75 * (16 / 9) ** aspect
    width, height = round((pixels_of_box * shape) ** 0.5), round((pixels_of_box / shape) ** 0.5)
    top, left = int(down * (375 - height + 1)), int(right * (500 - width + 1))
    assert width <= 500 and height <= 375  # the first try fits
    square = None
    if cutout:  # with jitter: the ninth number drawn
        square = Cutout(int(next(draws) * 224) - 8, int(next(draws) * 224) - 8, 16)
    found = replace(RESIZED, jitter=jitter, cutout=cutout).training_view(seed, epoch, index, 375, 500)
    assert replace(found, jitter=None) == View(top, left, height, width, 224, 224, 0, 0, mirror < 0.5, None, square)
    assert (astuple(found.jitter) if found.jitter else ()) == pytest.approx(factors)


def test_random_boxes_have_the_published_areas_aspect_ratios_and_positions() -> None:
    views = [RESIZED.training_view(1, 0, index, 375, 500) for index in range(20_000)]
    areas = np.array([view.height * view.width for view in views]) / (375 * 500)
    aspects = np.array([view.width / view.height for view in views])
    assert 0.079 < areas.min() < 0.09 and 0.99 < areas.max() <= 1
    assert 0.74 < aspects.min() < 0.76 and 1.32 < aspects.max() < 1.35
    small = areas < 0.5  # boxes up to half the image always fit, so their areas and shapes are as drawn
    assert abs(np.median(areas[small]) - 0.29) < 0.01
    assert abs(np.log(aspects[small]).mean()) < 0.01
    assert abs(np.mean([view.is_mirrored for view in views]) - 0.5) < 0.02
    places = np.array([(v.top / max(375 - v.height, 1), v.left / max(500 - v.width, 1)) for v in views])[small]
    assert np.abs(places.mean(0) - 0.5).max() < 0.01 and places.min() == 0 and places.max() == 1
    assert all(v.top + v.height <= 375 and v.left + v.width <= 500 for v in views)


def test_an_image_that_no_box_fits_is_cropped_in_its_centre() -> None:
    views = [RESIZED.training_view(0, 0, index, 10, 1000) for index in range(50)]
    assert sum((v.top, v.left, v.height, v.width) == (0, 493, 10, 13) for v in views) > 40
    views = [RESIZED.training_view(0, 0, index, 1000, 10) for index in range(50)]
    assert sum((v.top, v.left, v.height, v.width) == (493, 0, 13, 10) for v in views) > 40
    assert RESIZED.training_view(0, 0, 0, 1, 1).height == 1


def test_padded_crops_shift_by_up_to_an_eighth_in_each_direction() -> None:
    views = [PADDED.training_view(0, 0, index, 32, 32) for index in range(3000)]
    shifts = {(view.down, view.right) for view in views}
    assert shifts == {(down, right) for down in range(-4, 5) for right in range(-4, 5)}
    image = pixels(1, 32, 32)
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    for view in views[:40]:
        expected = np.pad(image[:, ::-1], ((4, 4), (4, 4), (0, 0))) if view.is_mirrored else padded
        top, left = view.down + 4, view.right + 4
        assert np.array_equal(rendered(image, view, 32), expected[top : top + 32, left : left + 32])


def test_small_images_are_padded_by_default() -> None:
    assert (default_cropping(64), default_cropping(65)) == (Cropping.PADDED, Cropping.RESIZED)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (100, 100), (30, 400)])
def test_a_training_view_equals_pillows_resized_crop(height: int, width: int) -> None:
    image = pixels(2, height, width)
    for index in range(6):
        view = RESIZED.training_view(5, 0, index, height, width)
        crop = Image.fromarray(image).crop((view.left, view.top, view.left + view.width, view.top + view.height))
        expected = np.asarray(crop.resize((224, 224), Image.Resampling.BILINEAR))
        expected = expected[:, ::-1] if view.is_mirrored else expected
        assert np.abs(rendered(image, view, 224).astype(int) - expected).max() <= 2


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (256, 256), (60, 90)])
def test_an_evaluation_view_equals_pillows_resize_and_centre_crop(height: int, width: int) -> None:
    image = pixels(3, height, width)
    size = (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
    whole = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    expected = np.asarray(whole.crop((left, top, left + 224, top + 224)))
    found = rendered(image, RESIZED.evaluation_view(height, width), 224)
    assert np.abs(found.astype(int) - expected).max() <= 2


def test_evaluation_uses_the_whole_of_a_small_image() -> None:
    image = pixels(4, 32, 32)
    assert np.array_equal(rendered(image, PADDED.evaluation_view(32, 32), 32), image)


def test_jitter_factors_stay_within_the_option() -> None:
    augmentation = Augmentation(224, Cropping.RESIZED, jitter=0.4)
    jitters = [augmentation.training_view(0, 0, index, 300, 300).jitter for index in range(2000)]
    factors = np.array([(j.brightness, j.contrast, j.saturation) for j in jitters if j is not None])
    assert len(factors) == 2000 and factors.min() > 0.6 and factors.max() < 1.4
    assert np.abs(factors.mean(0) - 1).max() < 0.02
    assert RESIZED.training_view(0, 0, 0, 300, 300).jitter is None


@pytest.mark.parametrize("base", [RESIZED, PADDED])
def test_a_cutout_is_black_may_be_anywhere_and_changes_nothing_else(base: Augmentation) -> None:
    side, image = base.side, np.full((40, 40, 3), 200, np.uint8)
    augmentation = replace(base, cutout=10)
    views = [augmentation.training_view(5, 1, index, 40, 40) for index in range(2000)]
    assert [replace(view, cutout=None) for view in views] == [
        base.training_view(5, 1, index, 40, 40) for index in range(2000)
    ]
    corners = np.array([(view.cutout.top, view.cutout.left) for view in views if view.cutout])
    assert len(corners) == 2000 and corners.min() == -5 and corners.max() == side - 6  # its middle is in the image
    assert np.abs(corners.mean(0) + 5 - (side - 1) / 2).max() < 0.05 * side
    for view in views[:50]:
        with_cutout, without = (rendered(image, one, side) for one in (view, replace(view, cutout=None)))
        assert view.cutout is not None
        rows, columns = (range(max(0, at), min(side, at + 10)) for at in (view.cutout.top, view.cutout.left))
        expected = without.copy()
        expected[np.ix_(rows, columns)] = 0
        assert np.array_equal(with_cutout, expected)
    assert augmentation.evaluation_view(40, 40) == base.evaluation_view(40, 40)


def test_shifts_equal_padded_views_drawn_one_by_one() -> None:
    augmentation = replace(PADDED, cutout=8)
    indices = np.array([3, 0, 12_345, 7])
    views = [augmentation.training_view(-9, 4, int(index), 32, 32) for index in indices]
    wanted = [[v.down, v.right, v.is_mirrored, v.cutout.top, v.cutout.left] for v in views if v.cutout]
    assert augmentation.shifts(-9, 4, indices).tolist() == wanted


def test_jitter_equals_plain_arithmetic() -> None:
    image, jitter = pixels(5, 20, 30), Jitter(1.3, 0.7, 1.2)
    grey = np.array([0.299, 0.587, 0.114])
    bright = np.clip(image * jitter.brightness, 0, 255)
    contrast = np.clip(bright * 0.7 + (bright @ grey).mean() * 0.3, 0, 255)
    expected = np.clip(contrast * 1.2 - (contrast @ grey)[..., None] * 0.2, 0, 255)
    found = jittered(torch.from_numpy(image.copy()), jitter).numpy()
    assert np.abs(found - expected).max() <= 0.51
    plain = jittered(torch.from_numpy(image.copy()), Jitter(1, 1, 1)).numpy()
    assert np.array_equal(plain, image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalization_equals_torchvisions_on_fractions(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (3, 5, 5, 3), dtype=torch.uint8)
    found = NORMALIZATIONS["imagenet"].apply(images, dtype)
    mean, std = (torch.tensor(v, dtype=dtype).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found, (images.permute(0, 3, 1, 2).to(dtype) / 255 - mean) / std)
    published = NORMALIZATIONS["published"].apply(torch.full((1, 1, 1, 3), 200, dtype=torch.uint8), torch.float64)
    expected = [(200 - 123.68) / 58.393, (200 - 116.779) / 57.12, (200 - 103.939) / 57.375]
    assert published.flatten().tolist() == pytest.approx(expected)


def test_normalization_takes_a_name_or_numbers() -> None:
    assert parse_normalization("1,2,3/4,5,6") == Normalization((1, 2, 3), (4, 5, 6))
    for wrong in ("imagnet", "1,2,3", "1,2,3/4,5", "1,2,3/0,1,1", "a,b,c/d,e,f", "1,2,3/4,5,6/7,8,9"):
        with pytest.raises(ValueError, match="imagenet or published"):
            parse_normalization(wrong)
