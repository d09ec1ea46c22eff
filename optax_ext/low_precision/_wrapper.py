"""``low_precision_state``: stores the state of any transformation in low precision."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun

from optax_ext import _matrix_passes, _validate, kernels
from optax_ext._adafactor import adafactor
from optax_ext._came import came
from optax_ext._lamb import lamb
from optax_ext._leaves import check_arrays, path_name
from optax_ext._types import Array, Tree
from optax_ext.leaf_by_leaf import run_by_leaf
from optax_ext.low_precision import _formats, _stored_state
from optax_ext.low_precision._formats import BFloat16, Dynamic, Float8, Format, Linear, Quantized
from optax_ext.low_precision._one_pass import (
    OnePassUpdates,
    blocks_of,
    dequantized_type,
    has_blocks,
)
from optax_ext.low_precision._quantize import ROUNDINGS, quantize
from optax_ext.low_precision._roles import find_signs
from optax_ext.low_precision._rounding import check_seed, make_key, next_key
from optax_ext.low_precision._stored_state import (
    LowPrecisionState,
    ScalesFirst,
    dequantized,
    flatten,
    is_floating,
)

Updated = tuple[Tree, LowPrecisionState]  # the updates, or the new parameters; and the state
# Formats by name, as arguments of ``low_precision_state``.
STATE_FORMATS: dict[str, int | Format] = {"bfloat16": 16, "8bit": 8, "fp8": Float8(), "4bit": 4}
# Vectors must be this many times as large as other arrays: scales and biases are a small share of
# the state, and ZeRO would shard them into less than a block.
_VECTOR_FACTOR = 16
_MIXED_DTYPES = (
    "low_precision_state: within a step, moments are float32 and gradients are narrower. Put what "
    "may skip an update around it, as in optax.apply_if_finite(low_precision_state(adamw), 5)."
)


def low_precision_state(
    inner: optax.GradientTransformation,
    bits: int | Format = 8,
    *,
    formats: Mapping[str, Format | None] | None = None,
    rounding: str = "stochastic",
    block_size: int | None = None,
    min_size: int = _stored_state.MIN_SIZE,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Stores the state of ``inner`` in low precision between steps; within a step it is float32.

    With :math:`E` the encoding of an array and :math:`D` its decoding,

    .. math::

      u, s \leftarrow \operatorname{inner}(g, D(q)), \quad q \leftarrow E(s)

    This applies to averages of their parameter's shape; those that are never negative have unsigned
    codes, in which positive elements never become 0. Copies of parameters, sums that grow, terms of
    small differences, and what is uncertain are not changed: known of common optimizers, ``init``
    finds it out of others by steps of ``inner`` on small arrays. ``describe_state`` lists the
    result, which depends on global shapes alone.

    Bytes per element: 1.016 in 8 bits, 0.50 in 4 bits (two vectors per matrix), 1.039 in
    ``Float8``, 2 in 16 bits. By default no element of an update exceeds 5 times the largest of
    float32; it may where second moments are scaled more finely than first ones.

    Args:
      inner: any transformation.
      bits: 8: ``Dynamic(8)``. 4: ``Dynamic(4, rank1=True)``, and for second moments
        ``Linear(4, rank1=True)``. 16: ``BFloat16()``. Or a format for all arrays.
      formats: other formats by regular expressions of paths in the state, for arrays of any size,
        such as ``{"nu": Float8(), "embed": None}``; None leaves an array unchanged.
      rounding: ``"nearest"``: averages stop moving where a step is less than half the distance of
        two codes. ``"stochastic"``: the mean is right. ``"compensated"``: the rounding error is
        stored in 8 more bits.
      block_size: elements per scale, a power of two; None means 256 for 8 bits, 128 for 4 bits.
      min_size: the fewest elements of an array that is changed, 4,096; of vectors 16 times as many.
      seed: the seed of stochastic rounding; the noise depends on it and the step.

    Raises:
      ValueError: if a format or rounding is unknown, a block size is not a power of two, a pattern
        matches no array, or ``inner`` is or contains a ``low_precision_state``.

    Warns:
      UserWarning: if the state of ``inner`` has no floating array to store in low precision.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> params = {"w": jnp.ones((256, 1024)), "b": jnp.zeros(1024)}
      >>> tx = optax_ext.low_precision_state(optax.adamw(1e-3), optax_ext.Float8())
      >>> print(optax_ext.describe_state(tx.init(params)))
      inner_state/0/mu/w  (256, 1024)  Float8(block_size=128, expand=True) signed    272,384 bytes
      inner_state/0/nu/w  (256, 1024)  Float8(block_size=128, expand=True) unsigned  272,384 bytes
      others              float32, int32, uint32                                       8,204 bytes

    References:
      Those of the formats, ``Dynamic``, ``Linear`` and ``Float8``.
    """
    _validate.known(bits=bits, block_size=block_size, min_size=min_size)
    rules = dict(formats or {})
    for pattern, fmt in rules.items():
        if fmt is not None and not isinstance(fmt, Format):
            raise ValueError(
                f"formats[{pattern!r}] must be a format such as Dynamic(8), or None; got {fmt!r}."
            )
        _validate.pattern("formats", pattern)
    default: dict[bool | None, Format] = {
        signed: _default_format(bits, block_size, signed) for signed in (True, False)
    }
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"rounding must be one of {', '.join(map(repr, ROUNDINGS))}, got {rounding!r}."
        )
    _validate.non_negative(min_size=min_size)
    check_seed(seed)
    inner = optax.with_extra_args_support(inner)

    @functools.cache
    def signs_of(structure: Any, shapes: Any, fields: Any) -> dict[Any, bool]:
        leaves = [jax.ShapeDtypeStruct(*x) for x in shapes]
        return find_signs(inner, structure.unflatten(leaves), fields)

    def candidate(path: Any, leaf: Array, field: Any) -> dict[bool | None, Format]:
        """Returns the formats of a state array: if signed, unsigned, or not suited (None)."""
        if not is_floating(leaf) or not leaf.ndim or not leaf.size:
            return {}
        for pattern, fmt in rules.items():
            if re.search(pattern, path_name(path)):
                return {} if fmt is None else dict.fromkeys((True, False, None), fmt)
        if leaf.size < min_size * (_VECTOR_FACTOR if leaf.ndim == 1 else 1) or field is None:
            return {}
        return default if default[True].bits < 8 * leaf.dtype.itemsize else {}

    def init(params: optax.Params) -> LowPrecisionState:
        check_arrays(params)
        _formats.register_with_flax()
        state = inner.init(params)
        flat, treedef = flatten(state)
        _check_inner(flat, rules, params)
        fields = _fields(state, flat, params)
        formats = [candidate(*each, field) for each, field in zip(flat, fields, strict=True)]
        leaves, structure = jax.tree.flatten(params)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        wanted = tuple(f for f, fmt in zip(fields, formats, strict=True) if f and fmt)
        signed = signs_of(structure, shapes, wanted)
        first = "compensated" if rounding == "compensated" else "nearest"
        stored = [leaf for _, leaf in flat]
        with jax.named_scope("low_precision"):
            for i, (field, fmt) in enumerate(zip(fields, formats, strict=True)):
                sign = signed.get(field and field[1])
                if sign in fmt:
                    # Without the barrier XLA encodes large constants of zeros while compiling.
                    leaf = jax.lax.optimization_barrier(stored[i])
                    stored[i] = quantize(leaf, fmt[sign], sign is not False, first)
        key = make_key(seed) if rounding == "stochastic" else None
        return LowPrecisionState(key, _stored_state.boxes_inside(treedef.unflatten(stored)))

    def run(
        apply: bool, updates: Tree, state: LowPrecisionState, params: Tree = None, **extra_args: Any
    ) -> Updated:
        """Returns the updates or, to ``apply`` them, the new parameters; and the state."""
        _formats.register_with_flax()
        like = updates if params is None else params
        state = _stored_state.with_quantized(state, lambda: init(like))
        state = state._replace(inner_state=_stored_state.boxes_outside(state.inner_state))

        def inner_update(updates: Tree, inner_state: Any, params: Tree) -> tuple[Tree, Any]:
            """Updates in the dtypes that they have without dequantized moments, which are wider."""
            leaves = jax.tree.leaves(updates)
            is_narrow = any(is_floating(u) and u.dtype.itemsize < 4 for u in leaves)
            try:
                out, new = inner.update(updates, inner_state, params, **extra_args)
            except TypeError as error:
                if is_narrow:
                    error.add_note(_MIXED_DTYPES)
                raise
            dtypes = [[x.dtype for x in tree] for tree in (jax.tree.leaves(out), leaves)]
            if not is_narrow or dtypes[0] == dtypes[1]:
                return out, new
            types = jax.eval_shape(
                lambda u: inner.update(u, inner.init(like), params, **extra_args)[0], updates
            )
            return jax.tree.map(lambda x, like: x.astype(like.dtype), out, types), new

        def step(inner: Any, params: Tree, apply: bool, updates: Tree, state: Any) -> Updated:
            """Returns the updates, or to ``apply`` them the new parameters, and the state."""
            flat, treedef = flatten(state.inner_state)
            old = [(path, x, _blocks_on(shards, path, x)) for path, x in flat]
            with jax.named_scope("low_precision"):
                read = [dequantized(x, on) if isinstance(x, Quantized) else x for _, x, on in old]
            updates, new = inner(updates, treedef.unflatten(read), params)
            key = None if state.key is None else next_key(state.key)
            with jax.named_scope("low_precision"):
                stored = [
                    _stored_state.quantize_as(*was, leaf, key)
                    for was, leaf in zip(old, treedef.flatten_up_to(new), strict=True)
                ]
            out = optax.apply_updates(params, updates) if apply else updates
            return out, LowPrecisionState(key, treedef.unflatten(stored))

        def scheduled(step: Any, updates: Tree, state: Any, passes: Any = None) -> Updated:
            """``step``; at once, XLA would have the float32 moments of all parameters live."""
            stored = [x for _, x in flatten(state.inner_state)[0] if isinstance(x, Quantized)]
            deferred, scales = (
                set(map(id, jax.tree.leaves(x))) for x in (stored, [q.scale for q in stored])
            )
            make_run = functools.partial(ScalesFirst, scales=scales, passes=passes)
            waits, kept = (lambda x: id(x) in deferred), _stored_state.SHARED_TRACES
            return run_by_leaf(step, updates, state, waits, make_run, kept=kept)

        def portable(updates: Tree, state: Any, *_: Any) -> Updated:
            run = functools.partial(step, inner_update, params, False)
            out, new = scheduled(run, updates, state)
            return optax.apply_updates(params, out) if apply else out, new

        shards = kernels.shards() or kernels.Shards()
        moments, treedef = flatten(state.inner_state)
        on_several = _matrix_passes.is_partitioned((updates, state)) and kernels.shards() is None
        # Mosaic has no int64, in which loops would count.
        x64 = jax.dtypes.canonicalize_dtype(jnp.int64) == jnp.int64
        leaves = jax.tree.leaves((updates, state, params, extra_args))
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            # Operation by operation, in Python's order.
            out, (key, new) = step(inner_update, params, apply, updates, state)
        elif on_several or x64 or not any(has_blocks(x) for _, x in moments):
            out, (key, new) = portable(updates, state)
        else:
            types = updates, treedef.unflatten([dequantized_type(x) for _, x in moments]), params
            jaxpr, consts, results = kernels.with_constants(inner_update, *types)

            def with_passes(updates: Tree, state: Any, params: Tree, consts: list[Any]) -> Updated:
                def inner(*arguments: Tree) -> Any:
                    made = jaxpr_as_fun(jaxpr)(*consts, *jax.tree.leaves(arguments))
                    return jax.tree.unflatten(results, made)

                key = None if state.key is None else next_key(state.key)
                how: Any = key, rounding, params, apply, shards
                passes = OnePassUpdates(inner, updates, *flatten(state.inner_state), *how)
                run = functools.partial(step, inner, params, apply)
                return scheduled(run, updates, state, passes)

            arguments = updates, state, params, consts
            if shards.interpret:
                out, (key, new) = with_passes(*arguments)
            else:
                out, (key, new) = kernels.for_tpus(with_passes, portable, *arguments)
        return out, LowPrecisionState(key, _stored_state.boxes_inside(new))

    update: Any = functools.partial(run, False)
    update.update_params = functools.partial(run, True)
    return optax.GradientTransformationExtraArgs(init, update)


# --- Choosing -------------------------------------------------------------------------------------


def _default_format(bits: Any, block_size: int | None, signed: bool) -> Format:
    if isinstance(bits, Format):
        if block_size is None:
            return bits
        raise ValueError(
            f"block_size={block_size} has no effect on the format {bits}; set it there."
        )
    if bits == 8:
        return Dynamic(8, block_size)
    if bits == 4:
        # Scales of the same kind for both moments: if only those of the second follow columns, the
        # smallest code of the first is divided by a far smaller root.
        kind = Dynamic if signed else Linear
        return kind(4, block_size, rank1=True)
    if bits == 16:
        return _default_format(BFloat16(), block_size, signed)
    raise ValueError(f"bits must be 4, 8, 16 or a format such as Float8(), got {bits!r}.")


def _blocks_on(shards: kernels.Shards, path: Any, x: Array) -> Any:
    """Returns the blocks of a state array, with the rows of a shard; None for other arrays."""
    if not isinstance(x, Quantized) or isinstance(x.format, BFloat16):
        return None
    blocks = blocks_of(x)
    found = (shards.shape_of(path[i:], x.shape) for i in range(len(path) + 1))
    rows = next(filter(None, found), x.shape)[blocks.dims[0]]
    return dataclasses.replace(blocks, shard_rows=rows % x.shape[blocks.dims[0]])


def _check_inner(flat: list[Any], rules: Mapping[str, Any], params: Tree) -> None:
    if any(isinstance(leaf, Quantized) for _, leaf in flat):
        raise ValueError("low_precision_state contains another one; remove one of the two.")
    names = [path_name(path) for path, leaf in flat if is_floating(leaf)]
    if not names and any(map(is_floating, jax.tree.leaves(params))):
        warnings.warn(
            "low_precision_state: the state has no floating arrays, so nothing is stored in low "
            "precision.",
            stacklevel=3,
        )
    for pattern in rules:
        if names and not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"formats: pattern {pattern!r} matches no array of the state; the first paths are "
                f"{', '.join(map(repr, names[:5]))}."
            )


def _fields(state: Tree, flat: list[Any], params: Tree) -> list[Any]:
    """Returns the class and path of each array's field; None if it is not of a parameter."""
    shapes = {path: leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}

    def field(path: Any, leaf: Array) -> Any:
        for i in range(len(path) + 1):
            if path[i:] in shapes and getattr(leaf, "shape", None) == shapes[path[i:]]:
                return _class_of(state, path[:i]), path[:i]
        return None

    return [field(path, leaf) for path, leaf in flat]


def _class_of(node: Any, path: Any) -> type | None:
    """Returns the class of which the last key of a path is an attribute."""
    if not path or not isinstance(path[-1], jax.tree_util.GetAttrKey):
        return None
    for key in path[:-1]:
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name)
        else:
            node = node[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]
    return type(node)


# --- Optimizers with 8-bit state, under their common names ----------------------------------------

_Arguments = ParamSpec("_Arguments")


def _in_8_bits(
    name: str,
    make: Callable[_Arguments, optax.GradientTransformation],
    described: str,
    bytes_per_parameter: str,
) -> Callable[_Arguments, optax.GradientTransformationExtraArgs]:
    """Returns ``make`` with ``low_precision_state`` around its transformation."""

    @functools.wraps(make)
    def make_8_bits(
        *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> optax.GradientTransformationExtraArgs:
        return low_precision_state(make(*args, **kwargs))

    make_8_bits.__name__ = make_8_bits.__qualname__ = name
    make_8_bits.__module__ = __name__
    make_8_bits.__doc__ = f"""{described} with moments in 8 bits.

    Takes the same arguments and wraps it in ``low_precision_state``: {bytes_per_parameter} of state
    per parameter of a large matrix, rounded stochastically. Errors are those of both.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext
      >>> state = optax_ext.{name}(1e-3).init({{"w": jnp.zeros((256, 256))}})
      >>> "Dynamic(bits=8, block_size=256, rank1=False)" in optax_ext.describe_state(state)
      True

    References:
      Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, ICLR 2022, arXiv 2110.02861.
    """
    return make_8_bits


adamw8bit = _in_8_bits("adamw8bit", optax.adamw, "``optax.adamw``", "2.03 bytes")
lion8bit = _in_8_bits("lion8bit", optax.lion, "``optax.lion``", "1.02 bytes")
lamb8bit = _in_8_bits("lamb8bit", lamb, "``lamb`` with its trust ratio", "2.03 bytes")
came8bit = _in_8_bits("came8bit", came, "``came``", "1.02 bytes")
adafactor8bit = _in_8_bits(
    "adafactor8bit",
    functools.wraps(adafactor)(functools.partial(adafactor, momentum=0.9)),
    "``adafactor`` with momentum (0.9 unless given)",
    "1.02 bytes",
)
