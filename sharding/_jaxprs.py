"""The equations inside a jaxpr, and those of its inputs that it reads."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr
from jax.interpreters import partial_eval

from optax_ext.equations import check_known
from optax_ext.equations import inner_jaxprs as inner_jaxprs


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_equations(inner)


def inputs_read(jaxpr: Jaxpr) -> list[bool]:
    """For each input, whether an output depends on it."""
    check_known(jaxpr)
    used: list[bool] = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    return used
