"""Branches, loops and slices of devices by their own data: predicates and places that differ."""

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from optax_ext.equations import Scan, inner_jaxprs, record_of

# Their results are the same on all devices of their axes.
_COLLECTIVES = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def collective_in(jaxpr: Jaxpr, apart: Collection[int], inside: bool = False) -> str | None:
    """The name of a collective in an equation that diverges; some devices would wait in it."""
    for eqn in jaxpr.eqns:
        name: str | None = eqn.primitive.name
        if inside and name in _COLLECTIVES | {"reduce_scatter", "all_to_all", "ppermute"}:
            return name
        for sub in inner_jaxprs(eqn):
            name = collective_in(sub, apart, inside or id(eqn) in apart)
            if name:
                return name
    return None


def diverging(jaxpr: Jaxpr, varies: Sequence[bool], axes: Sequence[str]) -> set[int]:
    """The ids of all equations whose predicate or place differs over ``axes``, as inputs do."""
    apart: set[int] = set()
    _outputs_vary(jaxpr, list(varies), set(axes), apart)
    return apart


def _outputs_vary(jaxpr: Jaxpr, varies: list[bool], axes: set[str], apart: set[int]) -> list[bool]:
    """Whether each output of a jaxpr differs; adds the equations that diverge to ``apart``."""
    known = dict(zip(jaxpr.invars, varies, strict=True))
    for eqn in jaxpr.eqns:
        operands = [not isinstance(x, Literal) and known.get(x, False) for x in eqn.invars]
        known |= zip(eqn.outvars, _results_vary(eqn, operands, axes, apart), strict=True)
    return [not isinstance(x, Literal) and known.get(x, False) for x in jaxpr.outvars]


def _results_vary(eqn: Any, varies: list[bool], axes: set[str], apart: set[int]) -> list[bool]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == "dynamic_slice" and any(varies[1:]):
        apart.add(id(eqn))
    if name == "axis_index":
        return [True]
    if name in _COLLECTIVES:
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        same = axes <= set(over if isinstance(over, tuple) else (over,))
        return [any(varies) and not same] * count
    if name == "cond":
        branches = [_outputs_vary(b, varies[1:], axes, apart) for b in inner_jaxprs(eqn)]
        if varies[0]:
            apart.add(id(eqn))
        return [varies[0] or any(out) for out in zip(*branches, strict=True)]
    if name == "while":
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        # constants of the predicate, constants of the body, what is carried
        first, second = len(cond.invars) - count, len(body.invars) - count
        carried, stops, again = varies[first + second :], False, True
        while again:
            stops = _outputs_vary(cond, varies[:first] + carried, axes, apart)[0]
            new = _outputs_vary(body, varies[first : first + second] + carried, axes, apart)
            new = [a or b or stops for a, b in zip(carried, new, strict=True)]
            again, carried = new != carried, new
        if stops:
            apart.add(id(eqn))
        return carried
    sizes = len(varies), count
    inner = [f for f in inner_jaxprs(eqn) if (len(f.invars), len(f.outvars)) == sizes]
    if not inner:
        return [any(varies)] * count
    record, outs = record_of(eqn), _outputs_vary(inner[0], varies, axes, apart)
    while isinstance(record, Scan):  # until what it carries differs no more
        start, stop = record.num_consts, record.num_consts + record.num_carry
        carried = [a or b for a, b in zip(varies[start:stop], outs, strict=False)]
        if carried == varies[start:stop]:
            break
        varies = varies[:start] + carried + varies[stop:]
        outs = _outputs_vary(inner[0], varies, axes, apart)
    return outs
