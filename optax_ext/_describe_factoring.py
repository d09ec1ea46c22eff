"""The table of what a rule factors, and of the bytes of second moments."""

import dataclasses
import math
from collections.abc import Sequence

import optax

from optax_ext._factored_moments import moment_dims
from optax_ext._factoring import Dims, Factoring, FactoringRule, check_rule, factorings
from optax_ext._flax_transformer import split_of
from optax_ext._leaves import Leaves, at_least_float32
from optax_ext._types import Array


@dataclasses.dataclass(frozen=True)
class FactoringRow:
    """One parameter of a ``FactoringTable``."""

    path: str  # its keys joined by /
    shape: tuple[int, ...]
    factoring: Factoring
    nbytes: int  # of its second moment


@dataclasses.dataclass(frozen=True)
class FactoringTable:
    """The factoring of every parameter under a rule; ``str`` formats it as a table."""

    rows: tuple[FactoringRow, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all second moments."""
        return sum(row.nbytes for row in self.rows)

    def __str__(self) -> str:
        lines = [(r.path, str(r.shape), _in_sizes(r), f"{r.nbytes:,} bytes") for r in self.rows]
        lines.append(("all", "", "", f"{self.nbytes:,} bytes"))
        return aligned(lines)


def _in_sizes(row: FactoringRow) -> str:
    """Returns the factoring in sizes: rows x columns, and the number of matrices."""

    def sizes(dims: Dims) -> str:
        return "*".join(str(row.shape[d]) for d in dims)

    factoring = row.factoring
    used = (*factoring.rows, *factoring.cols, *factoring.batch)
    stacked = tuple(d for d in range(len(row.shape)) if d not in used)
    words = "full" if not factoring.factored else f"{sizes(factoring.rows)} x "
    words += sizes(factoring.cols)
    words += f", {sizes(factoring.batch)} apart" if factoring.batch else ""
    words += f", {sizes(stacked)} stacked" if factoring.factored and stacked else ""
    free = tuple(d for d in range(len(row.shape)) if d not in factoring.batch)
    if factoring.factored:
        split = split_of(tuple(row.shape[d] for d in free))
        best = Factoring(free[:split], free[split:], factoring.batch)
        times = _num_statistics(row.shape, factoring) / _num_statistics(row.shape, best)
        if times > 4:
            words += f"; {times:.0f} times {sizes(best.rows)} x {sizes(best.cols)}"
    return words


def _num_statistics(shape: Dims, factoring: Factoring) -> int:
    dims = moment_dims(len(shape), factoring)
    return sum(math.prod(shape[d] for d in own) for own in dims if own is not None)


def describe_factoring(rule: FactoringRule | None, params: optax.Params) -> FactoringTable:
    """Lists the factoring of every parameter under a rule, and the bytes of one second moment.

    CAME has the same again for the instability. A parameter with more than 4 times the state of one
    matrix is marked.

    Args:
      rule: a rule, as optimizers take it; None factors nothing.
      params: the parameters, or abstract arrays in their place.

    Raises:
      ValueError: if ``rule`` is not a rule, or does not fit a parameter's shape.

    Example:
      >>> import jax.numpy as jnp
      >>> from optax_ext import describe_factoring, flax_transformer
      >>> params = {"layers": {"query": {"kernel": jnp.ones((2, 8, 4, 16))}}, "head": jnp.ones(5)}
      >>> print(describe_factoring(flax_transformer(), params))
      head                 (5,)           full                   20 bytes
      layers/query/kernel  (2, 8, 4, 16)  8 x 4*16, 2 apart     576 bytes
      all                                                       596 bytes
    """

    def row(path: str, leaf: Array, factoring: Factoring) -> FactoringRow:
        shape = tuple(leaf.shape)
        size = at_least_float32(leaf.dtype).itemsize
        return FactoringRow(path, shape, factoring, _num_statistics(shape, factoring) * size)

    leaves = Leaves.of(params)
    dims = factorings(check_rule("rule", rule), leaves)
    return FactoringTable(tuple(map(row, leaves.paths, leaves.arrays, dims)))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as aligned columns; the last column is aligned to the right."""
    *widths, width = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([*map(str.ljust, cells, widths), last.rjust(width)]) for *cells, last in lines
    )
