"""Table of strings, for the terminal and for the page of `specdec-bench report`."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PIPE_WIDTH = 1000  # no wrapping if a program may read it
_MANY_COLUMNS = 9
Columns = tuple[tuple[str, str, str, float], ...]
"""(heading, key of the result, format, unit)."""


@dataclass(frozen=True)
class Table:
    """Table whose first column names the row."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    about: tuple[str, ...] = ()
    """Lines above: the measurement."""
    notes: tuple[str, ...] = ()
    """Lines below: the conclusions."""


def cell(value: float | None, form: str = "{:.2f}", unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value / unit)


def cells(results: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
    """Return one string for each column; "-" if unknown."""
    return tuple(cell(results.get(key), form, unit) for _, key, form, unit in columns)


def headings(columns: Columns) -> tuple[str, ...]:
    return tuple(heading for heading, *_ in columns)


def labelled(pairs: Sequence[tuple[str, str]], width: int = 0) -> tuple[str, ...]:
    """Return a line for each (label, text); texts begin in column `width` or after the labels."""
    width = width or max((len(label) for label, _ in pairs), default=0) + 1
    return tuple(f"{label:<{width}}{text}" for label, text in pairs)


def text_of(tables: Iterable[Table]) -> str:
    """Return tables for the terminal; a few rows of many columns are transposed."""
    blocks: list[str] = []
    for table in tables:
        rows = [table.columns, *table.rows]
        if len(rows) <= 4 and len(table.columns) >= _MANY_COLUMNS:
            rows = list(zip(*rows, strict=True))
        blocks += ["\n".join(table.about), _aligned(rows), "\n".join(table.notes)]
    return "\n\n".join(block for block in blocks if block)


def _aligned(rows: list[tuple[str, ...]]) -> str:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for number, name in enumerate(rows[0]):
        is_text = number == 0 or any(len(row[number]) > 24 for row in rows)
        grid.add_column(Text(name), justify="left" if is_text else "right")
    for row in rows[1:]:
        grid.add_row(*map(Text, row))
    out = io.StringIO()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    Console(file=out, width=width, color_system=None).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip("\n").split("\n"))
