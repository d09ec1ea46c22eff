"""Text tables for the ``describe`` functions."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as aligned columns; the last column is aligned to the right."""
    *widths, width = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([*map(str.ljust, cells, widths), last.rjust(width)]) for *cells, last in lines
    )
