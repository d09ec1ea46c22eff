"""The functions inside an equation of a jaxpr, and the equations inside a function."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives
from jax.interpreters import partial_eval

from optax_ext.traced_graph import Equation


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


def checkpointed(eqn: JaxprEqn) -> Jaxpr | None:
    """What a ``jax.checkpoint`` runs; None of other equations."""
    return eqn.params["jaxpr"] if eqn.primitive.name in ("checkpoint", "remat", "remat2") else None


def without_checkpoints(jaxpr: Any) -> Any:
    """The same operations, in loops and branches, too, with no ``jax.checkpoint`` around them."""
    if type(jaxpr) in (list, tuple):
        return type(jaxpr)(map(without_checkpoints, jaxpr))
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # of one that is closed; since jax 0.11 it is itself
    if not isinstance(inner, Jaxpr):
        return jaxpr
    equations = []
    for eqn in inner.eqns:
        params = {name: without_checkpoints(value) for name, value in eqn.params.items()}
        if body := checkpointed(eqn):
            params = {"call_jaxpr": ClosedJaxpr(without_checkpoints(body), ())}
            eqn = eqn.replace(primitive=primitives.closed_call_p)
        equations.append(eqn.replace(params=params))
    inner = inner.replace(eqns=equations)
    return jaxpr.replace(jaxpr=inner) if isinstance(jaxpr, ClosedJaxpr) else inner


def inputs_read(jaxpr: Jaxpr) -> list[bool]:
    """For each input, whether an output depends on it."""
    used: list[bool] = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    return used
