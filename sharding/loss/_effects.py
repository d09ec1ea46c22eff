"""What parts of a loss print that run again, and effects that cannot run again.

Such a part prints no more than under ``jit``: once, and once more where the loss itself says that
it is computed again, by ``jax.checkpoint``.
"""

import dataclasses
import enum
import functools
from typing import Any

from jax.extend.core import Jaxpr

from optax_ext.equations import Call, Remat, Scan, inner_jaxprs, name_of, record_of
from optax_ext.traced_graph import Equation
from optax_ext.user_line import line_of
from sharding._jaxprs import call_of, rewritten

_PRINT = "Debug"  # how JAX names the effect of a print whose order is free


class Prints(enum.Enum):
    """What a part of a loss prints (``jax.debug.print``)."""

    ALL = "everything"  # it runs for the first time
    OF_CHECKPOINTS = "what is in checkpoints"  # it runs again
    NONE = "nothing"


def has_prints(eqn: Any) -> bool:
    """Whether an equation prints, or one inside of it."""
    results = eqn.results if isinstance(eqn, Equation) else eqn.outvars
    return not results or any(jaxpr.effects for jaxpr in inner_jaxprs(eqn))


def printing_less(eqn: Any, prints: Prints) -> Any:
    """An equation of a jaxpr or of a graph, with these prints alone; None if it has no results."""
    if prints is Prints.ALL or not has_prints(eqn):
        return eqn
    record, is_of_graph = record_of(eqn), isinstance(eqn, Equation)
    if not (eqn.results if is_of_graph else eqn.outvars):
        return None
    less = functools.partial(with_prints, prints=prints)
    if isinstance(record, Remat):  # it is computed again: now
        body = record.body if prints is Prints.OF_CHECKPOINTS else less(record.body)
        new = call_of(body)
    else:
        new = {"params": {name: less(value) for name, value in eqn.params.items()}}
    if is_of_graph:
        return dataclasses.replace(eqn, **new)
    eqn = eqn.replace(**new)
    return eqn.replace(effects={x for inner in inner_jaxprs(eqn) for x in inner.effects})


def with_prints(function: Any, prints: Prints) -> Any:
    """A traced function, or several, with these prints alone."""
    is_quiet = not getattr(getattr(function, "jaxpr", function), "effects", True)
    if prints is Prints.ALL or is_quiet:
        return function
    return rewritten(function, functools.partial(printing_less, prints=prints))


def check_effects(jaxpr: Jaxpr, otherwise: str, line: str = "") -> None:
    """Raises if a loss has effects that are not prints, or prints where they cannot be left out."""
    for eqn in jaxpr.eqns:
        record = record_of(eqn)
        # References that a call makes are its own, and not among its effects.
        if not (eqn.effects or isinstance(record, Call)):
            continue
        at = line_of(eqn.source_info) or line
        is_run = isinstance(record, Call | Remat | Scan) or eqn.primitive.name in ("cond", "while")
        for inner in inner_jaxprs(eqn) if is_run else ():
            check_effects(inner, otherwise, at)
        prints_alone = {str(effect) for effect in eqn.effects} <= {_PRINT}
        if is_run or (prints_alone and not list(inner_jaxprs(eqn))):
            continue
        raise ValueError(
            "update='backward' computes parts of a loss again, and the loss has an effect: "
            f"{' at '.join(filter(None, (name_of(eqn), at)))}. "
            "Only jax.debug.print and jax.debug.callback without ordered=True, outside of custom "
            "derivatives, can be left out when a part runs again. Return values as aux instead of "
            f"writing them to references or by io_callback, {otherwise}."
        )
