"""How a loss uses its parameters: which ones it gathers, or looks up rows of, by itself."""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import partial_eval

from sharding._jaxprs import inner_jaxprs
from sharding._user_line import is_users
from sharding.step._branches_by_device import collective_in, diverging

_JAX = os.path.dirname(jax.__file__) + os.sep


class ParamUses(NamedTuple):
    """How a function uses its parameters, given by their indices."""

    # For each mark, the parameters that carry it, with their smallest number of dims: loops over
    # layers take dims off the front.
    marked: dict[str, dict[int, int]]
    # With any unmarked use: the first equation of one; None if it is an output.
    otherwise: dict[int, Any]
    viewed: dict[int, Any]  # of which views are marked, such as single layers: the equation of one
    dims: dict[int, set[int]]  # of marked ones, the sharded dims there, counted from the end
    dead: dict[int, Any]  # of which something is computed that no output needs: its equation
    branched: set[int]  # marked in a branch or a loop of unknown length
    diverging: set[int]  # of these, where devices take branches, or loop, by their own data
    repeated: set[int]  # marked more than once, or in a loop that does not slice them
    custom: set[int]  # that a function with a derivative of its own gets
    unknown: dict[str, list[tuple[int, ...]]]  # shapes of marked arrays that are no parameters
    moved: set[int]  # from which such arrays are made without arithmetic
    apart: str | None  # a collective in a branch or loop that devices take by their own data


class _Param(NamedTuple):
    """A variable that holds a parameter, a slice of one in a loop, or a view of either."""

    number: int
    dim: int  # its sharded dim, counted from the end; 0 for none
    view: Any = None  # the first equation that makes a view of it
    moved: bool = False  # whether it is no view, but made without arithmetic


# Primitives, of one array and perhaps indices, that make no numbers; some are views.
_MOVES = {"convert_element_type", "dynamic_slice", "gather", "reshape", "rev", "reshard", "slice"}
_MOVES |= {"sharding_constraint", "split", "squeeze", "stop_gradient", "transpose"}


def find_uses(
    fn: Callable[..., Any],
    params: list[Any],
    marks: Sequence[str],
    *args: Any,
    axes: Sequence[str] = (),
    dims: Sequence[int] | None = None,
) -> ParamUses:
    """Traces ``fn(params, *args)`` and reports how it uses its parameters, a list.

    ``marks`` are names by ``checkpoint_name``, ``axes`` those of the devices between which ``args``
    differ, ``dims`` the sharded dims of parameters, counted from the end; 0 for none.
    """
    return uses_in(jax.make_jaxpr(fn)(params, *args).jaxpr, len(params), marks, axes, dims)


def uses_in(
    jaxpr: Any,
    num_params: int,
    marks: Sequence[str] = (),
    axes: Sequence[str] = (),
    dims: Sequence[int] | None = None,
) -> ParamUses:
    """As ``find_uses``, of a function that is traced already; parameters are its first inputs."""
    live = without_dead(jaxpr)
    given = [_Param(i, dims[i] if dims else 0) for i in range(num_params)]
    # Of an update, which runs on the mesh, nobody asks for branches of single devices.
    varies = [i >= num_params for i in range(len(live.invars))]
    apart = diverging(live, varies, axes) if axes else set()
    found, every = (
        _uses_of(each, dict(zip(each.invars, given, strict=False)), marks, apart)
        for each in (live, jaxpr)
    )
    dead = {i: eqn for i, eqn in every.otherwise.items() if i not in found.otherwise}
    return found._replace(dead=dead, apart=collective_in(live, apart))


def without_dead(jaxpr: Any) -> Any:
    """The jaxpr without the equations that no output needs."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def _uses_of(
    jaxpr: Any, params: dict[Any, _Param], marks: Sequence[str], apart: set[int]
) -> ParamUses:
    marked: dict[str, dict[int, int]] = {mark: {} for mark in marks}
    unknown: dict[str, list[tuple[int, ...]]] = {mark: [] for mark in marks}
    uses = ParamUses(marked, {}, {}, {}, {}, set(), set(), set(), set(), unknown, set(), None)
    for out in filter(None, _visit(jaxpr, params, uses, apart)):
        uses.otherwise.setdefault(out.number, None)
    return uses


def _visit(
    jaxpr: Any,
    params: dict[Any, _Param],  # by the variables that hold them
    uses: ParamUses,
    apart: set[int],  # ids of equations whose predicates differ between devices
    branch: bool = False,  # whether some devices may not run this jaxpr, or not as often
    diverges: bool = False,  # whether they differ in that
    looped: frozenset[int] = frozenset(),  # that every run of a loop around it gets in full
    call: Any = None,  # the equation that calls it, if it is of a function of jax
) -> list[_Param | None]:
    """Adds the uses in one jaxpr to ``uses``, and returns the parameters that are its outputs."""

    def held(var: Any) -> _Param | None:
        return None if hasattr(var, "val") else params.get(var)  # literals have no hash

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = [(i, param) for i, var in enumerate(eqn.invars) if (param := held(var))]
        mark = eqn.params["name"] if name == "name" else None
        if mark in uses.marked:
            shape = eqn.invars[0].aval.shape
            uses.moved.update(param.number for _, param in operands if param.moved)
            operands = [(i, param) for i, param in operands if not param.moved]
            if not operands:
                uses.unknown[mark].append(shape)
            for _, (index, dim, view, _) in operands:
                ndims = uses.marked[mark]
                uses.repeated.update({index} & (looped | ndims.keys()))
                ndims[index] = min(len(shape), ndims.get(index, len(shape)))
                uses.viewed.update({index: view} if view else {})
                uses.dims.setdefault(index, set()).add(dim)
                uses.branched.update({index} if branch else ())
                uses.diverging.update({index} if diverges else ())
            continue
        if operands and not operands[0][0] and name in _MOVES:
            param = operands[0][1]
            seen = None if id(eqn) in apart else _view(eqn, param, call)
            params = params | dict.fromkeys(eqn.outvars, seen or param._replace(moved=True))
            if seen:
                continue
        used = {param.number for _, param in operands if not param.moved}
        if name.startswith("custom_vjp"):
            uses.custom.update(used)
        in_branch = branch or name in ("cond", "while")
        apart_here = diverges or id(eqn) in apart
        inner = list(_called_jaxprs(eqn))
        for sub, first in inner:
            used = {param.number for i, param in operands if i < first and not param.moved}
            passed = {sub.invars[i - first]: param for i, param in operands if i >= first}
            in_full = set()
            if name == "scan":  # a loop over layers takes the first dim off
                ndims = {param.number: eqn.invars[i].aval.ndim for i, param in operands}
                in_full = {p.number for v, p in passed.items() if v.aval.ndim == ndims[p.number]}
            # A function of jax, such as ``jnp.take``, has one trace for all its callers.
            is_of_jax = _JAX in str(getattr(sub.debug_info, "func_src_info", ""))
            outer = call or (eqn if is_of_jax else None)
            outs = _visit(sub, passed, uses, apart, in_branch, apart_here, looped | in_full, outer)
            if name in ("jit", "pjit"):
                both = zip(eqn.outvars, outs, strict=True)
                params = params | {var: param for var, param in both if param}
            else:
                used |= {param.number for param in outs if param and not param.moved}
            _record(uses, used, call or eqn)
        if not inner:
            _record(uses, used, call or eqn)
    return [held(var) for var in jaxpr.outvars]


def _record(uses: ParamUses, used: set[int], eqn: Any) -> None:
    for index in used:
        uses.otherwise.setdefault(index, eqn)


def _view(eqn: Any, param: _Param, call: Any) -> _Param | None:
    """The parameter that results hold in another order or in part; None for another operation."""
    # Shards of a view are the views of shards: the sharded dim stays as it is.
    name, options = eqn.primitive.name, eqn.params
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dims = range(len(before))
    if name in ("sharding_constraint", "reshard"):
        return param
    if name == "reshape":  # several dims of the first one, for loops within loops
        others = len(before) - 1
        splits = 0 < others < len(after) and after[len(after) - others :] == before[1:]
        splits &= param.dim != -len(before)
        return param if splits else None
    # For each dim of the result the unchanged dim that it is.
    if name == "stop_gradient":
        same: list[int | None] = list(dims)
    elif name == "transpose":
        same = list(options["permutation"])
    elif name == "squeeze":
        same = [d for d in dims if d not in options["dimensions"]]
    elif name in ("slice", "dynamic_slice"):
        same = [d if before[d] == after[d] else None for d in dims]
    elif name == "rev":
        same = [None if d in options["dimensions"] else d for d in dims]
    elif name == "split":
        same = [None if d == options["axis"] else d for d in dims]
    else:
        return None
    view = param._replace(view=param.view or call or eqn)
    if not param.dim:
        return view
    place = len(before) + param.dim
    return view._replace(dim=same.index(place) - len(same)) if place in same else None


def place_of(eqn: Any) -> str:
    """The operation of an equation, and the line of the user's code that it is from."""
    if eqn is None:
        return "as an output"
    name = eqn.params["name"] if eqn.primitive.name in ("jit", "pjit") else eqn.primitive.name
    trace = eqn.source_info.traceback
    frames = traceback.extract_tb(trace.as_python_traceback()) if trace else []
    own = [f for f in frames if is_users(f.filename)]
    return f"in {name}" + (f" at {own[-1].filename}:{own[-1].lineno}" if own else "")


def _called_jaxprs(eqn: Any) -> Iterator[tuple[Any, int]]:
    """Inner jaxprs whose arguments are the operands of the equation, from a first one on."""
    first = 1 if eqn.primitive.name == "cond" else 0  # the index of the branch
    for jaxpr in inner_jaxprs(eqn):
        if len(jaxpr.invars) + first == len(eqn.invars):
            yield jaxpr, first
