"""How a loss uses its parameters: which ones it gathers, or looks up rows of, by itself."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from sharding.step._diverging import collective_in, diverging


class ParamUses(NamedTuple):
    """How a function uses its parameters, given by their indices.

    Attributes:
      marked: for each mark, the parameters that carry it, each with the smallest number of dims it
        has there: loops over layers take dims off the front.
      otherwise: the parameters with any unmarked use.
      branched: the parameters marked in a branch or a loop of unknown length.
      diverging: those of them marked where devices take branches, or loop, by their own data.
      repeated: the parameters marked more than once, or in a loop that does not slice them.
      custom: the parameters that a function with a derivative of its own gets.
      unknown: for each mark, shapes of marked arrays that are not unmodified parameters.
      apart: the name of a collective in a branch or loop that devices take by their own data.
    """

    marked: dict[str, dict[int, int]]
    otherwise: set[int]
    branched: set[int]
    diverging: set[int]
    repeated: set[int]
    custom: set[int]
    unknown: dict[str, list[tuple[int, ...]]]
    apart: str | None


def find_uses(
    fn: Callable[..., Any],
    params: list[Any],
    marks: Sequence[str],
    *args: Any,
    axes: Sequence[str] = (),
) -> ParamUses:
    """Traces ``fn(params, *args)`` and reports how it uses its parameters.

    Args:
      fn: a function of a list of parameters, such as a loss.
      params: abstract arrays of unsharded shapes.
      marks: the names that ``checkpoint_name`` gives to parameters.
      *args: abstract arrays, too, which differ between devices.
      axes: the mesh axes of these devices; without, nothing is found to diverge.
    """
    return uses_in(jax.make_jaxpr(fn)(params, *args).jaxpr, len(params), marks, axes)


def uses_in(
    jaxpr: Any, num_params: int, marks: Sequence[str] = (), axes: Sequence[str] = ()
) -> ParamUses:
    """As ``find_uses``, of a function that is traced already; parameters are its first inputs."""
    params = {jaxpr.invars[i]: i for i in range(num_params)}
    # Of an update, which runs on the mesh, nobody asks for branches of single devices.
    varies = [var not in params for var in jaxpr.invars]
    apart = diverging(jaxpr, varies, axes) if axes else set()
    found = ParamUses(
        marked={mark: {} for mark in marks},
        otherwise=set(),
        branched=set(),
        diverging=set(),
        repeated=set(),
        custom=set(),
        unknown={mark: [] for mark in marks},
        apart=collective_in(jaxpr, apart),
    )
    _visit(jaxpr, params, found, apart)
    return found


def _visit(
    jaxpr: Any,
    params: dict[Any, int],
    uses: ParamUses,
    apart: set[int],
    branch: bool = False,
    diverges: bool = False,
    looped: frozenset[int] = frozenset(),
) -> None:
    """Adds the uses in one jaxpr.

    Args:
      jaxpr: of the function, or of a loop, branch or call in it.
      params: the variables that hold parameters, with their indices.
      uses: where they are added.
      apart: the ids of equations whose predicates differ between devices.
      branch: whether some devices may not run this jaxpr, or not as often.
      diverges: whether they differ in that.
      looped: the parameters that every run of a loop around this jaxpr gets in full.
    """
    uses.otherwise.update(params[var] for var in jaxpr.outvars if _holds_param(var, params))
    for eqn in jaxpr.eqns:
        operands = [
            (i, params[var]) for i, var in enumerate(eqn.invars) if _holds_param(var, params)
        ]
        mark = eqn.params["name"] if eqn.primitive.name == "name" else None
        if mark in uses.marked:
            shape = eqn.invars[0].aval.shape
            if not operands:
                uses.unknown[mark].append(shape)
            for _, param in operands:
                ndims = uses.marked[mark]
                uses.repeated.update({param} & (looped | ndims.keys()))
                ndims[param] = min(len(shape), ndims.get(param, len(shape)))
                uses.branched.update({param} if branch else ())
                uses.diverging.update({param} if diverges else ())
            continue
        if operands and (eqn.primitive.name == "sharding_constraint" or _splits_layers(eqn)):
            params = params | {eqn.outvars[0]: operands[0][1]}  # still the parameter
            continue
        if eqn.primitive.name.startswith("custom_vjp"):
            uses.custom.update(param for _, param in operands)
        inner = list(_inner_jaxprs(eqn))
        full_ndim = {param: eqn.invars[i].aval.ndim for i, param in operands}
        if not inner:
            uses.otherwise.update(param for _, param in operands)
        in_branch = branch or eqn.primitive.name in ("cond", "while")
        apart_here = diverges or id(eqn) in apart
        for sub, first in inner:
            uses.otherwise.update(param for i, param in operands if i < first)
            passed = {sub.invars[i - first]: param for i, param in operands if i >= first}
            in_full = set()
            if eqn.primitive.name == "scan":  # a loop over layers takes the first dim off
                in_full = {p for var, p in passed.items() if var.aval.ndim == full_ndim[p]}
            _visit(sub, passed, uses, apart, in_branch, apart_here, looped | in_full)


def _splits_layers(eqn: Any) -> bool:
    """Whether an operation only makes several dims of the first one, for loops within loops."""
    if eqn.primitive.name != "reshape":
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    others = len(before) - 1
    return 0 < others < len(after) and after[len(after) - others :] == before[1:]


def _holds_param(var: Any, params: dict[Any, int]) -> bool:
    return not hasattr(var, "val") and var in params  # literals have values, and no hash


def _inner_jaxprs(eqn: Any) -> Iterator[tuple[Any, int]]:
    """Inner jaxprs whose arguments are the operands of the equation, from a first one on."""
    for value in eqn.params.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            sub: Any = getattr(item, "jaxpr", item)
            if not hasattr(sub, "eqns"):
                continue
            first = 1 if eqn.primitive.name == "cond" else 0  # the index of the branch
            if len(sub.invars) + first == len(eqn.invars):
                yield sub, first
