r"""One product of a loss as three products of codes.

Forward, both operands have scales by row, of what one result sums, so that these leave the sum:

.. math::
    y_{mn} = s_m\, t_n \sum_k x_{mk}\, w_{kn}

Backward, the products sum over n and over m, along which these scales vary. They are multiplied
into the cotangent before that is quantized:

.. math::
    \partial x_{mk} = \sum_n Q(t_n\, \partial y_{mn})\, w_{kn}, \qquad
    \partial w_{kn} = \sum_m x_{mk}\, Q(s_m\, \partial y_{mn})

each with the other scale and that of Q outside of the sum. So the codes of the forward pass are all
that it stores, and nothing is rounded twice; only the cotangent is quantized for each product, with
scales along the dims that are left. Scales of blocks, and Hadamard transforms, are along what each
product sums: such recipes store both operands, and quantize them again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from optax_ext.kernels import calling_default
from optax_ext.traced_graph import bind
from sharding.matmuls._recipes import Quantizer, Recipe, quantized

# From two operands and a seed to the product: ``default``, with its own derivative. What only asks
# how results depend on operands reads ``plain``, the equation that it takes the place of.
QUANTIZED = calling_default("quantized_product")
PRODUCTS = lax.dot_general_p, lax.conv_general_dilated_p

Dims = tuple[int, ...]


class ProductDims(NamedTuple):
    """What the dims of two operands are in their product."""

    kept: tuple[Dims, Dims]  # of each operand, those that index results
    in_result: tuple[Dims, Dims]  # where the kept dims are in the result
    summed: Dims  # of each operand, a dim that the product sums
    # Of each operand, the largest of its dims that the gradient of the other one sums, and where it
    # is in the result.
    free: Dims
    free_in_result: Dims


def dims_of(eqn: Any) -> ProductDims:
    """Those of an equation, a ``dot_general`` or a ``conv_general_dilated``."""
    shapes = [v.aval.shape for v in eqn.invars]
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive is lax.conv_general_dilated_p:
        # A row is an image, or an output channel: scales of pixels would not leave the sum.
        lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        kept = (lhs[0],), (rhs[0],)
        in_result = (out[0],), (out[1],)
        return ProductDims(kept, in_result, (lhs[1], rhs[1]), (lhs[0], rhs[0]), (out[0], out[1]))
    contracted, batch = numbers
    free = [
        tuple(d for d in range(len(shape)) if d not in (*c, *b))
        for shape, c, b in zip(shapes, contracted, batch, strict=True)
    ]
    own = len(batch[0]), len(free[0])
    in_batch = tuple(range(own[0]))
    in_result = (
        (*in_batch, *range(own[0], sum(own))),
        (*in_batch, *range(sum(own), sum(own) + len(free[1]))),
    )
    kept = (*batch[0], *free[0]), (*batch[1], *free[1])
    largest = [max(f, key=shape.__getitem__) if f else -1 for f, shape in zip(free, shapes)]
    position = [
        places[dims.index(d)] if d >= 0 else -1
        for places, dims, d in zip(in_result, kept, largest, strict=True)
    ]
    first = max(range(len(contracted[0])), key=lambda i: shapes[0][contracted[0][i]], default=None)
    summed = (-1, -1) if first is None else (contracted[0][first], contracted[1][first])
    return ProductDims(kept, in_result, summed, tuple(largest), tuple(position))


def sizes_of(eqn: Any, at: int) -> tuple[int, int, int]:
    """Results of a parameter's row, terms of a sum, and results of an activation's row."""
    sizes = [v.aval.shape for v in eqn.invars]
    if eqn.primitive is lax.conv_general_dilated_p:
        out_channels = eqn.params["dimension_numbers"].rhs_spec[0]
        columns = sizes[1][out_channels]
        results = int(np.prod(eqn.outvars[0].aval.shape)) // max(columns, 1)
        return results, int(np.prod(sizes[1])) // max(columns, 1), columns
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    terms = int(np.prod([sizes[0][d] for d in contracted]))
    experts = int(np.prod([sizes[0][d] for d in batch]))
    each = [int(np.prod(shape)) // max(terms * experts, 1) for shape in sizes]
    return each[1 - at], terms, each[at]


def flops_of(eqn: Any) -> float:
    """Of one run: two for each term of each result."""
    return 2.0 * float(np.prod(eqn.outvars[0].aval.shape)) * sizes_of(eqn, 1)[1]


def quantized_product(eqn: Any, recipe: Recipe, at: int, operands: Sequence[Any], seed: Any) -> Any:
    """The result of an equation of which the operand ``at`` is a parameter."""
    fn = _with_gradients(eqn, recipe, at)
    types = [jax.typeof(x) for x in (*operands, seed)]
    closed = jax.make_jaxpr(lambda *args: [fn(*args)])(*types)
    (out,) = QUANTIZED.bind(*operands, seed, *closed.consts, default=_no_consts(closed), plain=eqn)
    return out


def _no_consts(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])
    return ClosedJaxpr(jaxpr, [])


def _with_gradients(eqn: Any, recipe: Recipe, at: int) -> Callable[..., jax.Array]:
    dims = dims_of(eqn)
    quantizers = [recipe.activation] * 2
    quantizers[at] = recipe.weight
    # Of the gradient of each operand, the quantizer of the cotangent.
    of_gradient = [recipe.cotangent] * 2
    of_gradient[at] = recipe.of_weight
    out_dtype = eqn.outvars[0].aval.dtype

    def forward(a: jax.Array, b: jax.Array, seed: jax.Array) -> tuple[jax.Array, Any]:
        both = [
            quantized(x, quantizers[i], dims.kept[i], dims.summed[i], seed)
            for i, x in enumerate((a, b))
        ]
        y = _product(eqn, *(codes for codes, _ in both))
        for i, (_, scale) in enumerate(both):
            y = _scaled(y, scale, dims.kept[i], dims.in_result[i])
        kept = [(a, None), (b, None)] if recipe.quantizes_again else both
        # Types of what is differentiated.
        return y.astype(out_dtype), (kept, seed, a[:0].ravel(), b[:0].ravel())

    def backward(stored: Any, cotangent: jax.Array) -> Any:
        both, seed, *like = stored
        wide = cotangent.astype(jnp.promote_types(cotangent.dtype, jnp.float32))
        grads = []
        for i in range(2):
            # The gradient of an operand, from the cotangent and the other operand.
            other, scale = both[1 - i]
            g = _scaled(wide, scale, dims.kept[1 - i], dims.in_result[1 - i])
            if recipe.quantizes_again:
                q = quantizers[1 - i]
                other, _ = quantized(other, q, (), dims.free[1 - i], seed)
            summed = dims.free_in_result[1 - i]
            g, scale = quantized(g, of_gradient[i], dims.in_result[i], summed, seed)
            grad = _gradient(eqn, i, g, other)
            grad = _scaled(grad, scale, dims.in_result[i], dims.kept[i])
            grads.append(grad.astype(like[i].dtype))
        return (*grads, np.zeros(seed.shape, jax.dtypes.float0))

    product = jax.custom_vjp(lambda *args: forward(*args)[0])
    product.defvjp(forward, backward)
    return product


def _scaled(y: jax.Array, scale: jax.Array | None, dims: Dims, places: Dims) -> jax.Array:
    """``y`` times a scale, of which the dims that are not of size 1 are others in ``y``."""
    if scale is None:
        return y
    if scale.size == 1:
        return y * scale.reshape(())
    order = sorted(range(len(dims)), key=places.__getitem__)
    rest = [d for d in range(scale.ndim) if d not in dims]
    scale = lax.transpose(scale, [*(dims[i] for i in order), *rest])
    sizes = scale.shape[: len(dims)]
    shape = [1] * y.ndim
    for size, i in zip(sizes, order, strict=True):
        shape[places[i]] = size
    return y * scale.reshape(shape)


def _product(eqn: Any, *operands: jax.Array) -> jax.Array:
    """The same product of codes; integers are summed in int32, floats of 8 bits in float32."""
    dtypes = {x.dtype for x in operands}
    if len(dtypes) > 1 and eqn.primitive is lax.conv_general_dilated_p:
        # Convolutions are of one type, and bfloat16 has the numbers of both formats of 8 bits.
        common = jnp.bfloat16 if {x.dtype.itemsize for x in operands} == {1} else jnp.float32
        operands = tuple(x.astype(common) for x in operands)
    wide = jnp.int32 if dtypes == {np.dtype(np.int8)} else jnp.float32
    wide = jnp.float64 if np.dtype(np.float64) in dtypes else wide
    (out,) = bind(eqn, operands, eqn.params | {"preferred_element_type": wide})
    return out if wide != jnp.int32 else out.astype(jnp.float32)


def _gradient(eqn: Any, at: int, cotangent: jax.Array, other: jax.Array) -> jax.Array:
    """The product that JAX makes of the gradient by one operand, of codes."""
    types = [jax.ShapeDtypeStruct(v.aval.shape, jnp.float32) for v in eqn.invars]
    params = eqn.params | {"preferred_element_type": None}

    def transposed(cotangent: Any, other: Any) -> Any:
        def of_operand(x: jax.Array) -> jax.Array:
            (out,) = bind(eqn, [x, other] if at == 0 else [other, x], params)
            return out

        return jax.linear_transpose(of_operand, types[at])(cotangent)

    of_result = jax.ShapeDtypeStruct(cotangent.shape, jnp.float32)
    jaxpr = jax.make_jaxpr(transposed)(of_result, types[1 - at]).jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.invars, (cotangent, other), strict=True))
    for step in jaxpr.eqns:
        read = [values[v] for v in step.invars]
        is_product = step.primitive in PRODUCTS
        out = [_product(step, *read)] if is_product else bind(step, read)
        values |= zip(step.outvars, out, strict=True)
    found: jax.Array = values[jaxpr.outvars[0]]
    return found


def bits_of(q: Quantizer) -> str:
    """The format of an operand, in a word."""
    return "as it is" if q.grid is None else q.grid.name
