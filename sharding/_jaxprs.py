"""The functions inside an equation of a jaxpr, and the equations inside a function."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from optax_ext.traced_graph import Equation

CHECKPOINTS = ("checkpoint", "remat", "remat2")


def inner_jaxprs(eqn: JaxprEqn | Equation) -> Iterator[Jaxpr]:
    """The functions that an equation calls, in the order of its parameters: bodies, branches."""
    for value in eqn.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            jaxpr: Any = getattr(item, "jaxpr", item)  # of a ClosedJaxpr
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_equations(inner)


def inputs_read(jaxpr: Jaxpr) -> list[bool]:
    """For each input, whether an output depends on it."""
    used: list[bool] = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    return used


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan's equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, *_ = params["ft_in"].unpack()  # since jax 0.11
    return len(list(consts)), len(list(carry))
