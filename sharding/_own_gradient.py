"""Functions with a gradient of their own, which JAX differentiates in other ways as they are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Of operands, the last of which are tangents, to the tangents of results. JAX has no function with
# a derivative of its own for each mode: ``along`` is that of forward mode, ``back`` its transpose.
_DERIVATIVE = Primitive("derivative_with_own_gradient")
_DERIVATIVE.multiple_results = True


def with_own_gradient(
    fn: Callable[[list[Any]], list[Any]],
    forward: Callable[[list[Any]], tuple[list[Any], Any]],
    backward: Callable[[list[Any], Any, list[Any]], list[Any]],
    own: Sequence[bool],
) -> Callable[[list[Any]], list[Any]]:
    """A function of a list whose gradient by some inputs is ``backward``.

    Forward mode, and derivatives by other inputs, are those of ``fn``.

    Args:
      fn: the function; results are a list.
      forward: results of inputs, and what it stores for ``backward``.
      backward: from inputs, what is stored, and cotangents of the floating results, None where they
        are zero, to those of the inputs that are ``own``.
      own: whether ``backward`` differentiates by an input.
    """

    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        (inputs,), (moves,) = primals, tangents
        moved = [i for i, t in enumerate(moves) if not isinstance(t, SymbolicZero)]

        def derivative(inputs: Sequence[Any], moves: Sequence[Any]) -> Any:
            def moving(some: list[Any]) -> list[Any]:
                return fn(
                    [*(dict(enumerate(inputs)) | dict(zip(moved, some, strict=True))).values()]
                )

            return jax.jvp(moving, ([inputs[i] for i in moved],), (list(moves),))

        moves = [moves[i] for i in moved]
        if not all(own[i] for i in moved):
            outs, along = derivative(inputs, moves)
            return list(outs), list(along)
        outs, stored = forward(inputs)
        outs = list(map(jnp.asarray, outs))
        floating = [i for i, x in enumerate(outs) if jnp.issubdtype(x.dtype, jnp.inexact)]
        leaves, treedef = jax.tree.flatten(stored)
        numbers = [i for i, is_own in enumerate(own) if is_own]

        def derivatives(*operands: Any) -> list[Any]:
            _, found = derivative(operands[: len(inputs)], operands[len(operands) - len(moved) :])
            return [found[i] for i in floating]

        def back(known: Sequence[Any], cotangents: list[Any]) -> list[Any]:
            given, kept = list(known[: len(inputs)]), treedef.unflatten(known[len(inputs) :])
            grads = dict(zip(numbers, backward(given, kept, cotangents), strict=True))
            return [grads[i] for i in moved]

        types = tuple(jax.typeof(outs[i]).update(weak_type=False) for i in floating)
        operands = *inputs, *leaves, *moves
        found = _DERIVATIVE.bind(
            *operands, along=derivatives, back=back, count=len(moved), types=types
        )
        tangents = [np.zeros(x.shape, jax.dtypes.float0) for x in outs]
        for i, tangent in zip(floating, found, strict=True):
            tangents[i] = tangent
        return outs, tangents

    run = jax.custom_jvp(lambda inputs: fn(inputs))
    run.defjvp(rule, symbolic_zeros=True)
    return run


def _along(*operands: Any, along: Callable[..., Any], **_: Any) -> Any:
    return along(*operands)


def _jvp(primals: Any, tangents: Any, along: Callable[..., Any], **_: Any) -> Any:
    return jax.jvp(along, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _transpose(
    cotangents: Any, *operands: Any, back: Callable[..., Any], count: int, **_: Any
) -> Any:
    known = operands[: len(operands) - count]
    grads = back(known, [None if isinstance(ct, ad.Zero) else ct for ct in cotangents])
    return [*[None] * len(known), *grads]


def _batch(operands: Any, dims: Any, along: Any, back: Any, count: int, types: Any) -> Any:
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    at = len(operands) - count
    # Each example has tangents of its own, so that each has a gradient.
    moves = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands[at:], dims[at:], strict=True)
    ]
    operands, dims = (*operands[:at], *moves), (*dims[:at], *[0] * count)
    forms = {"along": jax.vmap(along, dims), "back": jax.vmap(back, (dims[:at], 0))}
    types = tuple(map(jax.typeof, jax.eval_shape(forms["along"], *operands)))
    found = _DERIVATIVE.bind(*operands, **forms, count=count, types=types)
    return found, [0] * len(found)


_DERIVATIVE.def_impl(_along)
_DERIVATIVE.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(_DERIVATIVE, mlir.lower_fun(_along, multiple_results=True))
ad.primitive_jvps[_DERIVATIVE] = _jvp
ad.primitive_transposes[_DERIVATIVE] = _transpose
batching.primitive_batchers[_DERIVATIVE] = _batch
