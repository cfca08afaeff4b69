"""Token numbers as one flat file, 16 or 32 bits each, little-endian; samples are windows of it.

    tokens   0 1 2 3 4 5 6 7 8 9        context 4: two samples
    sample 0 [0 1 2 3] -> [1 2 3 4]
    sample 1         [4 5 6 7] -> [5 6 7 8]

Windows are read where they are, never the whole file. A small file beside it, `FILE.json`, says how many tokens of
which type there are and how large the vocabulary is; `text` writes it. Without it, tokens have 16 bits (32 in a `.u32`
file) and the vocabulary ends with the largest token, which takes one pass over the file.
"""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stagewright.config.sources import SourceOptions
from stagewright.data.formats.fields import Fields, Indices
from stagewright.data.formats.records import DataError
from stagewright.errors import counted, first_line
from stagewright.files import open_regular, read_text
from stagewright.metrics import ThroughputUnit

MOST_VOCABULARY = 2**31  # tokens are 64-bit signed numbers in a model
_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_MOST_SIDECAR = 2**16  # bytes
_SCANNED = 2**24  # bytes read at once
_SAMPLED, _SAMPLE_BYTES = 64, 4096  # pieces that enter the fingerprint


@dataclass(frozen=True, slots=True)
class TokenFile:
    """What `FILE.json` says about FILE."""

    dtype: str
    vocabulary: int
    tokens: int
    tokenizer: str  # "bytes", or the name of a tokenizer file

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def read(path: str) -> TokenFile | None:
        """The sidecar of a token file; None where it has none."""
        place, instead = sidecar_path(path), "remove it or convert the text again"
        if not os.path.lexists(place):
            return None
        try:
            about = json.loads(read_text(place, _MOST_SIDECAR))
        except OSError as error:
            raise DataError(f"{place}: {error.strerror}; make it readable or remove it") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place} is not JSON ({first_line(error)}); {instead}") from error
        if not isinstance(about, dict) or about.get("dtype") not in _TYPES:
            raise DataError(f"{place} has no dtype uint16 or uint32; {instead}")
        for key, most in (("vocabulary", MOST_VOCABULARY), ("tokens", 2**62)):
            if type(about.get(key)) is not int or not 0 < about[key] <= most:
                raise DataError(f"{place}: {key} is not a number from 1 to {most}; {instead}")
        return TokenFile(about["dtype"], about["vocabulary"], about["tokens"], str(about.get("tokenizer", ""))[:200])


def sidecar_path(path: str) -> str:
    return f"{path}.json"


class TokenSource:
    """Windows of `context` tokens, each with the tokens that follow."""

    targets = ("targets",)
    has_ignored = False

    def __init__(self, path: str, context: int) -> None:
        self._path = path
        self._context = context
        self.unit = ThroughputUnit("tokens", context)
        self._about = TokenFile.read(path)
        kind = self._about.dtype if self._about else ("uint32" if path.endswith(".u32") else "uint16")
        self._type = _TYPES[kind]
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise DataError(f"tokens file {path}: {error.strerror}; give a file of 16- or 32-bit tokens") from error
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self._size, self._mtime = status.st_size, status.st_mtime_ns
        self._require_shape(kind)

    def _require_shape(self, kind: str) -> None:
        tokens, rest = divmod(self._size, self._type.itemsize)
        if rest:
            raise DataError(
                f"tokens file {self._path} has {self._size} bytes, not a multiple of the {self._type.itemsize} of a "
                f"{kind} token; convert the text again, or give another file"
            )
        if self._about is not None and self._about.tokens != tokens:
            raise DataError(
                f"tokens file {self._path} has {counted(tokens, 'token')} but {sidecar_path(self._path)} says "
                f"{self._about.tokens}; convert the text again, or remove the .json"
            )
        if tokens < self._context + 1:
            raise DataError(
                f"tokens file {self._path} has {counted(tokens, 'token')} but a sample takes {self._context + 1}; "
                f"use --context {max(1, tokens - 1)} or less, or more text"
            )
        self._samples = (tokens - 1) // self._context

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices) -> Fields:
        windows = np.empty((len(indices), self._context + 1), np.int64)
        for place, index in enumerate(indices):
            windows[place] = self._read(int(index) * self._context, self._context + 1)
        vocabulary = MOST_VOCABULARY if self._about is None else self._about.vocabulary
        if windows.size and windows.max() >= vocabulary:
            row, column = np.unravel_index(int(windows.argmax()), windows.shape)
            first = int(indices[row]) * self._context
            raise DataError(
                f"tokens file {self._path}: token {windows.max()} at position {first + int(column)}, but the "
                f"vocabulary has {vocabulary}; convert the text again"
            )
        tokens = torch.from_numpy(windows)
        return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def _read(self, first: int, count: int) -> NDArray[Any]:
        size = self._type.itemsize
        data = os.pread(self._file, count * size, first * size)
        if len(data) != count * size:
            raise DataError(
                f"tokens file {self._path}: {len(data)} of {count * size} bytes are left at token {first}; "
                "the file has changed since it was opened"
            )
        return np.frombuffer(data, self._type)

    @property
    def classes(self) -> int:
        """The size of the vocabulary."""
        if self._about is not None:
            return self._about.vocabulary
        return _largest(self._path, self._size, self._mtime, self._type.str) + 1

    @property
    def vocabulary(self) -> int:
        return self.classes

    @cached_property
    def fingerprint(self) -> str:
        digest = blake2b(repr((self._size, self._type.str, self._context)).encode(), digest_size=16)
        for number in range(_SAMPLED):
            digest.update(os.pread(self._file, _SAMPLE_BYTES, (self._size - 1) * number // (_SAMPLED - 1) & ~4095))
        return digest.hexdigest()


def open_tokens(text: str, options: SourceOptions) -> TokenSource:
    return TokenSource(text.partition(":")[2], options.context)


@lru_cache(maxsize=8)
def _largest(path: str, size: int, mtime: int, kind: str) -> int:
    """The largest token of a file as it is now; one pass, a piece at a time."""
    descriptor, largest, done = open_regular(path), 0, 0
    try:
        while done < size and (data := os.pread(descriptor, min(_SCANNED, size - done), done)):
            whole = len(data) - len(data) % np.dtype(kind).itemsize
            if not whole:
                break
            largest = max(largest, int(np.frombuffer(data[:whole], kind).max()))
            done += whole
    finally:
        os.close(descriptor)
    return largest
