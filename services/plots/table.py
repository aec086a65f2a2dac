"""A table as values, and as text. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """cell: of one item. meaning: the definition that stands beside the figures. unit: of the numbers, where the title
    does not say."""

    title: str
    cell: Callable[[Item], str]
    meaning: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    title: str
    unit: str = ""
    meaning: str = ""

    @property
    def whole(self) -> str:
        return f"{self.title} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class Table:
    """title: empty for the only one. notes: a line each, below it."""

    title: str
    head: tuple[Head, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        return "\n".join([aligned([[head.whole for head in self.head], *self.rows]), *self.notes])

    @property
    def meanings(self) -> tuple[tuple[str, str], ...]:
        """Of the columns, as far as they need one."""
        return tuple((head.whole, head.meaning) for head in self.head if head.meaning)


def table(columns: Sequence[Column[Item]], items: Sequence[Item], title: str = "", notes: Sequence[str] = ()) -> Table:
    return Table(
        title,
        tuple(Head(column.title, column.unit, column.meaning) for column in columns),
        tuple(tuple(column.cell(item) for column in columns) for item in items),
        tuple(notes),
    )


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or not size else f"{value:.2g}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([row[0].ljust(len(first)), *others]).rstrip())
    return "\n".join(lines)
