"""Images with masks: one crop for both, proven by pixels that encode their own coordinates."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from stagewright.config.rules import check_rules
from stagewright.config.sources import SourceOptions
from stagewright.data.augment import Augmentation, Cropping
from stagewright.data.datasets import open_listed
from stagewright.data.decode import NORMALIZATIONS, Decoder
from stagewright.data.formats.fields import IGNORED
from stagewright.data.formats.index import is_below, save_index
from stagewright.data.formats.records import BadRecordError, DataError
from stagewright.data.loader import make_loaders
from stagewright.data.order import AugmentSeed, EvaluationSampler, Order, ReplicaSlice, TrainingSampler
from stagewright.data.pool import Decode, LoaderOptions
from stagewright.data.segmentation import MaskLabels, decode_mask, mask_of
from stagewright.data.sources import ImageSource, open_source
from stagewright.errors import UserError
from tests.pictures import encoded

SIDE = 32


def place_picture(height: int, width: int) -> tuple[Image.Image, Image.Image]:
    """An image whose red is the row and green the column, and a mask that tells the same, in 12 x 12 pieces."""
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 255 // (height - 1), columns * 255 // (width - 1), 0 * rows], 2).astype(np.uint8)
    mask = (rows * 12 // height * 12 + columns * 12 // width).astype(np.uint8)
    return Image.fromarray(pixels), Image.fromarray(mask)


def make_pairs(root: Path, count: int = 6, height: int = 60, width: int = 80) -> Path:
    for number in range(count):
        image, mask = place_picture(height, width)
        stem = f"deep/{number}" if number % 2 else str(number)
        for kind, picture in (("images", image), ("masks", mask)):
            path = root / kind / f"{stem}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    return root


def source_of(root: Path, **options: object) -> ImageSource:
    source = open_source(f"segmentation:{root}", SourceOptions(SIDE, **options))  # type: ignore[arg-type]
    assert isinstance(source, ImageSource)
    return source


@pytest.mark.parametrize("cropping", ["resized", "padded"])
def test_image_and_mask_get_the_same_crop(cropping: str, tmp_path: Path) -> None:
    source = source_of(make_pairs(tmp_path, 2), cropping=cropping)
    images, labels = source.allocate(1)
    mirrored = 0
    for epoch in range(40):
        seed = AugmentSeed(5, epoch)
        source.load(1, seed, images[0], labels[0], Decoder())
        view = source.view(seed, 1, 60, 80)
        mirrored += view.is_mirrored
        inside = labels[0] != IGNORED
        if cropping == "resized":
            assert inside.all()
        else:  # outside the image both are empty
            rows, columns = torch.arange(SIDE) + view.down, torch.arange(SIDE) + view.right
            exists = ((rows >= 0) & (rows < SIDE))[:, None] & ((columns >= 0) & (columns < SIDE))
            assert torch.equal(inside, exists) and not images[0][~exists].any()
        red, green, _ = images[0].float().unbind(2)
        row, column = red / 255 * 59, green / 255 * 79  # where each pixel was in the image
        found = labels[0].float()
        step = max(view.height / view.rows, view.width / view.columns)
        for place, piece, size in ((row, found.div(12).floor(), 5.0), (column, found % 12, 80 / 12)):
            off = (place - (piece + 0.5) * size).abs()[inside]
            assert off.max() < size / 2 + step + 1, (epoch, float(off.max()))
    assert 10 < mirrored < 30


def test_evaluation_gives_the_centre_of_both(tmp_path: Path) -> None:
    source = source_of(make_pairs(tmp_path, 1, 63, 95), cropping="resized")
    fields = source.batch(np.array([0]))
    _, mask = place_picture(63, 95)
    short = round(SIDE * 256 / 224)
    columns = short * 95 // 63
    resized = np.asarray(mask.resize((columns, short), Image.Resampling.NEAREST))
    top, left = round((short - SIDE) / 2), round((columns - SIDE) / 2)
    assert np.array_equal(fields["label"][0].numpy(), resized[top : top + SIDE, left : left + SIDE])
    assert fields["image"].shape == (1, 3, SIDE, SIDE) and fields["label"].dtype == torch.int64


def test_the_view_of_the_mask_is_that_of_the_image_whatever_the_view() -> None:
    """Drawn by Pillow's steps, one after another, for many sizes."""
    generator = np.random.default_rng(0)
    labels = MaskLabels(1000)
    for case in range(60):
        height, width = (int(size) for size in generator.integers(1, 50, 2))
        mask = torch.arange(height * width, dtype=torch.int32).view(height, width)
        augmentation = Augmentation(16, list(Cropping)[case % 2], cutout=case % 3)
        view = augmentation.training_view(0, case, 0, height, width)
        target = labels.allocate(1, 16)[0]
        labels.draw(mask, view, target)
        box = mask[view.top : view.top + view.height, view.left : view.left + view.width]
        box = box.flip(1) if view.is_mirrored else box
        resized = torch.nn.functional.interpolate(
            box[None, None].double(), (view.rows, view.columns), mode="nearest-exact"
        )
        border = (-view.right, view.right + 16 - view.columns, -view.down, view.down + 16 - view.rows)
        wanted = torch.nn.functional.pad(resized, border, value=IGNORED)[0, 0].long()
        if view.cutout is not None:
            view.cutout.apply(wanted, IGNORED)
        rows, columns = torch.arange(16) + view.down, torch.arange(16) + view.right
        ties = (2 * rows + 1) * view.height % (2 * view.rows) == 0  # two pixels are as near
        other_ties = (2 * columns + 1) * view.width % (2 * view.columns) == 0
        assert ((target == wanted) | ties[:, None] | other_ties).all()


def test_jitter_leaves_the_mask_alone(tmp_path: Path) -> None:
    make_pairs(tmp_path, 1)
    plain, coloured = (source_of(tmp_path, jitter=jitter) for jitter in (0.0, 0.5))
    (one, label), (other, same) = (source.allocate(1) for source in (plain, coloured))
    view = coloured.augmentation.training_view(0, 0, 0, 60, 80)
    coloured.load(0, AugmentSeed(0, 0), other[0], same[0], Decoder())
    assert view.jitter is not None
    coloured.labels.draw(coloured.labels.read(coloured.records.get(0), 60, 80), view, label[0])
    assert torch.equal(label, same) and not torch.equal(one, other)


def test_masks_hold_classes_of_grey_palette_or_bits(tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=np.uint8).reshape(3, 4)
    palette = Image.fromarray(numbers)
    palette.putpalette(list(range(255, -1, -1)) * 3)
    deep = Image.fromarray(numbers.astype(np.uint16) * 300)
    for image, wanted in ((Image.fromarray(numbers), numbers), (palette, numbers), (deep, numbers.astype(int) * 300)):
        assert np.array_equal(decode_mask(encoded(image, "PNG")), wanted)
    assert np.array_equal(decode_mask(encoded(Image.fromarray(numbers > 5), "PNG")), numbers > 5)


def test_255_and_what_is_outside_are_ignored_and_classes_are_counted(tmp_path: Path) -> None:
    make_pairs(tmp_path, 2)
    mask = np.zeros((60, 80), np.uint8)
    mask[:, 40:] = 255
    Image.fromarray(mask).save(tmp_path / "masks/0.png")
    source = source_of(tmp_path)
    assert source.classes == 144 and len(source) == 2 and list(tmp_path.glob(".stagewright-*.index"))
    label = source.batch(np.array([0]))["label"][0]
    assert set(label.unique().tolist()) == {0, IGNORED} and (label[:, 20:] == IGNORED).all()
    names = tmp_path / "classes.txt"
    names.write_text("\n".join(f"class {number}" for number in range(150)))
    assert source_of(tmp_path).classes == 150


def test_masks_come_through_the_loader_threads_in_order(tmp_path: Path) -> None:
    source = source_of(make_pairs(tmp_path))
    order = Order(6, 6, seed=1)
    training = ReplicaSlice(TrainingSampler(order, 2), 1, 4)
    (loader,) = make_loaders(LoaderOptions(torch.float64, threads=3), (source, training))
    for number in (0, 1, 3):
        fields = loader.microbatch(number)
        assert fields["label"].shape == (3, SIDE, SIDE) and fields["image"].dtype == torch.float64
        for row, index in enumerate(order.microbatch(number, 2)):
            images, labels = source.allocate(1)
            source.load(int(index), training.sampler.augment_seed(number), images[0], labels[0], Decoder())
            assert torch.equal(fields["label"][row], labels[0])
    loader.close()


def test_bad_pairs_are_replaced_and_named(tmp_path: Path) -> None:
    make_pairs(tmp_path)
    wrong = {"0": Image.new("L", (3, 3)), "2": Image.new("RGB", (80, 60))}
    for stem, image in wrong.items():
        image.save(tmp_path / f"masks/{stem}.png")
    (tmp_path / "masks/4.png").write_bytes(b"\x89PNG no")
    (tmp_path / "images/deep/1.png").write_bytes(b"no")
    bad = []
    (loader,) = make_loaders(
        LoaderOptions(max_bad=9, on_bad=bad.append), (source_of(tmp_path), ReplicaSlice(EvaluationSampler(6, 6), 1, 1))
    )
    assert loader.microbatch(0)["label"].shape == (6, SIDE, SIDE)
    loader.close()
    reasons = {one.reason.partition("images/")[2] for one in bad}
    assert {reason[:10] for reason in reasons} == {"0.png has ", "2.png: its", "4.png: its", "deep/1.png"}
    assert any("60x80" in reason and "3x3" in reason for reason in reasons)
    assert any("RGB" in reason for reason in reasons)


def test_a_mask_that_changed_to_unknown_classes_is_bad(tmp_path: Path) -> None:
    source = source_of(make_pairs(tmp_path, 2))
    Image.new("L", (80, 60), 200).save(tmp_path / "masks/0.png")
    _, _, bad = source.first_good(0, Decoder())
    assert "class 200" in bad[0].reason and "144 classes" in bad[0].reason


def test_a_missing_partner_is_one_line(tmp_path: Path) -> None:
    for missing in ("masks", "images"):
        make_pairs(tmp_path)
        (tmp_path / missing / "deep/3.png").unlink()
        with pytest.raises(DataError, match=f"deep/3.png has no partner in {missing}.*1 file of 11"):
            open_listed("segmentation", str(tmp_path))
    make_pairs(tmp_path)
    (tmp_path / "images/0.jpg").write_bytes((tmp_path / "images/0.png").read_bytes())
    with pytest.raises(DataError, match=r"0\.jpg and .*0\.png"):
        open_listed("segmentation", str(tmp_path))
    with pytest.raises(DataError, match="no folder images"):
        open_listed("segmentation", str(tmp_path / "masks"))


def test_grey_values_of_fewer_bits_are_refused_not_scaled() -> None:
    header = bytearray(encoded(Image.new("L", (4, 4)), "PNG"))
    header[24] = 2
    with pytest.raises(BadRecordError):
        decode_mask(bytes(header))


def test_every_name_of_an_index_has_a_mask_below_the_root() -> None:
    assert mask_of("images/a.b/c.d.jpg") == "masks/a.b/c.d.png"
    for forged in ("x", "images", "images/", "a/images/b", ".", "/", "a/.jpg"):
        assert mask_of(forged).startswith("masks/") and mask_of(forged).endswith(".png")
        assert is_below(mask_of(forged))


def test_a_forged_index_gives_pairs_of_its_data_set_alone(tmp_path: Path) -> None:
    records = open_listed("segmentation", str(make_pairs(tmp_path, 1)))
    (path,) = tmp_path.glob(".stagewright-*.index")
    for name in (b"../aaaaa.png", b"masks/a0.png", b"imagesimages", b"////////////"):
        names = np.frombuffer(name, np.uint8)
        save_index(path, replace(records.index, names=names, name_end=np.array([len(names)])))
        forged = open_listed("segmentation", str(tmp_path))
        assert len(forged) == 1 and is_below(forged.index.name(0))
        with suppress(BadRecordError):
            forged.get(0)


@pytest.mark.parametrize("decode", ["gpu", "once"])
def test_masks_are_decoded_on_the_cpu_alone(decode: str, tmp_path: Path) -> None:
    values = {"--decode": decode, "--data": f"segmentation:{tmp_path}", "--device": "cuda", "--jitter": 0}
    with pytest.raises(UserError, match="--decode cpu"):
        check_rules(values, {"--decode"})
    source = ImageSource(
        open_listed("segmentation", str(make_pairs(tmp_path, 1))),
        Augmentation(SIDE, Cropping.PADDED),
        NORMALIZATIONS["imagenet"],
        MaskLabels(200),
    )
    with pytest.raises(UserError, match="--decode cpu"):
        make_loaders(LoaderOptions(decode=Decode(decode)), (source, ReplicaSlice(EvaluationSampler(1, 1), 1, 1)))


def test_masks_are_decoded_once_and_again_when_a_folder_changes(tmp_path: Path) -> None:
    seen: list[int] = []
    make_pairs(tmp_path, 4)
    first = open_listed("segmentation", str(tmp_path), progress=seen.append)
    assert seen and len(first) == 4
    seen.clear()
    assert (
        open_listed("segmentation", str(tmp_path), progress=seen.append).fingerprint == first.fingerprint and not seen
    )
    make_pairs(tmp_path, 6)
    again = open_listed("segmentation", str(tmp_path), progress=seen.append)
    assert seen and len(again) == 6 and again.fingerprint != first.fingerprint


def test_a_limit_keeps_pairs_together(tmp_path: Path) -> None:
    make_pairs(tmp_path, 4)
    for number, stem in enumerate(("0", "2", "deep/1", "deep/3")):  # the order of the records
        Image.new("L", (80, 60), number).save(tmp_path / f"masks/{stem}.png")
        Image.new("RGB", (80, 60), (number, 0, 0)).save(tmp_path / f"images/{stem}.png")
    fields = source_of(tmp_path, limit=2, normalize="0,0,0/1,1,1").batch(np.arange(2))
    assert fields["label"][:, 16, 16].tolist() == fields["image"][:, 0, 16, 16].tolist() == [0, 2]
