"""Prints of a loss, where its parts run again; and effects that cannot run again.

Under ``jit`` a print (``jax.debug.print``, ``jax.debug.callback``) runs once, and once more where
the loss itself says that it is computed again, by ``jax.checkpoint``.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from optax_ext.equations import Call, Remat, Scan, inner_jaxprs, name_of, record_of
from optax_ext.traced_graph import Equation, bind, bind_equation
from sharding._jaxprs import run_scan
from sharding._user_line import line_of


class Run(enum.Enum):
    """Whether a part of a loss runs for the first time, which decides what it prints."""

    FIRST = "everything"
    AGAIN = "what is in checkpoints"
    SILENTLY = "nothing"


_PRINT = "Debug"  # how JAX names the effect of a print whose order is free


def prints(eqn: Any) -> bool:
    """Whether an equation prints, or one inside of it."""
    return not results_of(eqn) or any(jaxpr.effects for jaxpr in inner_jaxprs(eqn))


def results_of(eqn: Any) -> Sequence[Any]:
    found: Sequence[Any] = eqn.results if isinstance(eqn, Equation) else eqn.outvars
    return found


def check_effects(jaxpr: Jaxpr, otherwise: str, line: str = "") -> None:
    """Raises if a loss has effects that are not prints, or prints where they cannot be left out."""
    for eqn in jaxpr.eqns:
        record = record_of(eqn)
        at = line_of(eqn.source_info) or line
        # References that a call makes are its own, and not among its effects.
        if not (eqn.effects or isinstance(record, Call)):
            continue
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


def evaluate(equations: Iterable[Equation], values: dict[Any, Any], run: Run) -> None:
    """Adds the results of equations to ``values``, which has their operands."""
    for eqn in equations:
        out = _bind(eqn, [values[v] for v in eqn.operands], run)
        values |= zip(eqn.results, out, strict=True)


def call(closed: ClosedJaxpr, args: Sequence[Any], run: Run) -> list[Any]:
    """The results of a jaxpr."""
    if run is Run.FIRST or not closed.jaxpr.effects:
        return list(jaxpr_as_fun(closed)(*args))
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env |= zip(closed.jaxpr.invars, args, strict=True)

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else env[x]

    for eqn in closed.jaxpr.eqns:
        env |= zip(eqn.outvars, _bind(eqn, list(map(read, eqn.invars)), run), strict=True)
    return list(map(read, closed.jaxpr.outvars))


def _bind(eqn: Any, operands: list[Any], run: Run) -> Sequence[Any]:
    """The results of an equation."""
    if run is Run.FIRST or not prints(eqn):
        return (bind if isinstance(eqn, Equation) else bind_equation)(eqn, operands)
    record, params = record_of(eqn), eqn.params
    if isinstance(record, Call):
        return call(record.body, operands, run)
    if isinstance(record, Remat):  # which prints when it is computed again: now
        inside = Run.FIRST if run is Run.AGAIN else run
        return call(ClosedJaxpr(record.body, ()), operands, inside)
    if isinstance(record, Scan):
        return run_scan(record, operands, lambda *args: call(record.body, args, run))
    if eqn.primitive.name == "cond":
        branches = [lambda *x, branch=branch: call(branch, x, run) for branch in params["branches"]]
        return lax.switch(operands[0], branches, *operands[1:])
    if eqn.primitive.name == "while":
        return _while(params, operands, run)
    return []  # a print


def _while(params: dict[str, Any], operands: list[Any], run: Run) -> list[Any]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = operands[:first], operands[first : first + second]

    def goes_on(carry: list[Any]) -> Any:
        return call(params["cond_jaxpr"], [*of_cond, *carry], run)[0]

    def step(carry: list[Any]) -> list[Any]:
        return call(params["body_jaxpr"], [*of_body, *carry], run)

    found: list[Any] = lax.while_loop(goes_on, step, operands[first + second :])
    return found
