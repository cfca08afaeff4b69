"""Token files: windows in the run's order, text converted piece by piece, and one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagewright.cli.main import main
from stagewright.config.sources import SourceOptions
from stagewright.data.formats import text
from stagewright.data.formats.records import DataError
from stagewright.data.formats.text import convert_text, open_tokenizer
from stagewright.data.formats.tokens import TokenSource
from stagewright.data.loader import make_loaders
from stagewright.data.order import DataChanged, Order, Position, ReplicaSlice, TrainingSampler
from stagewright.data.pool import LoaderOptions
from stagewright.data.sources import open_source
from stagewright.metrics import ThroughputUnit
from tests.commands import fails


def write_tokens(path: Path, tokens: Any, kind: str = "<u2", about: object = None) -> str:
    path.write_bytes(np.asarray(tokens).astype(kind).tobytes())
    if about is not None:
        Path(f"{path}.json").write_text(about if isinstance(about, str) else json.dumps(about))
    return str(path)


def test_samples_are_windows_with_their_next_tokens(tmp_path: Path) -> None:
    source = TokenSource(write_tokens(tmp_path / "t.bin", range(10)), 4)
    fields = source.batch(np.array([1, 0]))
    assert len(source) == 2 and source.classes == 10 and source.unit == ThroughputUnit("tokens", 4)
    assert fields["input_ids"].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]] and source.targets == ("targets",)
    assert fields["targets"].tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in fields.values())
    assert len(TokenSource(str(tmp_path / "t.bin"), 9)) == 1


def test_tokens_have_32_bits_where_name_or_sidecar_say_so(tmp_path: Path) -> None:
    about = {"dtype": "uint32", "vocabulary": 80_000, "tokens": 3, "tokenizer": "x"}
    for name, sidecar, classes in (("t.u32", None, 70_001), ("t.bin", about, 80_000)):
        source = TokenSource(write_tokens(tmp_path / name, [70_000, 1, 2], "<u4", sidecar), 2)
        assert source.batch(np.array([0]))["input_ids"].tolist() == [[70_000, 1]] and source.classes == classes


def test_the_loader_gives_the_windows_of_the_order_and_resumes_in_it(tmp_path: Path) -> None:
    source = TokenSource(write_tokens(tmp_path / "t.bin", range(201)), 5)
    order = Order(len(source), 8, seed=3)
    sampler = TrainingSampler(order, 2)
    (loader,) = make_loaders(LoaderOptions(torch.bfloat16), (source, ReplicaSlice(sampler, 1, 30)))
    for number in (0, 1, 11, 29):
        windows = [list(range(5 * index, 5 * index + 5)) for index in order.microbatch(number, 2)]
        assert loader.microbatch(number)["input_ids"].tolist() == windows
    seen = np.concatenate([order.microbatch(number, 2) for number in range(10)])
    assert sorted(seen) == list(range(40))
    position = Position.at(order, 7, source.fingerprint)
    assert position.resume(order, TokenSource(str(tmp_path / "t.bin"), 5).fingerprint) == 7
    with pytest.raises(DataChanged):
        position.resume(order, TokenSource(str(tmp_path / "t.bin"), 4).fingerprint)
    (tmp_path / "t.bin").write_bytes(bytes(402))
    with pytest.raises(DataChanged):
        position.resume(order, TokenSource(str(tmp_path / "t.bin"), 5).fingerprint)


def test_a_limit_takes_windows_evenly_spread(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.bin", range(41))
    source = open_source(f"tokens:{path}", SourceOptions(limit=4, context=4))
    assert source.batch(np.arange(4))["input_ids"][:, 0].tolist() == [0, 8, 20, 28]
    assert source.targets == ("targets",) and source.unit == ThroughputUnit("tokens", 4) and source.classes == 41


@pytest.mark.parametrize(
    ("tokens", "about", "pieces"),
    [
        (b"abc", None, ["3 bytes", "2"]),
        (b"abcdef", None, ["3 tokens", "takes 5", "--context 2"]),
        (b"", None, ["0 tokens"]),
        (bytes(20), {"dtype": "uint16", "vocabulary": 3, "tokens": 9}, ["10 tokens", "says 9"]),
        (bytes(20), {"dtype": "uint8", "vocabulary": 3, "tokens": 10}, ["no dtype"]),
        (bytes(20), {"dtype": "uint16", "vocabulary": "3", "tokens": 10}, ["vocabulary"]),
        (bytes(20), {"dtype": "uint16", "vocabulary": True, "tokens": 10}, ["vocabulary"]),
        (bytes(20), "[" * 9999, ["is not JSON"]),
        (bytes(20), "\x00", ["is not JSON"]),
        (bytes(22), {"dtype": "uint32", "vocabulary": 3, "tokens": 5}, ["22 bytes", "4"]),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tokens: bytes, about: object, pieces: list[str], tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.bin", np.frombuffer(tokens, np.uint8), "u1", about)
    with pytest.raises(DataError) as caught:
        TokenSource(path, 4)
    assert all(piece in str(caught.value) for piece in (*pieces, path)) and "\n" not in str(caught.value)


def test_missing_files_and_folders_are_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(DataError, match=f"tokens file {path}: "):
            TokenSource(str(path), 4)


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    about = {"dtype": "uint16", "vocabulary": 7, "tokens": 9}
    source = TokenSource(write_tokens(tmp_path / "t.bin", [0, 1, 2, 3, 4, 5, 7, 0, 0], about=about), 4)
    assert source.batch(np.array([0]))["targets"].max() == 4
    with pytest.raises(DataError, match=r"token 7 at position 6.* 7"):
        source.batch(np.array([1]))


def test_a_file_that_shrank_is_one_line(tmp_path: Path) -> None:
    source = TokenSource(write_tokens(tmp_path / "t.bin", range(10)), 4)
    (tmp_path / "t.bin").write_bytes(bytes(8))
    with pytest.raises(DataError, match="0 of 10 bytes"):
        source.batch(np.array([1]))


def test_text_becomes_bytes_and_a_second_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = "".join(f"line {number} of a störy\n" for number in range(100)).encode()
    (tmp_path / "story.txt").write_bytes(story)
    arguments = ["data", "convert", f"text:{tmp_path}/story.txt", f"tokens:{tmp_path}/out/t.bin"]
    main([*arguments, "--val-fraction", "0.1", "--json"])
    done = json.loads(capsys.readouterr().out)
    parts = [np.fromfile(one["path"], "<u2").astype(np.uint8).tobytes() for one in done]
    assert b"".join(parts) == story and parts[0].endswith(b"\n") and 0.05 < len(parts[1]) / len(story) <= 0.1
    assert [one["path"] for one in done] == [f"{tmp_path}/out/t.bin", f"{tmp_path}/out/t.val.bin"]
    assert TokenSource(done[1]["path"], 16).classes == 256
    assert "exists already" in fails(capsys, *arguments)
    assert len(list((tmp_path / "out").iterdir())) == 4  # two files and their sidecars


def word_tokenizer(path: Path) -> Path:
    library = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(50)} | {"[UNK]": 50, "ü": 70_000}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("separator", ["\n", " "])
def test_a_tokenizer_gives_the_same_tokens_in_pieces(
    separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE", 97)
    words = [number % 50 if number % 7 else 70_000 for number in range(300)]
    lines = [separator.join("ü" if word == 70_000 else f"w{word:02}".replace("w0", "w") for word in words)]
    (tmp_path / "t.txt").write_text(separator.join(lines))
    tokenizer = open_tokenizer(str(word_tokenizer(tmp_path / "tokenizer.json")))
    (done,) = convert_text(str(tmp_path / "t.txt"), str(tmp_path / "t.bin"), tokenizer)
    found = np.fromfile(done.path, "<u4").tolist()
    assert done.vocabulary == 70_001 and json.loads(Path(f"{done.path}.json").read_text())["dtype"] == "uint32"
    if separator == "\n":
        assert found == words
    else:  # one long line: a word is split where a piece ends, and no character is
        assert abs(len(found) - 300) < 20 and found.count(70_000) == words.count(70_000)


@pytest.mark.parametrize(
    ("make", "piece"),
    [
        (lambda folder: (folder / "t.txt").write_bytes(b"w1 w2\n\xff\n"), "not UTF-8 at byte 6"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json can't be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "No such file"),
        (lambda folder: (folder / "t.txt").unlink(), "No such file"),
        (lambda folder: (folder / "t.txt").write_text(""), "0 bytes"),
        (lambda folder: (folder / "t.txt").write_text("   "), "no tokens"),
    ],
)
def test_text_that_cannot_be_converted_is_one_line_and_leaves_no_file(
    make: Callable[[Path], object], piece: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "t.txt").write_text("w1 w2")
    make(tmp_path)
    arguments = ("--tokenizer", f"{tmp_path}/tokenizer.json")
    line = fails(capsys, "data", "convert", f"text:{tmp_path}/t.txt", f"tokens:{tmp_path}/out/t.bin", *arguments)
    assert piece in line and not list(tmp_path.glob("out/*"))


def test_options_of_text_and_of_images_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text("x")
    for options in (
        (f"tar:{tmp_path}",),
        (f"tokens:{tmp_path}/t", "--limit", "3"),
        (f"tokens:{tmp_path}/t", "--per-part", "5000"),
        (f"tokens:{tmp_path}/t", "--val-fraction", "0.5"),
    ):
        fails(capsys, "data", "convert", f"text:{tmp_path}/t.txt", *options)
    assert "--val-fraction" in fails(
        capsys, "data", "convert", str(tmp_path), f"tar:{tmp_path}/x", "--val-fraction", "0.1"
    )


def test_a_context_needs_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tokens:FILE" in fails(capsys, "train", "--context", "8", "--steps", "1")
    assert "--context" in fails(capsys, "train", "--data", "tokens:x", "--context", "0", "--steps", "1")
