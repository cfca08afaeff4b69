"""A folder of images: a subfolder for each class, numbered in sorted order, with files at any depth below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from stagewright.data.index import Index, Progress, Rows, Watched
from stagewright.data.records import DataError

_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def list_classes(root: Path) -> list[str]:
    """The subfolders of a data set; hidden ones are none of its classes."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def scan_folder(root: Path, class_names: tuple[str, ...], progress: Progress) -> Index:
    """The index of a folder; classes are its subfolders, or the names given, in their order."""
    found = list_classes(root)
    if not found:
        raise DataError(f"{root} holds no folders; give a folder with one subfolder of images for each class")
    names = class_names or tuple(found)
    labels = {name: number for number, name in enumerate(names)}
    if unknown := next((name for name in found if name not in labels), None):
        raise DataError(f"{root}: folder {unknown} is none of the {len(names)} class names; add it or remove it")
    rows, watched = Rows(progress), list[Watched]()
    for name in found:
        for folder, files in _walk(root, name):
            watched.append(Watched.of(root, folder))
            for file, size in files:
                rows.add(0, 0, size, labels[name], f"{folder}/{file}")
    index = rows.index(root, watched, names)
    if not len(index):
        raise DataError(f"{root}: {len(found)} class folders hold no images ({', '.join(_SUFFIXES)})")
    return index


def _walk(root: Path, folder: str) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Each folder from one on, sorted, with its images and their sizes."""
    below, files = [], []
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    below.append(f"{folder}/{entry.name}")
                elif entry.name.lower().endswith(_SUFFIXES):
                    files.append((entry.name, _size(entry)))
    except OSError as error:
        raise DataError(f"{root / folder}: {error.strerror}; make it readable or remove it") from error
    yield folder, sorted(files)
    for inner in sorted(below):
        yield from _walk(root, inner)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0  # a link that leads nowhere: reading it will say so
