"""Tables on a terminal, and in log files."""

import sys
from collections.abc import Sequence
from typing import Any

from sharding.plan._format import NEED, Table


def show(tables: Sequence[Table], notes: Sequence[str] = (), *, console: Any = None) -> None:
    """Prints tables, and sentences below them.

    Args:
      tables: the ``tables()`` of a ``Plan`` or an ``Audit``. A column whose name ends in ``*`` is
        highlighted.
      notes: the sentences.
      console: the ``rich.console.Console`` to print on; by default one as wide as the terminal.

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
