"""Mutated data sets of every kind, class names and indices: the readers return records or raise their own error.

Nothing else is raised, nothing from outside a data set is returned, and no input takes more than `_MOST_MEMORY` bytes
or `_MOST_SECONDS` of CPU time.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from stagewright.config.sources import SourceOptions
from stagewright.data.datasets import Kind, open_records
from stagewright.data.decode import Decoder, decode_record
from stagewright.data.formats.index import Watched, load_index, save_index
from stagewright.data.formats.ofrecord import OFRecordError, scan_part
from stagewright.data.formats.records import BadRecordError, DataError
from stagewright.data.formats.tar import TarError, scan_shard
from stagewright.data.formats.tensors import TensorSource
from stagewright.data.formats.text import convert_text, open_tokenizer
from stagewright.data.formats.tokens import TokenSource
from stagewright.data.sources import open_source, with_transforms
from stagewright.data.survey import survey
from stagewright.errors import UserError
from tests.limits import cpu_time, more_memory
from tests.mutations import mutated, with_header_length
from tests.pictures import (
    bytes_feature,
    encoded,
    frame,
    int_feature,
    jpeg,
    make_folder,
    make_ofrecord,
    make_tar,
    message,
    pixels,
    samples_of,
)

CASES = int(os.environ.get("STAGEWRIGHT_FUZZ", "20000"))  # per reader; `make soak` sets many more
FILES = CASES // 1000  # mutated files per reader, each opened, scanned and decoded
_MOST_MEMORY = 3 * 2**30  # an image of 100 million pixels takes 0.9 GB (JPEG) to 2.1 GB (WebP)
_MOST_SECONDS = 20.0
_SECRET = b"nothing of this may be read"


def with_checksums(data: bytes) -> bytes:
    """Headers with correct checksums, so that the reader gets past them."""
    blocks = bytearray(data)
    for first in range(0, len(blocks) - 511, 512):
        header = blocks[first : first + 512]
        if header[257:262] == b"ustar":
            total = sum(header[:148]) + 256 + sum(header[156:])
            blocks[first + 148 : first + 156] = b"%06o\0 " % total
    return bytes(blocks)


def scan_ofrecord(data: bytes) -> int:
    found = list(scan_part(io.BytesIO(data), len(data), "part-0"))
    assert all(0 <= offset <= offset + length <= len(data) and label >= -1 for offset, length, label in found)
    return len(found)


def scan_tar(data: bytes) -> int:
    found = list(scan_shard(io.BytesIO(data), len(data), "shard.tar", {"cat": 1}))
    assert all(0 <= first <= first + size <= len(data) and label >= -1 for first, size, label, _ in found)
    return len(found)


def seeds_ofrecord() -> list[bytes]:
    rich = bytes_feature("class/text", b"a cat") + int_feature("height", 500) + message(b"\xff\xd8 image", 4)
    unpacked = bytes_feature("encoded", b"x") + int_feature("class/label", 300, kind=5, is_packed=False)
    return [frame(message(b"a", 1)) * 3, frame(rich) + frame(unpacked), frame(unpacked) * 2 + frame(rich)]


def seeds_tar(folder: Path) -> list[bytes]:
    members = [("a.jpg", b"image"), ("a.cls", b"1"), ("b.jpg", b"x" * 700), ("b.json", b'{"label": 3}')]
    long = [("d" * 150 + ".jpg", b"y"), ("ü.jpg", b"z"), ("ü.cls", b"2")]
    return [
        make_tar(folder / f"{kind}.tar", members if kind == 0 else members + long, kind).read_bytes()[: 512 * 24]
        for kind in (0, 1, 2)
    ]


def fuzz(scan: Callable[[bytes], int], seeds: list[bytes], error: type[Exception], repair: bool) -> tuple[int, int]:
    """How many mutated inputs were read to the end and how many rejected; other exceptions pass through."""
    generator = random.Random(0)
    whole = rejected = 0
    for number in range(CASES):
        data = mutated(seeds[number % len(seeds)], generator)
        if repair and number % 4:
            data = with_checksums(data)
        try:
            scan(data)
            whole += 1
        except error as caught:
            assert "part-0" in str(caught) or "shard.tar" in str(caught)
            rejected += 1
    return whole, rejected


@pytest.mark.timeout(1800 + CASES // 100)
def test_mutated_ofrecord_parts_are_read_or_rejected() -> None:
    seeds = seeds_ofrecord()
    assert [scan_ofrecord(seed) for seed in seeds] == [3, 2, 3]
    whole, rejected = fuzz(scan_ofrecord, seeds, OFRecordError, repair=False)
    assert whole + rejected == CASES and min(whole, rejected) > CASES // 50


@pytest.mark.timeout(1800 + CASES // 100)
def test_mutated_tar_shards_are_read_or_rejected(tmp_path: Path) -> None:
    seeds = seeds_tar(tmp_path)
    assert [scan_tar(seed) for seed in seeds] == [2, 4, 4]
    whole, rejected = fuzz(scan_tar, seeds, TarError, repair=True)
    assert whole + rejected == CASES and min(whole, rejected) > CASES // 50


Found = list[tuple[bytes, int] | str]


@pytest.fixture
def within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("STAGEWRIGHT_CACHE", str(tmp_path / "cache"))
    with more_memory(_MOST_MEMORY):
        yield


@contextmanager
def one_case(number: int) -> Iterator[None]:
    """Run one case in bounded time; an exception says which case it was."""
    try:
        with cpu_time(_MOST_SECONDS):
            yield
    except BaseException as error:
        error.add_note(f"case {number}")
        raise


def use(text: str, class_names: str | None = None) -> Found | None:
    """Everything that a data set contains, an error's text for a bad record; None if it is refused."""
    try:
        records = open_records(text, class_names)
    except UserError as error:
        assert str(error)
        return None
    found: Found = []
    decoder = Decoder()
    for index in range(len(records)):
        try:
            assert _SECRET not in records.get(index).data
            record, decoded = decode_record(records, index, decoder)
            assert decoded.ndim == 3 and decoded.size and 0 <= record.label < records.classes
            found.append((record.data, record.label))
        except BadRecordError as error:
            found.append(str(error))
    assert len(survey(records, 2).per_class) == records.classes
    return found


def make_set(kind: Kind, root: Path) -> tuple[str, Path]:
    """A data set of six records, and the file of it that is mutated; a secret lies beside it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    (root.parent / "secret.jpg").write_bytes(b"\xff\xd8" + _SECRET)
    if kind is Kind.OFRECORD:
        return f"ofrecord:{make_ofrecord(root, 6, parts=2)}", root / "part-00001"
    if kind is Kind.TAR:
        return f"tar:{root}", make_tar(root / "a.tar", samples_of(6))
    return make_folder(root, {f"{index // 3}/{index:016}.jpg": jpeg(index) for index in range(6)}), root


@pytest.mark.timeout(1800 + FILES)
@pytest.mark.parametrize("kind", [Kind.OFRECORD, Kind.TAR])
def test_mutated_parts_are_used_or_refused(kind: Kind, tmp_path: Path, within_limits: None) -> None:
    text, path = make_set(kind, tmp_path / "data")
    whole, generator = path.read_bytes(), random.Random(f"file {kind}")
    honest, outcomes = use(text), set[bool]()
    for number in range(FILES):
        data = mutated(whole, generator)
        path.write_bytes(with_checksums(data) if kind is Kind.TAR and number % 4 else data)
        with one_case(number):
            found = use(text)
            assert found == use(text)  # from the index, if there is one
        outcomes.add(found is None)
    assert honest is not None and all(isinstance(one, tuple) for one in honest)
    assert FILES < 50 or outcomes == {True, False}


def images() -> list[bytes]:
    """A small image in every format and in the colours that take other ways through the decoders."""
    picture = Image.fromarray(pixels(0, 24, 30))
    kinds = ("PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF")
    modes = [
        *(("CMYK", "JPEG"), ("L", "JPEG"), ("RGBA", "PNG"), ("P", "PNG"), ("I;16", "PNG")),
        *(("1", "TIFF"), ("P", "GIF")),
    ]
    return [
        *(jpeg(0, 24, 30), jpeg(0, 24, 30, progressive=True), jpeg(0, 24, 30, restart_marker_blocks=1)),
        *(encoded(picture, kind) for kind in kinds),
        encoded(picture, "TIFF", compression="tiff_lzw"),
        encoded(picture, "TIFF", compression="jpeg"),
        *(
            encoded(picture.convert("L").convert(mode) if mode == "I;16" else picture.convert(mode), kind)
            for mode, kind in modes
        ),
    ]


@pytest.mark.timeout(1800 + FILES)
@pytest.mark.filterwarnings("ignore")  # Pillow's, about what it reads
def test_mutated_images_are_decoded_or_bad_records(tmp_path: Path, within_limits: None) -> None:
    seeds, generator = images(), random.Random("images")
    good = encoded(Image.new("RGB", (20, 20)), "PNG")
    path = tmp_path / "data/a/0.jpg"
    source = with_transforms(
        open_records(make_folder(tmp_path / "data", {"a/0.jpg": good, "a/1.png": good})), SourceOptions(16, "resized")
    )
    for seed in seeds:
        path.write_bytes(seed)
        assert not source.first_good(0, Decoder())[2]
    bad = 0
    for number in range(2 * FILES):
        path.write_bytes(mutated(seeds[number % len(seeds)], generator))
        with one_case(number):
            source.batch(np.array([0]))
            bad += len(source.first_good(0, Decoder())[2])
    assert FILES < 50 or 0 < bad < 2 * FILES


@pytest.mark.timeout(1800 + FILES)
@pytest.mark.parametrize("kind", list(Kind))
def test_a_mutated_index_changes_nothing(kind: Kind, tmp_path: Path, within_limits: None) -> None:
    text, _ = make_set(kind, tmp_path / "data")
    honest, generator = use(text), random.Random(f"index {kind}")
    (path,) = (tmp_path / "data").glob(".stagewright-*.index")
    whole = path.read_bytes()
    for number in range(FILES):
        path.write_bytes(with_header_length(mutated(whole, generator)) if number % 2 else mutated(whole, generator))
        with one_case(number):
            assert use(text) == honest


@pytest.mark.timeout(1800 + FILES)
@pytest.mark.parametrize("kind", list(Kind))
def test_a_forged_index_gives_records_of_its_data_set_alone(kind: Kind, tmp_path: Path, within_limits: None) -> None:
    """With a correct hash, as someone may make it."""
    text, _ = make_set(kind, tmp_path / "data")
    honest, generator = use(text), random.Random(f"forged {kind}")
    (path,) = (tmp_path / "data").glob(".stagewright-*.index")
    index = load_index(path, tmp_path / "data")
    assert index is not None and honest is not None
    for number in range(FILES):
        changes: dict[str, Any] = {}
        for name in generator.sample([*_FORGED], generator.choice((1, 1, 2, 3))):
            changes[name] = _FORGED[name](getattr(index, name), generator)
        try:
            save_index(path, replace(index, **changes))
        except (TypeError, ValueError):  # not something that a file can hold
            continue
        with one_case(number):
            found = use(text)
            assert found is not None and len(found) == len(honest)


def _array(array: Any, generator: random.Random) -> Any:
    """Another array: other numbers, another length, type or shape."""
    copy = array.copy()
    few, most = int(np.iinfo(array.dtype).min), int(np.iinfo(array.dtype).max)
    match generator.randrange(8):
        case 0 | 1 | 2 | 3 if len(array):
            values = (0, 1, -1, 2, 255, 2**24, 2**28, few, most, most - 1)
            copy[generator.randrange(len(array))] = min(max(generator.choice(values), few), most)
        case 4:
            copy = array[: generator.randrange(len(array) + 1)]
        case 5:
            copy = array.astype(generator.choice((np.float64, np.int8, np.uint64, np.int32, np.uint8)))
        case 6:
            copy = array.reshape(generator.choice(((-1, 1), (1, -1), (1, 1, -1))))
        case _:
            copy = np.frombuffer(mutated(array.tobytes(), generator)[: array.nbytes].ljust(array.nbytes), array.dtype)
    return copy


def _names(names: Any, generator: random.Random) -> Any:
    """Names of the same length in all, of which some lead to somewhere else."""
    text, width = bytearray(names.tobytes()), names.size // 6
    if generator.randrange(3) == 0 and width > 16:  # one whole name
        at = width * generator.randrange(6)
        text[at : at + width] = b"..".ljust(width - len("secret.jpg"), b"/") + b"secret.jpg"
    for _ in range(generator.choice((1, 2))):
        piece = generator.choice((b"../secret.jpg", b"/", b"..", b"\0", b"../", b"/../../secret.jpg", b"\xff", b"./"))
        at = generator.randrange(max(1, len(text)))
        text[at : at + len(piece)] = piece
    return np.frombuffer(bytes(text[: names.size]), np.uint8)


_FORGED: dict[str, Callable[[Any, random.Random], Any]] = {
    **dict.fromkeys(("part", "offset", "length", "label", "name_end"), _array),
    "names": lambda value, generator: generator.choice((_array, _names, _names, _names))(value, generator),
    "fingerprint": lambda value, generator: generator.choice(("", "x", "\x1b[2J", "0" * 32, value[:-1])),
    "class_names": lambda value, generator: generator.choice(
        ((), (1,), (None, "x"), (*value, "x"), ([],), ("\ud800",))
    ),
    "watched": lambda value, generator: generator.choice(
        (
            (),
            value[:1],
            (*value, Watched("../secret.jpg", 1, 1)),
            (Watched("..", 0, 0),),
            (replace(value[0], size=2**62),),
        )
    ),
}


@pytest.mark.timeout(1800 + FILES)
def test_mutated_class_names_are_used_or_refused(tmp_path: Path, within_limits: None) -> None:
    generator, path = random.Random("names"), tmp_path / "names"
    texts = [make_set(kind, tmp_path / kind)[0] for kind in Kind]
    for number in range(FILES):
        path.write_bytes(mutated("0\n1\n2\nü\n3\nx y\n".encode(), generator))
        with one_case(number):
            use(texts[number % 3], str(path))


@pytest.mark.timeout(1800 + FILES)
def test_mutated_tensors_are_used_or_refused(tmp_path: Path, within_limits: None) -> None:
    generator, path = random.Random("tensors"), tmp_path / "t.safetensors"
    tensors = {"images": torch.arange(36, dtype=torch.uint8).reshape(3, 3, 2, 2), "labels": torch.arange(3)}
    save_file(tensors, path, {"note": "x"})
    whole, refused = path.read_bytes(), 0
    size = 8 + int(struct.unpack("<Q", whole[:8])[0])
    for number in range(2 * FILES):
        data = mutated(whole, generator)
        if number % 2:
            header = json.loads(whole[8:size])
            about = header[generator.choice(("images", "labels"))]
            about[generator.choice(("shape", "dtype", "data_offsets"))] = generator.choice(
                ([], [0], [3, 12], [0, 60], [24, 60], [-1], [2**62, 2**62], "F8_E4M3", "F4", "U64", "BOOL", "C64", 3)
            )
            data = with_header_length(bytes(8) + json.dumps(header).encode() + whole[size:])
        path.write_bytes(data)
        with one_case(number):
            try:
                source = TensorSource(str(path))
                if len(source):
                    source.batch(np.array([0, len(source) - 1]))
                assert source.classes >= 0 and source.fingerprint
            except UserError:
                refused += 1
    assert FILES < 50 or 0 < refused < 2 * FILES


@pytest.mark.timeout(1800 + FILES)
def test_mutated_fields_are_used_or_refused(tmp_path: Path, within_limits: None) -> None:
    generator, path = random.Random("fields"), tmp_path / "t.safetensors"
    fields = {"ids": torch.arange(6, dtype=torch.int32).view(3, 2), "label_a": torch.arange(3), "target": torch.ones(3)}
    save_file(fields, path)
    whole = path.read_bytes()
    for number in range(2 * FILES):
        data = mutated(whole, generator)
        path.write_bytes(with_header_length(data) if number % 2 else data)
        with one_case(number), suppress(UserError):
            source = TensorSource(str(path))
            if len(source):
                assert {len(tensor) for tensor in source.batch(np.array([0, len(source) - 1])).values()} == {2}
            assert (
                source.classes >= 0
                and source.fingerprint
                and set(source.targets) < set(source.batch(np.array([], int)))
            )


@pytest.mark.timeout(1800 + FILES)
def test_mutated_tokens_are_used_or_refused(tmp_path: Path, within_limits: None) -> None:
    generator, path, sidecar = random.Random("tokens"), tmp_path / "t.bin", tmp_path / "t.bin.json"
    whole = np.arange(64, dtype="<u2").tobytes()
    about = b'{"dtype": "uint16", "vocabulary": 64, "tokens": 64, "tokenizer": "bytes"}'
    read = 0
    for number in range(8 * FILES):
        path.write_bytes(mutated(whole, generator) if number % 2 else whole)
        sidecar.write_bytes(about if number % 2 else mutated(about, generator))
        if number % 4 == 1:
            sidecar.unlink()
        with one_case(number), suppress(DataError):
            source = TokenSource(str(path), generator.choice((1, 7, 40)))
            fields = source.batch(np.array([0, len(source) - 1]))
            assert int(max(tensor.max() for tensor in fields.values())) < source.classes and source.fingerprint
            read += 1
    assert 0 < read < 8 * FILES


@pytest.mark.timeout(1800 + FILES)
@pytest.mark.filterwarnings("ignore")
def test_mutated_masks_are_drawn_or_bad_records(tmp_path: Path, within_limits: None) -> None:
    generator, numbers = random.Random("masks"), np.arange(400, dtype=np.uint8).reshape(20, 20) % 5
    palette = Image.fromarray(numbers)
    palette.putpalette(list(range(256)) * 3)
    deep = Image.fromarray(numbers.astype(np.uint16))
    seeds = [encoded(image, "PNG") for image in (Image.fromarray(numbers), palette, deep, Image.fromarray(numbers > 2))]
    for folder, data in (("images", jpeg(0, 20, 20)), ("masks", seeds[0])):
        for name in "ab":
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{name}.png").write_bytes(data)
    for number in range(4 * FILES):
        (tmp_path / "masks/a.png").write_bytes(mutated(seeds[number % 4], generator))
        for path in tmp_path.glob(".stagewright-*"):
            path.unlink()
        with one_case(number):
            source = open_source(f"segmentation:{tmp_path}", SourceOptions(image=16))
            label = source.batch(np.array([0]))["label"]
            assert label.min() >= -100 and label.max() < source.classes


@pytest.mark.timeout(1800 + FILES)
def test_mutated_tables_are_used_or_refused(tmp_path: Path, within_limits: None) -> None:
    generator, path = random.Random("tables"), tmp_path / "t.csv"
    (tmp_path / "a.png").write_bytes(jpeg(0, 20, 20))
    (tmp_path.parent / "secret.jpg").write_bytes(jpeg(1, 20, 20))
    for number in range(4 * FILES):
        path.write_bytes(mutated(b'path,x,"y y"\na.png,1.5,-2e3\n"a.png",0,7\n./a.png,1,1\n', generator))
        with one_case(number), suppress(DataError):
            source = open_source(f"table:{path}", SourceOptions(image=16))
            fields = source.batch(np.array([0, len(source) - 1]))
            assert fields["target"].isfinite().all() and len(fields["image"]) == 2


@pytest.mark.timeout(1800 + FILES)
def test_mutated_tokenizers_and_texts_are_used_or_refused(tmp_path: Path, within_limits: None) -> None:
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE({"a": 0, "b": 1, "ab": 2, " ": 3}, [("a", "b")]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    whole, generator = tokenizer.to_str().encode(), random.Random("tokenizers")
    path, target = tmp_path / "tokenizer.json", tmp_path / "t.bin"
    for number in range(2 * FILES):
        path.write_bytes(mutated(whole, generator) if number % 2 else whole)
        (tmp_path / "t.txt").write_bytes(mutated(b"ab ba\n aab \xc3\xbc b\n" * 3, generator))
        with one_case(number), suppress(DataError):
            (done,) = convert_text(str(tmp_path / "t.txt"), str(target), open_tokenizer(str(path)))
            TokenSource(done.path, 1).batch(np.array([0]))
        for left in tmp_path.glob("t.bin*"):
            assert not left.name.endswith(".part")
            left.unlink()
