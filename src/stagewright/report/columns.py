"""Columns: what a table has of each row, in one list that terminals and pages draw from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stagewright.report.page import Table

UNKNOWN = "-"
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One thing about every row."""

    head: str
    value: Callable[[Row], Any]  # None where it is not known
    form: str | Callable[[Any], str] = "{}"  # how a cell shows a value
    is_text: bool = False  # left-justified; most columns hold numbers
    wraps: bool = False  # a terminal may break its cells
    spare: int = 0  # above 0: a terminal that is too narrow leaves out the column with the highest first
    title: str = ""  # the head on a page, which has more room
    style: Callable[[Row], str] | None = None  # of its cells in a terminal
    about: str = ""  # what a short head means, below a terminal's table

    def cell(self, row: Row) -> str:
        """What a table shows of a row."""
        value = self.value(row)
        if value is None:
            return UNKNOWN
        return self.form.format(value) if isinstance(self.form, str) else self.form(value)


def used(columns: Iterable[Column[Row]], rows: Sequence[Row]) -> tuple[Column[Row], ...]:
    """The columns whose value is known of some row."""
    return tuple(column for column in columns if any(column.value(row) is not None for row in rows))


def page_table(title: str, columns: Sequence[Column[Row]], rows: Iterable[Row], **more: Any) -> Table:
    """A table as a block of a page."""
    cells = tuple(tuple(column.cell(row) for column in columns) for row in rows)
    return Table(title, tuple(column.title or column.head for column in columns), cells, **more)
