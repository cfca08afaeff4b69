"""Folders of images: one subfolder per class, numbered in sorted order, with files at any depth below."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stagewright.data.formats.index import Index, IndexBuilder, Progress, Watched
from stagewright.data.formats.records import DataError
from stagewright.errors import counted

_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_MOST_VISITS = 32  # of one folder below one class: links may lead to each other in more ways than can be walked


def list_classes(root: Path) -> list[str]:
    """The class folders of a data set, without hidden folders."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def scan_folder(root: Path, found: list[str], class_names: tuple[str, ...], progress: Progress) -> Index:
    """The index of a folder; the classes are its subfolders, or the names given, in that order."""
    if not found:
        raise DataError(f"{root} has no subfolders; give a folder with one subfolder of images per class")
    names = class_names or tuple(found)
    labels = {name: number for number, name in enumerate(names)}
    if unknown := next((name for name in found if name not in labels), None):
        raise DataError(
            f"{root}: folder {unknown} is not one of {counted(len(names), 'class name')}; add it or remove the folder"
        )
    builder = IndexBuilder(root, progress)
    for name in found:
        for path, size in walk_images(root, name, builder.watched):
            builder.add(0, 0, size, labels[name], path)
    index = builder.build(names)
    if not len(index):
        raise DataError(f"{root}: no images in {counted(len(found), 'class folder')} ({', '.join(_SUFFIXES)})")
    return index


def walk_images(root: Path, name: str, watched: list[Watched]) -> Iterator[tuple[str, int]]:
    """Images in a folder and all folders below it, sorted, with their sizes; links are followed.

    Each folder is added to those that are watched.
    """
    waiting, visits = [name], Counter[tuple[int, int]]()
    while waiting:
        folder = waiting.pop()
        below, files = [], []
        try:
            status = (root / folder).stat()  # before it is listed: what is added meanwhile makes the index outdated
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        below.append(f"{folder}/{entry.name}")
                    elif entry.name.lower().endswith(_SUFFIXES):
                        files.append((f"{folder}/{entry.name}", size_of(entry)))
        except OSError as error:
            raise DataError(f"{root / folder}: {error.strerror}; make it readable or remove it") from error
        identity = status.st_dev, status.st_ino
        visits[identity] += 1
        if visits[identity] > _MOST_VISITS:
            raise DataError(f"{root / folder}: links lead here {visits[identity]} times or more; remove all but one")
        watched.append(Watched(folder, status.st_size, status.st_mtime_ns))
        yield from sorted(files)
        waiting += sorted(below, reverse=True)


def size_of(file: Path | os.DirEntry[str]) -> int:
    """Bytes of a file; 0 for a broken link or none, as reading it will report it."""
    try:
        return file.stat().st_size
    except (OSError, ValueError):
        return 0
