"""States with ``Quantized`` in them: lists them, converts them, and moves the boxes around them."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_ext._describe_factoring import aligned
from optax_ext._leaves import at_least_float32, boxed, is_box, path_name, unboxed
from optax_ext._types import Array, Tree
from optax_ext.low_precision._formats import Quantized
from optax_ext.low_precision._quantize import codes_of, dequantize, rounding_of, scales_of
from optax_ext.low_precision._rounding import salted, uniform

# Arrays of one shape, dtype and format share a trace of these, each one equation of a step's graph.
dequantized = jax.jit(dequantize, static_argnums=1)
_uniform = jax.jit(uniform, static_argnums=1)
_scales_of = jax.jit(scales_of, static_argnums=(1, 2, 3))
_codes_of = jax.jit(codes_of, static_argnums=(3, 4, 5, 6))
SHARED_TRACES = frozenset(("dequantize", "uniform", "scales_of", "codes_of"))

MIN_SIZE = 4096  # elements of an array from which it is stored in low precision


class LowPrecisionState(NamedTuple):
    """State of ``low_precision_state``."""

    key: jax.Array | None  # (2,), uint32: seed, steps taken; None unless rounding is stochastic
    inner_state: optax.OptState  # that of inner, with a ``Quantized`` for each large array


def describe_state(state: optax.OptState) -> str:
    """Lists the arrays that a state stores in low precision, and the bytes of all arrays.

    Args:
      state: the state of any transformation; its arrays may be abstract.

    Returns:
      A line for each ``Quantized``: path, shape, format, and bytes including scales; for each other
      floating array of two dims and 4,096 elements; and for all that is left.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> tx = optax_ext.low_precision_state(optax.lion(1e-4), bits=4)
      >>> print(optax_ext.describe_state(tx.init(jnp.zeros((128, 128)))))
      inner_state/0/mu  (128, 128)  Dynamic(bits=4, block_size=128, rank1=True) signed  9,216 bytes
      others            int32, uint32                                                      12 bytes
    """
    lines = []
    others = 0
    dtypes = set()
    for path, leaf in flatten(state)[0]:
        if isinstance(leaf, Quantized):
            sign = "signed" if leaf.signed else "unsigned"
            more = "" if leaf.rest is None else ", 8 bits of error"
            what = f"{leaf.format} {sign}{more}"
            lines.append((path_name(path), str(leaf.shape), what, f"{leaf.nbytes:,} bytes"))
        elif hasattr(leaf, "dtype"):
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            if is_floating(leaf) and leaf.ndim > 1 and leaf.size >= MIN_SIZE:
                lines.append((path_name(path), str(leaf.shape), str(leaf.dtype), f"{size:,} bytes"))
                continue
            others += size
            dtypes.add(str(leaf.dtype))
    lines.append(("others", "", ", ".join(sorted(dtypes)), f"{others:,} bytes"))
    return aligned(lines)


def convert_state(state: optax.OptState, like: optax.OptState) -> optax.OptState:
    """Returns a state in the formats of another one: a float32 checkpoint in 8 bits, or back.

    Moments are rounded to nearest. Under ``jit`` it makes no other copy of large states.

    Args:
      state: of a transformation, with ``low_precision_state`` around any part of it or not.
      like: the ``init`` of the same transformation, with ``low_precision_state`` or not.

    Returns:
      The numbers of ``state``; the structure, formats and dtypes of ``like``.

    Raises:
      ValueError: if the states are of other transformations or parameters.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> params, plain = {"w": jnp.ones((256, 256))}, optax.adamw(1e-3)
      >>> stored = optax_ext.low_precision_state(plain).init(params)
      >>> state = optax_ext.convert_state(plain.init(params), stored)
      >>> type(state.inner_state[0].mu["w"]).__name__
      'Quantized'
    """

    def convert(like: Array, x: Array) -> Any:
        key, x = x if isinstance(x, LowPrecisionState) else (None, x)
        if isinstance(like, LowPrecisionState):
            key = like.key if key is None or like.key is None else key
            return LowPrecisionState(key, convert(like.inner_state, x))
        if not isinstance(like, Quantized) and not jax.tree_util.all_leaves([like]):
            return jax.tree.map(convert, like, x, is_leaf=lambda node: node is not like)
        if x.shape != like.shape:
            raise ValueError(
                f"convert_state: an array of the state has shape {x.shape}, and {like.shape} in "
                "the state that it is to be like. Both have to be of the same parameters."
            )
        if isinstance(x, Quantized):
            if jax.tree.structure(x) == jax.tree.structure(like):
                return x
            x = dequantized(x)
        if isinstance(like, Quantized):
            return quantize_as((), like, None, jnp.asarray(x), None)
        return x if x.dtype == like.dtype else jnp.asarray(x, like.dtype)

    return convert(like, state)


def quantize_as(path: Any, old: Tree, blocks: Any, new: Tree, key: jax.Array | None) -> Any:
    """Quantizes a new value in the format of the old one, if that has one."""
    if not isinstance(old, Quantized):
        return new
    noise = None
    if old.rest is None and key is not None:
        noise = _uniform(salted(key, path), old.shape)
    rounding = rounding_of(old, noise)
    scale = _scales_of(new, old.format, old.signed, blocks)
    codes, rest = _codes_of(new, scale, noise, old.format, old.signed, rounding, blocks)
    dtype = at_least_float32(new.dtype)
    return dataclasses.replace(old, codes=codes, scale=scale, rest=rest, dtype=dtype)


def boxes_inside(state: Tree) -> Any:
    """Moves the box around each ``Quantized`` to its arrays; vectors of scales name their dim."""

    def inside(x: Any) -> Any:
        q = unboxed(x)
        if q is x or not isinstance(q, Quantized):
            return x
        dims = [(d,) if s.ndim < len(q.shape) else None for d, s in enumerate(q.scale)]
        scale = tuple(boxed(x, s, d) for s, d in zip(q.scale, dims, strict=True))
        return dataclasses.replace(q, codes=boxed(x, q.codes), scale=scale, rest=boxed(x, q.rest))

    return jax.tree.map(inside, state, is_leaf=lambda x: is_box(x) or isinstance(x, Quantized))


def boxes_outside(state: Tree) -> Any:
    def outside(q: Any) -> Any:
        if not isinstance(q, Quantized) or not is_box(q.codes):
            return q
        return boxed(q.codes, jax.tree.map(unboxed, q, is_leaf=is_box))

    return jax.tree.map(outside, state, is_leaf=lambda x: isinstance(x, Quantized))


def is_floating(leaf: Array) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def flatten(state: Tree) -> tuple[list[tuple[Any, Any]], Any]:
    """Flattens with paths; a ``Quantized`` is a leaf."""
    return jax.tree.flatten_with_path(state, is_leaf=lambda x: isinstance(x, Quantized))
