"""Numbers and tables as text."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# To show tables and pictures.
NEED = "pip install 'optax-ext[cli]'"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Table(NamedTuple):
    """A table; its first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]


def size(nbytes: float) -> str:
    """Bytes in binary units, three digits: ``1.50 GiB``."""
    value, unit = float(nbytes), 0
    while abs(value) >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def count(value: float) -> str:
    """A number in thousands, millions ..., three digits: ``1.50 M``."""
    for unit in ("", " k", " M", " G", " T"):
        if value < 1000 or unit == " T":
            break
        value /= 1000
    digits = 0 if value >= 100 or not unit else 1 if value >= 10 else 2
    return f"{value:.{digits}f}{unit}"


def seconds(value: float) -> str:
    """A time in a unit that suits it."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        scaled = value * factor
        if scaled >= 1 or unit == "us":
            return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    raise AssertionError


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
