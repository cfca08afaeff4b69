"""Where each record of a data set is stored: a few arrays, saved in one file so that the next start need not scan.

`IndexBuilder` collects records while a data set is scanned; `cached_index` loads a saved index that still matches the
files, or builds and saves a new one.

An index lies beside the data, so that many users of one read-only data set share it; so a downloaded data set may bring
one along, and it is checked like any other input. A hash over everything in it finds damage. What a hash can't find is
an index that was forged, hash included: so every number must lie in its range, every byte range within its part, and
every name below the root. What passes is no worse than a data set whose files say the same.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from stagewright.files import cache_folder, open_regular

MOST_CLASSES = 2**24  # a larger class number is treated as damaged
_FORMAT = "2"  # 1 had no hash
_MOST_INDEX_BYTES = 2**33  # about 100 million records
_ARRAYS = {"part": np.int32, "offset": np.int64, "length": np.int64, "label": np.int32, "name_end": np.int64}
_ANYONE_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_FINGERPRINT = re.compile("[0-9a-f]*")
_REPORTED = 4096  # records between two reports of progress
Found = tuple[int, int, int] | tuple[int, int, int, str]  # a record in a file: offset, length, label, and its name
Progress = Callable[[int], None]  # called with the number of records found so far


@dataclass(frozen=True, slots=True)
class Watched:
    """A file or folder whose size and modification time show whether an index is still current."""

    path: str  # below the root
    size: int
    mtime_ns: int

    @staticmethod
    def of(root: Path, path: str) -> Watched:
        found = (root / path).stat()
        return Watched(path, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Index:
    """The records of a data set: one array entry per record, no Python objects."""

    root: str
    watched: tuple[Watched, ...]  # the parts, if records are byte ranges of parts
    class_names: tuple[str, ...]
    part: NDArray[np.int32]  # sorted
    offset: NDArray[np.int64]
    length: NDArray[np.int64]  # 0: no image
    label: NDArray[np.int32]  # -1: no label
    names: NDArray[np.uint8]  # all names, one after another
    name_end: NDArray[np.int64]  # empty if records have no names
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.label)

    @property
    def classes(self) -> int:
        return max(int(self.label.max()) + 1 if len(self) else 0, len(self.class_names))

    def name(self, index: int) -> str:
        if not len(self.name_end):
            return ""
        first = int(self.name_end[index - 1]) if index else 0
        return os.fsdecode(self.names[first : int(self.name_end[index])].tobytes())

    @property
    def has_only_names_below(self) -> bool:
        """Whether every record has a name, and every name is a path that stays below the root."""
        ends, names = self.name_end, self.names
        first = np.concatenate((np.zeros(1, np.int64), ends))[:-1]
        if len(ends) != len(self) or bool((first >= ends).any()):
            return False
        if bool((names[first] == ord("/")).any()) or bool((names == 0).any()):
            return False
        dots = np.flatnonzero((names[:-1] == ord(".")) & (names[1:] == ord(".")))  # few: looked at one by one
        suspects = np.unique(np.searchsorted(ends, dots, side="right"))
        return all(is_below(self.name(int(suspect))) for suspect in suspects)

    @property
    def has_only_ranges_of_parts(self) -> bool:
        """Whether every record is a byte range of a watched part."""
        if bool((self.part < 0).any()) or bool((self.part >= len(self.watched)).any()):
            return False
        sizes = np.array([part.size for part in self.watched], np.int64)[self.part]
        return bool(((self.offset >= 0) & (self.offset <= sizes) & (self.length <= sizes - self.offset)).all())


def is_below(path: str) -> bool:
    """Whether a path stays below the folder that it is relative to."""
    return bool(path) and not path.startswith("/") and "\0" not in path and ".." not in path.split("/")


class IndexBuilder:
    """Collects the records of a scan in arrays, without one Python object per record."""

    def __init__(self, root: Path, progress: Progress = lambda found: None) -> None:
        self.root = root
        self.watched: list[Watched] = []
        self._columns = {name: array("q") for name in ("part", "offset", "length", "label")}
        self._names = bytearray()
        self._name_end = array("q")
        self._progress = progress

    def add(self, part: int, offset: int, length: int, label: int, name: str | None = None) -> None:
        for column, value in zip(self._columns.values(), (part, offset, length, label), strict=True):
            column.append(value)
        if name is not None:
            self._names += os.fsencode(name)
            self._name_end.append(len(self._names))
        if not len(self._columns["part"]) % _REPORTED:
            self._progress(len(self._columns["part"]))

    def add_parts(self, paths: Sequence[str], scan: Callable[[BinaryIO, int, str], Iterable[Found]]) -> None:
        """Add and watch files that each hold many records, which `scan` finds in one of some size."""
        for number, path in enumerate(paths):
            self.watched.append(part := Watched.of(self.root, path))
            with os.fdopen(open_regular(self.root / path), "rb") as file:
                for found in scan(file, part.size, str(self.root / path)):
                    self.add(number, *found)

    def build(self, class_names: Sequence[str] = ()) -> Index:
        columns: dict[str, Any] = {name: np.array(made).astype(_ARRAYS[name]) for name, made in self._columns.items()}
        self._progress(len(self._columns["part"]))
        return Index(
            str(self.root),
            tuple(self.watched),
            tuple(class_names),
            **columns,
            names=np.frombuffer(bytes(self._names), np.uint8),
            name_end=np.array(self._name_end, np.int64),
        )


def save_index(path: Path, index: Index) -> None:
    """Write the index under a temporary name, then rename it: readers see all of it or nothing."""
    arrays = {name: np.ascontiguousarray(getattr(index, name)) for name in (*_ARRAYS, "names")}
    about = {
        "format": _FORMAT,
        "watched": json.dumps([asdict(entry) for entry in index.watched]),
        "class_names": json.dumps(index.class_names),
        "fingerprint": index.fingerprint,
    }
    about["hash"] = _hash(arrays, about)
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    os.close(descriptor)
    try:
        save_file(arrays, temporary, about)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_index(path: Path, root: Path) -> Index | None:
    """The index in a file; None if the file is damaged or the data has changed since."""
    try:
        os.close(open_regular(path))
        if path.stat().st_size > _MOST_INDEX_BYTES:
            return None
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                return None
            listed = [Watched(**entry) for entry in json.loads(about["watched"])]
            watched = tuple(Watched.of(root, entry.path) for entry in listed if is_below(entry.path))
            if list(watched) != listed:
                return None
            arrays = {name: file.get_tensor(name) for name in (*_ARRAYS, "names")}
        if about.pop("hash", "") != _hash(arrays, about):
            return None
        names = tuple(json.loads(about["class_names"]))
        index = Index(str(root), watched, names, **arrays, fingerprint=about["fingerprint"])
        return index if _is_sound(index) else None
    except Exception:  # whatever the parsers raise for what may be in there: it is built again
        return None


def _hash(arrays: Mapping[str, NDArray[Any]], about: Mapping[str, str]) -> str:
    """A hash of everything that an index file says."""
    digest = blake2b(json.dumps(sorted(about.items())).encode(), digest_size=16)
    for name, column in sorted(arrays.items()):
        digest.update(f"{name} {column.dtype} {column.shape}".encode())
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def _is_sound(index: Index) -> bool:
    """Whether types, shapes and numbers are those of an index."""
    columns = {name: getattr(index, name) for name in _ARRAYS}
    ends, arrays = columns.pop("name_end"), (*columns.values(), index.name_end, index.names)
    return (
        all(array.ndim == 1 for array in arrays)
        and all(getattr(index, name).dtype == kind for name, kind in (*_ARRAYS.items(), ("names", np.uint8)))
        and {len(column) for column in columns.values()} == {len(index)}
        and not bool((index.length < 0).any())
        and not bool(((index.label < -1) | (index.label >= MOST_CLASSES)).any())
        and not bool((np.diff(index.part) < 0).any())
        and len(ends) in (0, len(index))
        and (not len(ends) or (int(ends[-1]) == len(index.names) and bool((np.diff(ends, prepend=0) >= 0).all())))
        and all(isinstance(name, str) for name in index.class_names)
        and _FINGERPRINT.fullmatch(index.fingerprint) is not None
    )


def index_files(root: Path, key: str) -> Iterable[Path]:
    """Where the index of a data set may be: beside the data, then in the cache folder."""
    digest = blake2b(f"{root.absolute()}/{key}".encode(errors="surrogateescape"), digest_size=8).hexdigest()
    beside = blake2b(key.encode(errors="surrogateescape"), digest_size=4).hexdigest()
    return (root / f".stagewright-{beside}.index", cache_folder() / f"{digest}.index")


def cached_index(root: Path, key: str, is_current: Callable[[Index], bool], build: Callable[[], Index]) -> Index:
    """The saved index if it is current, else a new one, saved where a folder can be written to."""
    files = index_files(root, key)
    for path in files:
        if (found := load_index(path, root)) is not None and is_current(found):
            return found
    index = build()
    for path in files:
        try:
            if path.parent != root:
                path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.stat().st_mode & _ANYONE_WRITES:  # respect a read-only folder even as root
                save_index(path, index)
                break
        except (OSError, SafetensorError):  # can't be written to: try the next folder, or save nothing
            continue
    return index
