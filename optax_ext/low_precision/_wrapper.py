"""``low_precision_state``: stores the state of any transformation in low precision."""

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec

import jax
import optax

from optax_ext import _validate, kernels
from optax_ext._adafactor import adafactor
from optax_ext._came import came
from optax_ext._lamb import lamb
from optax_ext._leaves import check_arrays, path_name
from optax_ext._types import Array, Tree
from optax_ext.low_precision import _formats
from optax_ext.low_precision._first_use import (
    check_codes,
    check_kernels,
    error_of_kernels,
    kernels_are_right,
)
from optax_ext.low_precision._formats import BFloat16, Dynamic, Float8, Format, Linear, Quantized
from optax_ext.low_precision._one_pass import has_blocks
from optax_ext.low_precision._quantize import ROUNDINGS, quantize
from optax_ext.low_precision._roles import fields_of, find_signs
from optax_ext.low_precision._rounding import check_seed, make_key
from optax_ext.low_precision._stored_state import (
    MIN_SIZE,
    LowPrecisionState,
    boxes_inside,
    boxes_outside,
    flatten,
    is_floating,
)
from optax_ext.low_precision._stored_step import StoredStep, Updated

# Formats of signed and unsigned arrays, and of those that suit no format, which have one by name.
_Formats = dict[bool | None, Format]
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
    min_size: int = MIN_SIZE,
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
    for pattern, fmt in (formats or {}).items():
        if fmt is not None and not isinstance(fmt, Format):
            raise ValueError(
                f"formats[{pattern!r}] must be a format such as Dynamic(8), or None; got {fmt!r}."
            )
        _validate.pattern("formats", pattern)
    default: _Formats = {sign: _default_format(bits, block_size, sign) for sign in (True, False)}
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"rounding must be one of {', '.join(map(repr, ROUNDINGS))}, got {rounding!r}."
        )
    _validate.non_negative(min_size=min_size)
    check_seed(seed)
    inner = optax.with_extra_args_support(inner)
    signs_of = functools.cache(functools.partial(find_signs, inner))
    wrapper = _Wrapper(inner, signs_of, dict(formats or {}), default, rounding, min_size, seed)
    update: Any = functools.partial(wrapper.run, False)
    update.update_params = functools.partial(wrapper.run, True)
    return optax.GradientTransformationExtraArgs(wrapper.init, update)


# Traced once for all arrays of a type, however often a plan asks for a state's types.
_quantize = jax.jit(quantize, static_argnums=(1, 2, 3), inline=True)


class _Wrapper(NamedTuple):
    """A transformation, and how its state is stored."""

    inner: optax.GradientTransformationExtraArgs
    signs_of: Callable[[Any, Any, Any], dict[Any, bool]]  # ``find_signs`` of it, cached
    rules: Mapping[str, Format | None]  # by patterns of paths
    default: _Formats  # of arrays that no pattern matches
    rounding: str
    min_size: int
    seed: int

    def init(self, params: optax.Params) -> LowPrecisionState:
        check_arrays(params)
        _formats.register_with_flax()
        state = self.inner.init(params)
        flat, treedef = flatten(state)
        _check_inner(flat, self.rules, params)
        fields = fields_of(state, flat, params)
        formats = [self._formats(*each, field) for each, field in zip(flat, fields, strict=True)]
        leaves, structure = jax.tree.flatten(params)
        types = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        wanted = tuple(f for f, fmt in zip(fields, formats, strict=True) if f and fmt)
        signed = self.signs_of(structure, types, wanted)
        first = "compensated" if self.rounding == "compensated" else "nearest"
        stored = [leaf for _, leaf in flat]
        with jax.named_scope("low_precision"):
            for i, (field, fmt) in enumerate(zip(fields, formats, strict=True)):
                sign = signed.get(field and field[1])
                if sign in fmt:
                    check_codes(fmt[sign], self.rounding)
                    # Without the barrier XLA encodes large constants of zeros while compiling.
                    leaf = jax.lax.optimization_barrier(stored[i])
                    stored[i] = _quantize(leaf, fmt[sign], sign is not False, first)
                    if has_blocks(stored[i]):
                        steps = functools.partial(_two_steps, fmt[sign], self.rounding)
                        check_kernels(fmt[sign], self.rounding, steps)
        key = make_key(self.seed) if self.rounding == "stochastic" else None
        return LowPrecisionState(key, boxes_inside(treedef.unflatten(stored)))

    def _formats(self, path: Any, leaf: Array, field: Any) -> _Formats:
        """Returns the formats that an array of the state may have; none if it is not changed."""
        if not is_floating(leaf) or not leaf.ndim or not leaf.size:
            return {}
        for pattern, fmt in self.rules.items():
            if re.search(pattern, path_name(path)):
                return {} if fmt is None else dict.fromkeys((True, False, None), fmt)
        least = self.min_size * _VECTOR_FACTOR if leaf.ndim == 1 else self.min_size
        if leaf.size < least or field is None:
            return {}
        return self.default if self.default[True].bits < 8 * leaf.dtype.itemsize else {}

    def run(
        self,
        apply: bool,
        updates: Tree,
        state: LowPrecisionState,
        params: Tree = None,
        **extra_args: Any,
    ) -> Updated:
        """Returns the updates or, to ``apply`` them, the new parameters; and the state."""
        _formats.register_with_flax()
        like = updates if params is None else params
        state = state._replace(inner_state=boxes_outside(state.inner_state))
        inner_update = functools.partial(_inner_update, self.inner, like, extra_args)
        shards = kernels.shards() or kernels.Shards()
        formats = {x.format for _, x in flatten(state.inner_state)[0] if isinstance(x, Quantized)}
        in_kernels = all(kernels_are_right(fmt, self.rounding) for fmt in formats)
        step = StoredStep(inner_update, apply, shards, in_kernels)
        leaves = jax.tree.leaves((updates, state, params, extra_args))
        is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        compute = step.by_leaf if is_traced else step.at_once
        out, (key, inner_state) = compute(updates, state, params)
        return out, LowPrecisionState(key, boxes_inside(inner_state))


def _two_steps(fmt: Format, rounding: str, grads: Array) -> Updated:
    """Updates and state of the second of two steps of Adam, of gradients (2, rows, columns)."""
    inner = optax.with_extra_args_support(optax.adam(1e-3))
    formats: _Formats = {True: fmt, False: fmt}
    signs_of = functools.partial(find_signs, inner)
    tx = _Wrapper(inner, signs_of, {}, formats, rounding, 0, 0)
    state = tx.init(grads[0])

    def step(state: Any, gradient: Array) -> Any:
        updates, state = tx.run(False, gradient, state)
        return state, updates

    state, updates = jax.lax.scan(step, state, grads)
    return jax.tree.map(lambda x: x[-1], updates), state


def kernels_beside_xla(fmt: Format, rounding: str = "stochastic") -> float:
    """How far an update by kernels is from XLA's form, by ``error_of_kernels``; 0 but on TPUs."""
    return error_of_kernels(fmt, rounding, functools.partial(_two_steps, fmt, rounding))


def _inner_update(
    inner: optax.GradientTransformationExtraArgs,
    like: Tree,  # what ``init`` takes
    extra_args: Mapping[str, Any],
    updates: Tree,
    state: Any,
    params: Tree,
) -> tuple[Tree, Any]:
    """Updates in the dtypes that they have without dequantized moments, which are wider."""
    given = jax.tree.leaves(updates)
    is_narrow = any(is_floating(u) and u.dtype.itemsize < 4 for u in given)
    try:
        out, new = inner.update(updates, state, params, **extra_args)
    except TypeError as error:
        if is_narrow:
            error.add_note(_MIXED_DTYPES)
        raise
    if not is_narrow or [x.dtype for x in jax.tree.leaves(out)] == [x.dtype for x in given]:
        return out, new
    types = jax.eval_shape(
        lambda u: inner.update(u, inner.init(like), params, **extra_args)[0], updates
    )
    return jax.tree.map(lambda x, like: x.astype(like.dtype), out, types), new


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
