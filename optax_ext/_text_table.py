"""Text tables for the ``describe`` functions."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as aligned columns; the last column is aligned to the right."""
    last = len(lines[0]) - 1
    widths = [max(len(line[i]) for line in lines) for i in range(last + 1)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i == last else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
