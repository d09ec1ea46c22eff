"""What a loss does with its parameters: which it gathers or looks up itself."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


class Uses(NamedTuple):
    """What a loss does with its parameters; numbers of these.

    Attributes:
      marked: by mark, which it passes to a function that leaves it, and the fewest dims they have
        there: loops over layers take dims off the front.
      otherwise: which it uses in another way.
      branched: which it marks in a branch that not all devices need take.
      unknown: by mark, shapes of what is marked and is no parameter as it came.
    """

    marked: dict[str, dict[int, int]]
    otherwise: set[int]
    branched: set[int]
    unknown: dict[str, list[tuple[int, ...]]]


def uses(fn: Callable[..., Any], params: list[Any], marks: Sequence[str], *args: Any) -> Uses:
    """What ``fn(params, *args)`` does with its parameters.

    Args:
      fn: a loss.
      params: abstract arrays of whole shapes.
      marks: which names are marks.
      *args: abstract arrays, too.
    """
    jaxpr: Any = jax.make_jaxpr(fn)(params, *args).jaxpr
    found = Uses({mark: {} for mark in marks}, set(), set(), {mark: [] for mark in marks})
    _find_uses(jaxpr, {jaxpr.invars[i]: i for i in range(len(params))}, found)
    return found


def _find_uses(jaxpr: Any, source: dict[Any, int], uses: Uses, branch: bool = False) -> None:
    """Adds what a jaxpr does with the variables in ``source``."""
    uses.otherwise.update(source[var] for var in jaxpr.outvars if _known(var, source))
    for eqn in jaxpr.eqns:
        found = [(i, source[var]) for i, var in enumerate(eqn.invars) if _known(var, source)]
        mark = eqn.params["name"] if eqn.primitive.name == "name" else None
        if mark in uses.marked:
            shape = eqn.invars[0].aval.shape
            if not found:
                uses.unknown[mark].append(shape)
            for _, leaf in found:
                kept = uses.marked[mark]
                kept[leaf] = min(len(shape), kept.get(leaf, len(shape)))
                uses.branched.update({leaf} if branch else ())
            continue
        if eqn.primitive.name == "sharding_constraint" and found:
            source = source | {eqn.outvars[0]: found[0][1]}
            continue
        inner = list(_inner_jaxprs(eqn))
        if not inner:
            uses.otherwise.update(leaf for _, leaf in found)
        own = branch or eqn.primitive.name in ("cond", "while")
        for sub, first in inner:
            uses.otherwise.update(leaf for i, leaf in found if i < first)
            known = {sub.invars[i - first]: leaf for i, leaf in found if i >= first}
            _find_uses(sub, known, uses, own)


def _known(var: Any, source: dict[Any, int]) -> bool:
    return not hasattr(var, "val") and var in source  # literals have values, and no hash


def _inner_jaxprs(eqn: Any) -> Iterator[tuple[Any, int]]:
    """Inner jaxprs whose arguments are those of the equation, from the given one on."""
    for value in eqn.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            sub: Any = getattr(item, "jaxpr", item)
            if not hasattr(sub, "eqns"):
                continue
            first = 1 if eqn.primitive.name == "cond" else 0  # the index of the branch
            if len(sub.invars) + first == len(eqn.invars):
                yield sub, first
