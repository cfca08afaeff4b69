"""Opens and reads what lies in the place of a data set's files: regular files alone, and never more than a bound.

A data set is not trusted to be well-formed. A pipe in the place of an image would block a thread for ever, a link to
/dev/zero would fill the memory, and opening a device may already act on it. So nothing but a regular file is opened,
and every read has a largest size.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_RECORD_BYTES = 2**28  # 256 MiB: of one encoded image, or of a file that is read whole
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor to read a regular file; an `OSError` for anything else, which is not opened at all."""
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "its name contains a NUL", os.fspath(path))
    _require_regular(Path(path).stat(), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_regular(os.fstat(descriptor), path)  # it may have been replaced since the first look
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], most: int = MOST_RECORD_BYTES) -> bytes:
    """All bytes of a regular file; an `OSError` for anything else and for a file of more than `most` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, too_large(size, most), os.fspath(path))
        return file.read(size)


def too_large(size: int, most: int = MOST_RECORD_BYTES) -> str:
    """Why something of this many bytes is not read."""
    return f"has {size} bytes, but at most {most} are read"


def _require_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a file", os.fspath(path))
