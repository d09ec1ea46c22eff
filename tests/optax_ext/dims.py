"""Which dims of which array are factored: the table that both optimizers are checked on."""

import re

from optax_ext import Factoring, by_path

# id -> shape, factoring. The id says why the row is here.
CASES = {
    "plain matrix": ((6, 5), Factoring((0,), (1,))),
    "columns before rows": ((4, 6), Factoring((1,), (0,))),
    "two dims are the columns": ((4, 3, 5), Factoring((0,), (1, 2))),
    "two dims are the rows": ((4, 3, 5), Factoring((0, 1), (2,))),
    "rows around the columns": ((3, 4, 5), Factoring((0, 2), (1,))),
    "stacked, one clip": ((3, 6, 5), Factoring((1,), (2,))),
    "batch, a clip each": ((3, 6, 5), Factoring((1,), (2,), (0,))),
    "batch last": ((6, 5, 3), Factoring((0,), (1,), (2,))),
    "batch and stacked": ((3, 2, 4, 5), Factoring((0,), (3,), (1,))),
    "everything at once": ((2, 3, 4, 2, 3), Factoring((1, 3), (2,), (0,))),
    "vectors in a batch": ((3, 7), Factoring(batch=(0,))),
    "a matrix with its full moment": ((4, 6), Factoring()),
    "a scalar": ((), Factoring()),
    "one row": ((1, 7), Factoring((0,), (1,))),
    "one column": ((7, 1), Factoring((0,), (1,))),
    "one element a slice": ((5, 1, 1), Factoring((1,), (2,), (0,))),
}


def rule(cases):
    """The factoring of every array of a tree."""
    return by_path({f"^{re.escape(name)}$": factoring for name, (_, factoring) in cases.items()})


def as_kwargs(factoring):
    return {"rows": factoring.rows, "cols": factoring.cols, "batch": factoring.batch}
