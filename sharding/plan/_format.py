"""Numbers and tables as text; plans and programs as JSON, in one form for all commands."""

import contextlib
import dataclasses
import difflib
import numbers
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from optax_ext.equations import UnknownOperationError

# To show tables.
NEED = "pip install '.[cli]' in a checkout (docs: start/install)"


class Table(NamedTuple):
    """A table; its first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]


class Printed:
    """A dataclass that prints its ``tables()``, and its warnings and notes, below them."""

    derived: ClassVar[tuple[str, ...]] = ()  # properties that ``to_dict`` has beside the fields

    def tables(self) -> list[Table]:
        """The tables to print."""
        raise NotImplementedError

    @property
    def sentences(self) -> Sequence[str]:
        """What to print below the tables."""
        warnings = [f"warning: {text}" for text in getattr(self, "warnings", ())]
        return [*warnings, *getattr(self, "notes", ())]

    def __str__(self) -> str:
        return "\n".join([text_of(self.tables()), *self.sentences])

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        fields: Any = self
        return dataclasses.asdict(fields) | {name: getattr(self, name) for name in self.derived}


def entry(
    name: str, memory: Mapping[str, float], plan: Any = None, **figures: Any
) -> dict[str, Any]:
    """A plan or a program as JSON; docs/api/command_line.rst says what its keys mean."""
    bounds = figures.pop("at_least", None)
    figures["at_least"] = {"total": max(bounds.values())} | bounds if bounds else None
    fields = plan and dataclasses.asdict(plan)
    unknown = dict.fromkeys(("left", "fits", "seconds", "wire", "tokens"))
    return {"name": name, "plan": fields, "memory": dict(memory), **unknown, **figures}


def document(
    plans: Sequence[dict[str, Any]],
    *,
    device: Any,
    num_devices: int,
    headroom: float = 0.0,
    **others: Any,
) -> dict[str, Any]:
    """All plans of a command as JSON, each an ``entry``.

    ``device`` is a ``DeviceKind`` or None; plans that fit leave a share of its memory free.
    """
    figures = device and dataclasses.asdict(device)
    found: dict[str, Any] = {"plans": [*plans], "chosen": None, "rejected": []}
    found |= {"bound": None, "compared": len(plans), "not_counted": [], "notes": [], **others}
    for row in (*found["plans"], *found["rejected"]):
        if device and row["memory"]:
            row["left"] = device.memory - row["memory"]["total"]
            row["fits"] = row["memory"]["total"] <= device.memory * (1 - headroom)
    machine = {"num_devices": num_devices, "device": figures, "headroom": headroom}
    return {"machine": machine, **found}


def size(nbytes: float) -> str:
    """Bytes in binary units, three digits: ``1.50 GiB``."""
    return _in_units(float(nbytes), 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_UNITS |= {"T": 10**12, "TI": 2**40}


def read_size(value: Any, name: str = "") -> float:
    """Reads a number of bytes of something, or a text such as ``"8GiB"``."""
    text = value.upper() if isinstance(value, str) else ""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]I?)?B?\s*", text)
    if match is None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise ValueError(f"{name}expected bytes, or a text such as '8GiB', got {value!r}.")
    number = float(match[1]) * _UNITS[match[2] or ""] if match else float(value)
    if not number > 0:
        raise ValueError(f"{name}bytes must be above 0, got {value!r}.")
    return number


def count(value: float) -> str:
    """A number in thousands, millions ..., three digits: ``1.50 M``."""
    return _in_units(value, 1000, ("", " k", " M", " G", " T"))


def flops(value: float) -> str:
    """Operations, three digits: ``1.50 TFLOP``."""
    return _in_units(value, 1000, (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP"))


def _in_units(value: float, step: int, units: Sequence[str]) -> str:
    unit = 0
    while abs(value) >= 1000 and unit < len(units) - 1:
        value = value / step
        unit = unit + 1
    digits = 0 if unit == 0 or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}{units[unit]}"


def seconds(value: float) -> str:
    """A time in a unit that suits it."""
    factor, unit = (1, "s") if value >= 1 else (1e3, "ms") if value * 1e3 >= 1 else (1e6, "us")
    scaled = value * factor
    return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raises unless a value is a known one."""
    if value not in known:
        near = difflib.get_close_matches(str(value), map(str, known), n=1)
        meant = f"; nearest is {near[0]!r}" if near else ""
        values = ", ".join(map(repr, known))
        raise ValueError(f"{name} must be one of {values}, got {value!r}{meant}.")


@contextlib.contextmanager
def users_code(failed: str) -> Iterator[None]:
    """Raises an error of a user's code in one line, after these words."""
    try:
        yield
    except UnknownOperationError:
        raise
    except Exception as error:
        raise ValueError(f"{failed}: {reason_of(error)}.") from error


def reason_of(error: Exception) -> str:
    """The first line of an error, after the name of its class, where users may know that."""
    reason = next(iter(str(error).splitlines()), "").rstrip(".")
    kinds = [kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_")]
    return reason if isinstance(error, ImportError | AttributeError) else f"{kinds[0]}: {reason}"


def nearest(word: str, known: Sequence[str]) -> str:
    """The end of a sentence on an unknown word: what it may mean, or all that are known."""
    word = word.lower()
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word, names, n=4, cutoff=0.4)
    longer = [each for each in close if each.startswith(f"{word}-") and word not in names]
    near = [names[each] for each in longer or close]
    return f"; nearest are {', '.join(near)}" if near else f"; known are {', '.join(sorted(known))}"


def with_article(name: str) -> str:
    """A name after its article, spelled where it has a number: ``an h100``."""
    spelled = re.match(r"[aeio]|[fhlmnrsx][a-z]{0,2}\d", name)
    return f"{'an' if spelled else 'a'} {name}"


def text_of(tables: Sequence[Table]) -> str:
    """Tables as aligned text."""
    blocks = []
    for table in tables:
        block = [table.title]
        first, *others = _widths(table)
        for name, *line in (table.columns, *table.rows):
            cells = [cell.rjust(width) for cell, width in zip(line, others, strict=True)]
            block.append("  " + " ".join([name.ljust(first), *cells]).rstrip())
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def show(tables: Sequence[Table], notes: Sequence[str] = (), *, console: Any = None) -> None:
    """Prints tables, such as the ``tables()`` of a ``Plan``, and ``notes`` below them.

    A column whose name ends in ``*`` is highlighted. The ``rich.console.Console`` to print on is by
    default one as wide as the terminal.

    Raises:
      ValueError: rich is not installed.

    >>> show([], ["activations are not counted"])
    activations are not counted
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable
    except ImportError:
        raise ValueError(f"tables need rich: {NEED}. Or request --json.") from None
    # On a terminal, its width; else 80 columns, or as many as the widest table has.
    # It has a space between columns and at both ends.
    widest = max([80, *(sum(_widths(table)) + len(table.columns) + 1 for table in tables)])
    width = None if sys.stdout.isatty() else widest
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


def _widths(table: Table) -> list[int]:
    return [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
