"""Tables of text, for what transformations say of themselves."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of columns; the last column is a number."""
    last = len(lines[0]) - 1
    widths = [max(len(line[i]) for line in lines) for i in range(last + 1)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i == last else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
