"""What parts of a loss print that run again, and effects that cannot run again.

Such a part prints no more than under ``jit``: once, and once more where the loss itself says that
it is computed again, by ``jax.checkpoint``.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from optax_ext.equations import Call, Remat, Scan, inner_jaxprs, name_of, record_of
from optax_ext.traced_graph import Equation
from optax_ext.user_line import line_of

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


def printing_less(
    eqn: Any, operands: list[Any], run: Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]
) -> Sequence[Any]:
    """The results of a branch or a loop, whose functions ``run`` runs; none of a print."""
    params = eqn.params
    if eqn.primitive.name == "cond":
        branches = [lambda *x, f=f: run(f, x) for f in params["branches"]]
        of_branch: list[Any] = lax.switch(operands[0], branches, *operands[1:])
        return of_branch
    if eqn.primitive.name != "while":
        return []
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = operands[:first], operands[first : first + second]
    found: list[Any] = lax.while_loop(
        lambda carry: run(params["cond_jaxpr"], [*of_cond, *carry])[0],
        lambda carry: run(params["body_jaxpr"], [*of_body, *carry]),
        operands[first + second :],
    )
    return found


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
