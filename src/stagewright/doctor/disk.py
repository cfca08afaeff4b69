"""How fast the files of a data set come off their disk."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 4 << 20
_MOST_BYTES = 512 << 20
_MOST_SECONDS = 2.0
_MOST_FILES = 4096


@dataclass(frozen=True, slots=True)
class DiskRead:
    """What was read, and how long that took."""

    path: str
    bytes: int
    files: int
    seconds: float
    free: int  # bytes left on that disk
    is_cold: bool  # the system was asked to forget the files first


def read_disk(path: Path) -> DiskRead:
    """Read files below a folder for a second or two, from the disk and not from memory where the system lets us."""
    done = files = 0
    is_cold = hasattr(os, "posix_fadvise")
    names = list(_files(path))
    if not names:
        raise ValueError(f"--data {path} holds 0 files to read; name the folder or file that runs will read")
    began = time.perf_counter()
    for name in names:
        files += 1
        done += _read(name, is_cold, began, _MOST_BYTES - done)
        if done >= _MOST_BYTES or time.perf_counter() - began > _MOST_SECONDS:
            break
    return DiskRead(str(path), done, files, time.perf_counter() - began, shutil.disk_usage(path).free, is_cold)


def _files(path: Path) -> Iterator[Path]:
    """Some files of a folder, or the file itself."""
    if not path.exists():
        raise ValueError(f"--data {path}: no such file or folder; name the one that runs will read")
    if not path.is_dir():
        if not _holds_bytes(path):
            raise ValueError(f"--data {path} is not a file with content or a folder; name the one that runs will read")
        yield path
        return
    found = 0
    for folder, _, names in os.walk(path):
        for file in (Path(folder) / name for name in sorted(names)):
            if not _holds_bytes(file):
                continue
            yield file
            found += 1
            if found == _MOST_FILES:
                return


def _holds_bytes(path: Path) -> bool:
    """Whether a path is a regular file on a disk: pipes, devices and the kernel's own files may never end."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _read(path: Path, is_cold: bool, began: float, room: int) -> int:
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while done < room and time.perf_counter() - began < _MOST_SECONDS and (block := file.read(_BLOCK)):
                done += len(block)
    except OSError:
        return done  # what can't be read here is what `stagewright data inspect` tells of
    return done
