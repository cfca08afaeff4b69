"""Opens and reads files that a user or a data set names: regular files alone, and never more than a bound.

None of them is trusted to be well-formed. A pipe in the place of an image would block a thread for ever, a link to
/dev/zero would fill the memory, and opening a device may already act on it. So nothing but a regular file is opened,
and every read has a largest size. Imports nothing of ours, so that every folder may import it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_RECORD_BYTES = 2**28  # 256 MiB: of one encoded image, or of a file that is read whole
MOST_TEXT_BYTES = 2**24  # 16 MiB: of a file that is parsed whole, as JSON or TOML; parsed, it takes up to 25 times that
MOST_RUN_BYTES = 2**32  # 4 GiB: of a file that a run has written, such as its metrics
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


def read_text(path: str | os.PathLike[str], most: int = MOST_TEXT_BYTES) -> str:
    """The text of a regular UTF-8 file; errors as of `read_regular`, and `UnicodeDecodeError`."""
    return read_regular(path, most).decode()


def cache_folder(kind: str = "") -> Path:
    """Where what can be made again is kept, such as proofs: $STAGEWRIGHT_CACHE, else in the user's cache folder."""
    if base := os.environ.get("STAGEWRIGHT_CACHE"):
        return Path(base) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagewright" / kind


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file that a user names; errors as of `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that a user names; an `OSError` that names it, also for a pipe that nobody reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            os.set_blocking(file.fileno(), True)
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def too_large(size: int, most: int = MOST_RECORD_BYTES) -> str:
    """Why something of this many bytes is not read."""
    return f"has {size} bytes, but at most {most} are read"


def _require_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a file", os.fspath(path))
