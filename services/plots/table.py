"""A table as values, and as text. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """cell: of one item. meaning: the definition that stands beside the figures."""

    title: str
    cell: Callable[[Item], str]
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """title: empty for the only one. meanings: of the columns, as far as they need one."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    meanings: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        return aligned([self.head, *self.rows])


def table(columns: Sequence[Column[Item]], items: Sequence[Item], title: str = "") -> Table:
    return Table(
        title,
        tuple(column.title for column in columns),
        tuple(tuple(column.cell(item) for column in columns) for item in items),
        tuple((column.title, column.meaning) for column in columns if column.meaning),
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
