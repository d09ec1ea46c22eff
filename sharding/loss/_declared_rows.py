"""Functions that are declared to keep rows apart: kernels, callbacks, custom derivatives.

A declared function is traced with a mark at each operand and each result. A mark is the identity
that ``jit``, ``grad``, ``vmap``, ``scan`` and ``checkpoint`` pass on: its derivative is a mark, its
transpose is one of the other side, and ``vmap`` renumbers its dims. What is between the marks is
not looked at.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sharding.loss._row_states import (
    Coupled,
    Kind,
    Rows,
    RowsMeet,
    Shared,
    State,
    combined,
    moved,
    unknown,
)

_CALLS = itertools.count()

# Its parameters: ``call``, a number; ``is_result``; ``dim``, along which it is declared to have
# rows; ``mapped``, the dims of vmaps; ``linear`` for tangents, ``transposed`` for cotangents.
DECLARED = Primitive("declared_rows")
DECLARED.def_impl(lambda x, **_: x)
DECLARED.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(DECLARED, lambda _, x, **__: [x])


def _jvp_of_mark(primals: Any, tangents: Any, **params: Any) -> Any:
    out = DECLARED.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return out, tangents[0]
    return out, DECLARED.bind(*tangents, **params | {"linear": True})


def _transpose_of_mark(cotangent: Any, _: Any, **params: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    other_side = {"is_result": not params["is_result"], "transposed": not params["transposed"]}
    return [DECLARED.bind(cotangent, **params | other_side)]


def _map(operands: Any, dims: Any, *, dim: int | None, mapped: Any, **params: Any) -> Any:
    (at,) = dims
    dim = dim if dim is None else dim + (dim >= at)
    mapped = (*(d + (d >= at) for d in mapped), at)
    return DECLARED.bind(*operands, dim=dim, mapped=mapped, **params), at


ad.primitive_jvps[DECLARED] = _jvp_of_mark
ad.primitive_transposes[DECLARED] = _transpose_of_mark
batching.primitive_batchers[DECLARED] = _map


def keeps_rows_apart(fn: Callable[..., Any], *, in_dims: Any, out_dims: Any) -> Callable[..., Any]:
    """Declares that a function, and its derivative, compute each row from this row alone.

    What is known of a loss is read from its trace. A Pallas kernel, a callback or a ``shard_map``
    is opaque there, and counts as coupling rows, unless its author says that it does not.

    Nothing else changes: the function computes what it did, under any transformation of JAX.

    Args:
      fn: a function of arrays in trees. It is trusted.
      in_dims: the dim of each argument that rows are along, as ``in_axes`` of ``jax.vmap``: an int,
        or for each argument an int, a tree of ints, or None for what all rows share.
      out_dims: the same of results.

    Returns:
      The function, of positional arguments.

    Raises:
      ValueError: when it is called, if an array has no such dim, or sizes of these dims differ.

    >>> import sharding as shd
    >>> attention = jax.nn.dot_product_attention  # or a kernel
    >>> attention = shd.keeps_rows_apart(attention, in_dims=(0, 0, 0), out_dims=0)
    """

    @functools.wraps(fn)
    def declared(*args: Any) -> Any:
        given = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        if len(given) != len(args):
            raise ValueError(
                f"keeps_rows_apart was given in_dims={in_dims!r}, for {len(given)} arguments, and "
                f"the function was called with {len(args)}. Give one dim, or None, for each "
                "(docs: understand/meaning)."
            )
        call, sizes = next(_CALLS), dict[str, int]()
        marked = _marked(given, args, call, False, sizes)
        return _marked(out_dims, fn(*marked), call, True, sizes)

    return declared


def _marked(dims: Any, tree: Any, call: int, is_result: bool, sizes: dict[str, int]) -> Any:
    """A tree of arrays with a mark on each."""
    name = "result" if is_result else "argument"
    leaves, treedef = jax.tree.flatten_with_path(tree)
    of_leaves = jax.tree.leaves(
        jax.tree.broadcast(dims, tree, is_leaf=lambda x: x is None), is_leaf=lambda x: x is None
    )
    out = []
    for (path, x), dim in zip(leaves, of_leaves, strict=True):
        if not hasattr(x, "dtype"):  # no array
            out.append(x)
            continue
        where = f"{name} {jax.tree_util.keystr(path)}"
        if dim is not None and not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"keeps_rows_apart was told that rows are along dim {dim} of {where}, which has "
                f"the shape {x.shape}. Name one of its dims, or None if it has no rows "
                "(docs: understand/meaning)."
            )
        if dim is not None:
            dim = dim % x.ndim
            sizes[where] = x.shape[dim]
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"keeps_rows_apart was told of rows along dims of different sizes: {sizes}. Each "
                "must be the number of rows (docs: understand/meaning)."
            )
        params = {"call": call, "is_result": is_result, "dim": dim, "mapped": ()}
        out.append(DECLARED.bind(x, **params, linear=False, transposed=False))
    return jax.tree.unflatten(treedef, out)


# --- In a trace -----------------------------------------------------------------------------------

_UNDECLARED = "rows are along a dim that is not declared"


def through_declared(eqn: Any, aval: Any, given: State, seen: dict[Any, Any]) -> Any:
    """The state behind a mark, of this type; ``seen`` has what reached the marks before it.

    Between the marks, dim 0 is the declared one of each array, and dim 1 that of a ``vmap``.
    """
    p = eqn.params
    dims = [p["dim"], p["mapped"][0] if len(p["mapped"]) == 1 else None]
    values = seen.setdefault((p["call"], False, False), {})
    linear = seen.setdefault((p["call"], True, p["transposed"]), {})
    if not p["is_result"]:
        places = [dims.index(d) if d in dims else _UNDECLARED for d in range(64)]
        kind = Kind.MOVES if p["linear"] else Kind.OTHER
        reached = linear if p["linear"] else values
        try:
            reached[id(eqn)] = eqn, combined([given], kind, [places])
        except RowsMeet as meet:
            reached[id(eqn)] = eqn, Coupled(str(meet))
        return given
    states = [state for _, state in values.values()]
    if p["linear"]:
        states.append(combined([state for _, state in linear.values()], Kind.LINEAR))
    for state in states:
        if isinstance(state, Coupled):
            return state
    out = combined(states, Kind.PRODUCT)
    if isinstance(out, Shared):
        is_known = isinstance(given, Shared)
        return given if is_known else dataclasses.replace(unknown(aval), power=None)
    if p["transposed"] and dims[out.dims[0]] is None:  # the cotangent of what all rows share
        return Rows((), 1, power=out.power + 1, random=out.random, summed=True)
    if dims[out.dims[0]] is None:
        raise RowsMeet("a result that is declared to have no rows depends on them")
    return moved(out, dims)
