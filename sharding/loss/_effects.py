"""Effects of a loss that cannot run again; prints (``jax.debug.print``) can be left out then."""

from jax.extend.core import Jaxpr

from optax_ext.equations import Call, Remat, Scan, inner_jaxprs, name_of, record_of
from optax_ext.user_line import line_of

_PRINT = "Debug"  # how JAX names the effect of a print whose order is free


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
