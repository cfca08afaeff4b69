"""Converts a text file into tokens: by its bytes, or by a tokenizer file of the `tokenizers` library.

The text is read and written a piece at a time. With a tokenizer, pieces end before a line that begins with something
other than a space, where tokenizers split a text anyway; a line longer than a piece is split where the piece ends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stagewright.data.formats.records import DataError
from stagewright.data.formats.tokens import MOST_VOCABULARY, TokenFile, sidecar_path
from stagewright.errors import first_line
from stagewright.files import MOST_RECORD_BYTES, open_regular, read_text

PIECE = 2**18  # bytes of text that are tokenized at once
_BYTES = 256
_MOST_SHORT = 2**16  # the largest vocabulary whose tokens have 16 bits
_LINE_END = re.compile(rb"\n(?=[^\s])")
_REPLACEMENT = re.compile(rb"[\x80-\xbf]{0,3}")  # the rest of a character that began before


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One file that was written."""

    path: str
    tokens: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Turns pieces of text into token numbers."""

    name: str
    vocabulary: int
    encode: Callable[[bytes, int], NDArray[Any]]  # a piece, and where it begins in the file


def open_tokenizer(path: str | None) -> Tokenizer:
    """A tokenizer file; without one, tokens are bytes."""
    if path is None:
        return Tokenizer("bytes", _BYTES, lambda piece, start: np.frombuffer(piece, np.uint8))
    try:
        text = read_text(path, MOST_RECORD_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise DataError(f"tokenizer {path}: {reason}; give a tokenizer.json") from error
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise DataError("--tokenizer needs the tokenizers library; pip install tokenizers, or leave it out") from error
    try:
        library = Library.from_str(text)
        vocabulary = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    except BaseException as error:  # a panic of the library is no Exception
        raise _failed(error, f"tokenizer {path} can't be read", "; give a tokenizer.json") from error
    if not 0 < vocabulary <= MOST_VOCABULARY:
        raise DataError(f"tokenizer {path} has a vocabulary of {vocabulary}; 1 to {MOST_VOCABULARY} are possible")
    return Tokenizer(Path(path).name, vocabulary, partial(_encode, library, path, vocabulary))


def _failed(error: BaseException, what: str, advice: str = "") -> BaseException:
    """What an exception of the library means: ours, unless a user or a signal ended the process."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return error
    return DataError(f"{what} ({first_line(error)}){advice}")


def _encode(library: Any, path: str, vocabulary: int, piece: bytes, start: int) -> NDArray[Any]:
    try:
        text = piece.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"the text is not UTF-8 at byte {start + error.start}; convert it, or use bytes") from error
    try:
        numbers = np.array(library.encode(text, add_special_tokens=False).ids, np.int64)
    except BaseException as error:
        raise _failed(error, f"tokenizer {path} failed at byte {start} of the text") from error
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < vocabulary:
        raise DataError(f"tokenizer {path} gave token {numbers.max()}, but its vocabulary has {vocabulary}")
    return numbers


def convert_text(
    source: str,
    target: str,
    tokenizer: Tokenizer,
    val_fraction: float = 0.0,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Tokenized]:
    """Write the tokens of a text, and those of its end to a second file; neither may exist yet."""
    try:
        descriptor = open_regular(source)
    except OSError as error:
        raise DataError(f"text {source}: {error.strerror}; give a text file") from error
    try:
        size = os.fstat(descriptor).st_size
        ranges = [(target, 0, size)]
        if val_fraction:
            cut = _cut(descriptor, size, val_fraction)
            ranges = [(target, 0, cut), (validation_path(target), cut, size)]
        for path, start, stop in ranges:
            if start >= stop:
                raise DataError(f"text {source} has {size} bytes, which leaves none for {path}; give more text")
            if os.path.lexists(path) or os.path.lexists(sidecar_path(path)):
                raise DataError(f"{path} or its .json exists already; remove both or choose another file")
        return [_write(descriptor, start, stop, path, tokenizer, progress) for path, start, stop in ranges]
    except OSError as error:
        raise DataError(
            f"can't convert {source} to {target}: {error.strerror}; free some space or choose another file"
        ) from error
    finally:
        os.close(descriptor)


def validation_path(target: str) -> str:
    """`train.bin` and `train.val.bin`."""
    path = Path(target)
    return str(path.with_name(f"{path.stem}.val{path.suffix}"))


def _cut(descriptor: int, size: int, fraction: float) -> int:
    """Where the last part of a text begins: at a line, or at least at a character."""
    near = size - int(size * fraction)
    piece = os.pread(descriptor, PIECE, near)
    if near and (end := piece.find(b"\n")) >= 0 and near + end + 1 < size:
        return near + end + 1
    rest = _REPLACEMENT.match(piece)
    return near + (rest.end() if rest else 0)


def _pieces(descriptor: int, start: int, stop: int, *, by_lines: bool) -> Iterator[tuple[int, bytes]]:
    """A range of a file in pieces, and where each begins."""
    kept = b""
    while start < stop:
        read = os.pread(descriptor, min(PIECE, stop - start), start)
        if not read:
            raise DataError(f"the text ended at byte {start} of {stop}; it has changed since it was opened")
        begin, start, data = start - len(kept), start + len(read), kept + read
        end = len(data) if start >= stop or not by_lines else _last_end(data)
        kept = data[end:]
        yield begin, data[:end]


def _last_end(data: bytes) -> int:
    """Where the last line that is complete ends; without one, the last character."""
    ends = [found.end() for found in _LINE_END.finditer(data)]
    if ends:
        return ends[-1]
    for back in range(1, min(4, len(data)) + 1):
        if data[-back] & 0xC0 != 0x80:  # the first byte of a character
            return len(data) if data[-back] < 0x80 else (len(data) - back or len(data))
    return len(data)


def _write(
    descriptor: int, start: int, stop: int, path: str, tokenizer: Tokenizer, progress: Callable[[int], None]
) -> Tokenized:
    """Write one file of tokens and its sidecar, under other names until they are complete."""
    kind = "uint16" if tokenizer.vocabulary <= _MOST_SHORT else "uint32"
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with ExitStack() as undo:
        part = Path(f"{path}.{os.getpid()}.part")
        undo.callback(part.unlink, missing_ok=True)
        with part.open("xb") as file:
            for begin, piece in _pieces(descriptor, start, stop, by_lines=tokenizer.name != "bytes"):
                tokens = tokenizer.encode(piece, begin)
                file.write(tokens.astype(f"<u{np.dtype(kind).itemsize}").tobytes())
                count += len(tokens)
                progress(begin + len(piece))
            if not count:
                raise DataError(f"the tokenizer made no tokens of bytes {start} to {stop} of the text")
            file.flush()
            os.fsync(file.fileno())
        about = TokenFile(kind, tokenizer.vocabulary, count, tokenizer.name)
        Path(sidecar_path(path)).write_text(about.text)
        part.replace(path)
    return Tokenized(path, count, tokenizer.vocabulary)
