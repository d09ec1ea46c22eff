"""Numbers and tables as text."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# To show tables and pictures.
NEED = "pip install 'optax-ext[cli]'"


class Table(NamedTuple):
    """A table; its first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]


class Printed:
    """Prints its ``tables()``, and its ``notes`` below them, if it has any."""

    def tables(self) -> list[Table]:
        """The tables to print."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join([text_of(self.tables()), *getattr(self, "notes", ())])


def size(nbytes: float) -> str:
    """Bytes in binary units, three digits: ``1.50 GiB``."""
    return _in_units(float(nbytes), 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def count(value: float) -> str:
    """A number in thousands, millions ..., three digits: ``1.50 M``."""
    return _in_units(value, 1000, ("", " k", " M", " G", " T"))


def _in_units(value: float, step: int, units: Sequence[str]) -> str:
    unit = 0
    while abs(value) >= 1000 and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{units[unit]}"


def seconds(value: float) -> str:
    """A time in a unit that suits it."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        scaled = value * factor
        if scaled >= 1 or unit == "us":
            return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    raise AssertionError


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raises unless a value is a known one."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def layer_range(layers: range) -> str:
    """Consecutive layers as text: ``3-7``."""
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


def percent(value: float, of: Mapping[str, float]) -> str:
    """How much of the largest a value is."""
    return f"{100 * value / (max(of.values()) or 1):.0f} %"


def text_of(tables: Sequence[Table]) -> str:
    """Tables as aligned text."""
    blocks = []
    for table in tables:
        lines = [tuple(table.columns), *map(tuple, table.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
        block = [table.title]
        for line in lines:
            cells = [
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            block.append("  " + " ".join(cells).rstrip())
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def show(tables: Sequence[Table], notes: Sequence[str] = (), *, console: Any = None) -> None:
    """Prints tables, such as the ``tables()`` of a ``Plan``, and sentences below them.

    A column whose name ends in ``*`` is highlighted. The ``rich.console.Console`` to print on is by
    default one as wide as the terminal.

    Raises:
      ValueError: rich is not installed.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable
    except ImportError:
        raise ValueError(f"tables need rich: {NEED}. Or request --json.") from None
    # On a terminal, its width; else 80 columns, or as many as the widest table has.
    width = None if sys.stdout.isatty() else max([80, *map(_width, tables)])
    console = console or Console(width=width, highlight=False)
    for table in tables:
        console.print(escape(table.title), style="italic")  # rich breaks titles of narrow tables
        shown = RichTable(box=box.SIMPLE_HEAD, padding=0)
        for i, column in enumerate(table.columns):
            bold = "bold green" if column.endswith("*") else None
            shown.add_column(column, justify="right" if i else "left", style=bold, no_wrap=True)
        for row in table.rows:
            shown.add_row(*map(escape, row), style="bold" if row[0] == "total" else None)
        console.print(shown)
    for note in notes:
        console.print(escape(note), style="yellow" if note.startswith("warning") else None)


def _width(table: Table) -> int:
    """Characters of a line, with a space between columns and at both ends."""
    columns = zip(table.columns, *table.rows, strict=True)
    return 1 + sum(max(map(len, cells)) + 1 for cells in columns)
