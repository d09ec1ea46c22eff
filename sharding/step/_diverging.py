"""Branches, loops and slices of devices by their own data: predicates and places that differ."""

from collections.abc import Sequence
from typing import Any

# Their results are the same on all devices of their axes.
_COLLECTIVES = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def collective_in(jaxpr: Any, apart: set[int], inside: bool = False) -> str | None:
    """The name of a collective in an equation that diverges; some devices would wait in it."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if inside and name in _COLLECTIVES | {"reduce_scatter", "all_to_all", "ppermute"}:
            return name
        for value in eqn.params.values():
            for item in value if isinstance(value, list | tuple) else (value,):
                sub = getattr(item, "jaxpr", item)
                if hasattr(sub, "eqns"):
                    found = collective_in(sub, apart, inside or id(eqn) in apart)
                    if found:
                        return found
    return None


def diverging(jaxpr: Any, varies: Sequence[bool], axes: Sequence[str]) -> set[int]:
    """The ids of the equations, in a jaxpr and all within it, whose predicate or place differs.

    Args:
      jaxpr: of a function that runs on each device.
      varies: of its inputs, whether they differ between the devices.
      axes: the mesh axes of these devices.
    """
    found: set[int] = set()
    _outs(jaxpr, list(varies), set(axes), found)
    return found


def _outs(jaxpr: Any, varies: list[bool], axes: set[str], found: set[int]) -> list[bool]:
    """Of the outputs of a jaxpr, whether they differ; adds the equations that diverge."""
    known = dict(zip(jaxpr.invars, varies, strict=True))

    def of(var: Any) -> bool:
        return not hasattr(var, "val") and known.get(var, False)  # constants are the same

    for eqn in jaxpr.eqns:
        known |= zip(
            eqn.outvars, _of_equation(eqn, [*map(of, eqn.invars)], axes, found), strict=True
        )
    return [of(var) for var in jaxpr.outvars]


def _of_equation(eqn: Any, varies: list[bool], axes: set[str], found: set[int]) -> list[bool]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == "dynamic_slice" and any(varies[1:]):
        found.add(id(eqn))
    if name == "axis_index":
        return [True]
    if name in _COLLECTIVES:
        over = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        same = axes <= set(over if isinstance(over, tuple) else (over,))
        return [any(varies) and not same] * count
    if name == "cond":
        branches = [_outs(b.jaxpr, varies[1:], axes, found) for b in eqn.params["branches"]]
        if varies[0]:
            found.add(id(eqn))
        return [varies[0] or any(out) for out in zip(*branches, strict=True)]
    if name == "while":
        cond, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        # constants of the predicate, constants of the body, what is carried
        first, second = len(cond.invars) - count, len(body.invars) - count
        carried, stops, again = varies[first + second :], False, True
        while again:
            stops = _outs(cond, varies[:first] + carried, axes, found)[0]
            new = _outs(body, varies[first : first + second] + carried, axes, found)
            new = [a or b or stops for a, b in zip(carried, new, strict=True)]
            again, carried = new != carried, new
        if stops:
            found.add(id(eqn))
        return carried
    inner: list[Any] = [
        sub
        for value in eqn.params.values()
        if hasattr(sub := getattr(value, "jaxpr", value), "eqns")
        and len(sub.invars) == len(varies)
        and len(sub.outvars) == count
    ]
    if name == "scan" and inner:
        (body,) = inner
        # What is carried has as many dims in the body; what is sliced or stacked has one less.
        xs = sum(a.aval.ndim != b.aval.ndim for a, b in zip(eqn.invars, body.invars, strict=True))
        ys = sum(a.aval.ndim != b.aval.ndim for a, b in zip(eqn.outvars, body.outvars, strict=True))
        start, stop = len(varies) - xs - (count - ys), len(varies) - xs
        while True:
            outs = _outs(body, varies, axes, found)
            after = [a or b for a, b in zip(varies[start:stop], outs[: count - ys], strict=True)]
            if after == varies[start:stop]:
                return outs
            varies = varies[:start] + after + varies[stop:]
    if inner:
        return _outs(inner[0], varies, axes, found)
    return [any(varies)] * count
