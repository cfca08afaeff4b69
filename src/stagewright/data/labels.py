"""What belongs to an image besides its pixels: the number of its class, or numbers of a table, for regression.

A table is a CSV file with a column `path`, below the folder of the file, and one or more columns of numbers. Masks are
in `segmentation`.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from stagewright.data.augment import View
from stagewright.data.formats.folders import size_of
from stagewright.data.formats.index import IndexBuilder, is_below
from stagewright.data.formats.records import DataError, FileRecords, Record, fingerprint
from stagewright.errors import first_line
from stagewright.files import read_text

_PATH = "path"
_MOST_BYTES = 2**28
_MOST_COLUMNS = 4096
_LARGEST = torch.finfo(torch.float32).max


class Labels:
    """One class number per image.

    A record's label is read before its sample is drawn, so that one that can't be read makes the record a bad one, and
    drawn with the view of the image.
    """

    name = "label"  # of their field
    follows_view = False  # whether a label depends on how its image is cropped

    def allocate(self, samples: int, side: int) -> Tensor:
        """Memory for the labels of some samples, on the CPU."""
        return torch.zeros(samples, dtype=torch.int64)

    def read(self, record: Record, height: int, width: int) -> Tensor:
        """The label of an image of this size; raises `BadRecordError` if it has none that can be used."""
        return torch.tensor(record.label)

    def draw(self, label: Tensor, view: View, target: Tensor) -> None:
        """Fill one row of `allocate` with a label as it belongs to a view of its image."""
        target.numpy()[...] = label.numpy()  # not by torch, for which threads wait for each other


class NumberLabels(Labels):
    """One or several numbers per image."""

    name = "target"

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers  # [rows] or [rows, columns]

    def allocate(self, samples: int, side: int) -> Tensor:
        return torch.zeros(samples, *self.numbers.shape[1:])

    def read(self, record: Record, height: int, width: int) -> Tensor:
        return self.numbers[record.label]


def open_table(where: str) -> tuple[FileRecords, NumberLabels]:
    """The images that `table:FILE.csv` lists, and their numbers; a record's label is its row."""
    try:
        text = read_text(where, _MOST_BYTES).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise DataError(f"table {where}: {reason}; give a CSV file with a column '{_PATH}'") from error
    paths, numbers = _read_rows(where, text)
    builder = IndexBuilder(Path(where).parent)
    for row, path in enumerate(paths):
        builder.add(0, 0, size_of(builder.root / path), row, path)
    index, labels = builder.build(), NumberLabels(torch.tensor(numbers, dtype=torch.float32))
    digest = blake2b(fingerprint(FileRecords(index)).encode(), digest_size=16)
    digest.update(labels.numbers.numpy().tobytes())
    records = FileRecords(replace(index, fingerprint=digest.hexdigest()))
    records.classes = 0  # rows are no classes
    return records, labels


def _read_rows(where: str, text: str) -> tuple[list[str], list[float] | list[list[float]]]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    paths, numbers = list[str](), list[list[float]]()
    try:
        header = [name.strip() for name in next(rows, [])]
        if header.count(_PATH) != 1 or not 2 <= len(header) <= _MOST_COLUMNS:
            raise DataError(
                f"table {where}: the first row must name one column '{_PATH}' and 1 to {_MOST_COLUMNS - 1} columns of "
                f"numbers, got {', '.join(header[:8]) or 'nothing'}"
            )
        at = header.index(_PATH)
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"table {where}, row {rows.line_num}: {len(row)} columns, but the first row has {len(header)}"
                )
            if not is_below(row[at]):
                raise DataError(
                    f"table {where}, row {rows.line_num}: '{row[at]}' is not a path below the folder of the table"
                )
            paths.append(row[at])
            numbers.append(
                [_number(where, rows.line_num, *pair) for pair in zip(header, row, strict=True) if pair[0] != _PATH]
            )
    except csv.Error as error:
        raise DataError(f"table {where}, row {rows.line_num}: {first_line(error)}; fix the row") from error
    if not paths:
        raise DataError(f"table {where} lists no images; add rows below the first")
    return paths, [row[0] for row in numbers] if len(header) == 2 else numbers


def _number(where: str, row: int, name: str, text: str) -> float:
    try:
        number = math.nan if "_" in text else float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise DataError(
            f"table {where}, row {row}: {name} is '{text[:40]}', not a finite number; fix or remove the row"
        )
    return number
