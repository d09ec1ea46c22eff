r"""One product of a loss as three products of codes.

Forward, both operands have scales by row, of what one result sums, so that these leave the sum:

.. math::
    y_{mn} = s_m\, t_n \sum_k x_{mk}\, w_{kn}

Backward, the products sum over n and over m, along which these scales vary. They are multiplied
into the cotangent before that is quantized:

.. math::
    \partial x_{mk} = \sum_n Q(t_n\, \partial y_{mn})\, w_{kn}, \qquad
    \partial w_{kn} = \sum_m x_{mk}\, Q(s_m\, \partial y_{mn})

with the scales of Q, and the other one, outside of the sum. So the codes of the forward pass are
all that it stores, and nothing is rounded twice. Scales of blocks, and Hadamard transforms, are
along what each product sums: such recipes store both operands, and quantize them again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from optax_ext.kernels import calling_default
from optax_ext.traced_graph import bind
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.loss._evaluate import Evaluator, is_param
from sharding.matmuls._recipes import Quantizer, Recipe, quantized

# From two operands and a seed to the product: ``default``, with its own derivative. What only asks
# how results depend on operands reads ``plain``, the equation that it takes the place of. What
# holds shards of the parameter calls ``read``, if there is one.
QUANTIZED = calling_default("quantized_product")
PRODUCTS = lax.dot_general_p, lax.conv_general_dilated_p

Dims = tuple[int, ...]


class ProductDims(NamedTuple):
    """The dims of each operand of a product, and of its result."""

    kept: tuple[Dims, Dims]  # that index results
    in_result: tuple[Dims, Dims]  # where these are in the result
    summed: tuple[int | None, int | None]  # the last one that the product sums
    free: tuple[int | None, int | None]  # the last one that the gradient of the other operand sums
    free_in_result: tuple[int | None, int | None]


def dims_of(eqn: Any) -> ProductDims:
    """Those of a ``dot_general`` or a ``conv_general_dilated``."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive is lax.conv_general_dilated_p:
        # A row is an image, or an output channel: scales of pixels would not leave the sum.
        lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        rows, places = (lhs[0], rhs[0]), (out[0], out[1])
        in_result = ((places[0],), (places[1],))
        return ProductDims(((rows[0],), (rows[1],)), in_result, (lhs[1], rhs[1]), rows, places)
    contracted, batch = numbers
    kept: list[Dims] = []
    found: list[Dims] = []
    position = len(batch[0])
    for i in range(2):
        own = (*contracted[i], *batch[i])
        free = [d for d in range(eqn.invars[i].aval.ndim) if d not in own]
        kept.append((*batch[i], *free))
        found.append((*range(len(batch[0])), *range(position, position + len(free))))
        position += len(free)
    last = [len(dims) > len(batch[0]) for dims in kept]
    return ProductDims(
        (kept[0], kept[1]),
        (found[0], found[1]),
        (contracted[0][-1], contracted[1][-1]) if contracted[0] else (None, None),
        (kept[0][-1] if last[0] else None, kept[1][-1] if last[1] else None),
        (found[0][-1] if last[0] else None, found[1][-1] if last[1] else None),
    )


def sizes_of(eqn: Any, at: int) -> tuple[int, int, int]:
    """Rows, terms of a sum, and columns, of which operand ``at`` has the last."""
    shape = eqn.invars[at].aval.shape
    result = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive is lax.conv_general_dilated_p:
        columns, batches = shape[eqn.params["dimension_numbers"].rhs_spec[0]], 1
        return result // max(columns, 1), math.prod(shape) // max(columns, 1), columns
    contracted, batch = eqn.params["dimension_numbers"]
    terms, batches = (math.prod(shape[d] for d in dims[at]) for dims in (contracted, batch))
    columns = math.prod(shape) // max(terms * batches, 1)
    return result // max(columns * batches, 1), terms, columns


def quantized_product(eqn: Any, recipe: Recipe, at: int, operands: Sequence[Any], seed: Any) -> Any:
    """The result of an equation of which the operand ``at`` is a parameter."""
    fn = _with_gradients(eqn, recipe, at)
    closed = jax.make_jaxpr(lambda *args: [fn(*args, None)])(*map(jax.typeof, (*operands, seed)))
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])
    default = ClosedJaxpr(jaxpr, [])
    forms = {"default": default, "plain": eqn, "read": None}
    if gathers_codes(recipe):
        forms["read"] = CodedWeight(fn, recipe.weight, dims_of(eqn).kept[at], at)
    (out,) = QUANTIZED.bind(*operands, seed, *closed.consts, **forms)
    return out


class CodedWeight(NamedTuple):
    """A product that gets the codes of its parameter, quantized as devices hold it."""

    fn: Callable[..., jax.Array]  # of two operands, a seed, and codes with scales
    weight: Quantizer
    kept: Dims  # those of the parameter that the result has
    at: int

    def __call__(self, evaluator: Evaluator, operands: list[Any]) -> list[jax.Array] | None:
        """The product; None if the rule of the parameter fetches no codes."""
        x = operands[self.at]
        # What other equations read, too, is fetched as it is, once for all of them.
        shared = is_param(x) and x.is_shared and not getattr(x.rule, "is_part", False)
        fetch = None if not is_param(x) or shared else getattr(x.rule, "codes", None)
        coded = fetch and fetch(x, self)
        if not coded:
            return None
        evaluator.note(x)
        operands = [*operands[: self.at], coded[0], *operands[self.at + 1 :]]
        a, b, seed = map(evaluator.full, operands[:3])
        assert self.weight.grid is not None
        codes = lax.bitcast_convert_type(coded[1], self.weight.grid.dtype)
        return [self.fn(a, b, seed, (codes, coded[2]))]

    def has_scales_along(self, dim: int) -> bool:
        """Whether each index of a dim of the parameter has a scale of its own."""
        return self.weight.scale == "row" and dim in self.kept

    def encode(self, shard: jax.Array, of_all: Callable[[jax.Array], jax.Array] | None) -> Any:
        """Codes of a shard, as int8, and scales; ``of_all`` makes maxima those of all shards."""
        seed = jnp.zeros((), jnp.uint32)
        codes, scale = quantized(shard, self.weight, self.kept, None, seed, of_all)
        # Not all collectives take floats of 8 bits.
        return lax.bitcast_convert_type(codes, jnp.int8), scale


def gathers_codes(recipe: Recipe) -> bool:
    """Whether a product can take its parameter in codes of shards."""
    return recipe.weight.has_codes_of_shards and not _again(recipe)


def _again(recipe: Recipe) -> bool:
    """Whether the backward pass quantizes the operands of the forward pass once more."""
    return any(q.block or q.hadamard for q in recipe[1:5])


def _with_gradients(eqn: Any, recipe: Recipe, at: int) -> Callable[..., jax.Array]:
    dims = dims_of(eqn)
    quantizers = [recipe.activation, recipe.weight] if at else [recipe.weight, recipe.activation]
    # Of the gradient of each operand, the quantizer of the cotangent.
    of_gradient = [recipe.cotangent, recipe.of_weight]
    of_gradient = of_gradient if at else of_gradient[::-1]
    again = _again(recipe)

    def forward(a: jax.Array, b: jax.Array, seed: jax.Array, coded: Any) -> tuple[jax.Array, Any]:
        both = [
            quantized(x, quantizers[i], dims.kept[i], dims.summed[i], seed)
            if coded is None or i != at
            else coded
            for i, x in enumerate((a, b))
        ]
        y = _of_codes(eqn, [codes for codes, _ in both], eqn.outvars[0].aval.dtype)
        for i, (_, scale) in enumerate(both):
            y = _scaled(y, scale, dims.kept[i], dims.in_result[i])
        like = a[:0].ravel(), b[:0].ravel()  # which have the dtypes of gradients
        return y.astype(eqn.outvars[0].aval.dtype), (
            [(a, None), (b, None)] if again else both,
            seed,
            like,
        )

    def backward(stored: Any, cotangent: jax.Array) -> Any:
        both, seed, like = stored
        wide = to_sum_dtype(cotangent)
        grads = []
        for i in range(2):
            o = 1 - i  # the other operand, which the cotangent is multiplied by
            other, scale = both[o]
            g = _scaled(wide, scale, dims.kept[o], dims.in_result[o])
            if again:
                other, _ = quantized(other, quantizers[o], (), dims.free[o], seed)
            g, scale = quantized(g, of_gradient[i], dims.in_result[i], dims.free_in_result[o], seed)
            grad = _scaled(
                _gradient(eqn, i, g, other, like[i].dtype), scale, dims.in_result[i], dims.kept[i]
            )
            grads.append(grad.astype(like[i].dtype))
        return *grads, None, None

    product = jax.custom_vjp(lambda *args: forward(*args)[0])
    product.defvjp(forward, backward)
    return product


def _scaled(y: jax.Array, scale: jax.Array | None, dims: Dims, places: Dims) -> jax.Array:
    """``y`` times a scale, whose ``dims``, the others of size 1, are at ``places`` in ``y``."""
    if scale is None:
        return y
    order = sorted(range(len(dims)), key=places.__getitem__)
    rest = [d for d in range(scale.ndim) if d not in dims]
    scale = lax.transpose(scale, [*(dims[i] for i in order), *rest])
    shape = [1] * y.ndim
    for size, i in zip(scale.shape, order, strict=False):
        shape[places[i]] = size
    return y * scale.reshape(shape)


def _of_codes(eqn: Any, operands: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """The same product of codes; integers are summed in int32, floats of 8 bits in float32.

    Where what becomes of it has the ``dtype`` bfloat16, so has the sum of the latter, in memory.
    """
    dtypes = {x.dtype for x in operands}
    if len(dtypes) > 1 and eqn.primitive is lax.conv_general_dilated_p:
        # Convolutions are of one type, and bfloat16 has the numbers of both formats of 8 bits.
        common = jnp.bfloat16 if {x.dtype.itemsize for x in operands} == {1} else jnp.float32
        operands = tuple(x.astype(common) for x in operands)
    wide: Any = jnp.float64 if np.dtype(np.float64) in dtypes else jnp.float32
    if {x.dtype.itemsize for x in operands} == {1}:
        is_int8 = dtypes == {np.dtype(np.int8)}
        wide = jnp.int32 if is_int8 else jnp.bfloat16 if dtype == jnp.bfloat16 else wide
    (out,) = bind(eqn, operands, eqn.params | {"preferred_element_type": wide})
    return out.astype(jnp.float32) if wide == jnp.int32 else out


def _gradient(eqn: Any, at: int, cotangent: jax.Array, other: jax.Array, dtype: Any) -> jax.Array:
    """The product that JAX makes of the gradient by one operand, of codes."""
    types = [jax.ShapeDtypeStruct(v.aval.shape, jnp.float32) for v in eqn.invars]
    of_result = jax.ShapeDtypeStruct(cotangent.shape, jnp.float32)
    params = eqn.params | {"preferred_element_type": None}

    def transposed(cotangent: Any, other: Any) -> Any:
        def product(x: jax.Array) -> jax.Array:
            (out,) = bind(eqn, [x, other] if at == 0 else [other, x], params)
            return out

        return jax.linear_transpose(product, types[at])(cotangent)

    jaxpr = jax.make_jaxpr(transposed)(of_result, types[1 - at]).jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.invars, (cotangent, other), strict=True))
    for step in jaxpr.eqns:
        read = [values[v] for v in step.invars]
        is_product = step.primitive in PRODUCTS
        out = [_of_codes(step, read, dtype)] if is_product else bind(step, read)
        values |= zip(step.outvars, out, strict=True)
    found: jax.Array = values[jaxpr.outvars[0]]
    return found
