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
from sharding.matmuls._carried import bin_of, clipped
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
    count = len(batch[0])
    both = zip(eqn.invars, contracted, batch, strict=True)
    free = [[d for d in range(v.aval.ndim) if d not in (*c, *b)] for v, c, b in both]
    end = count + len(free[0])
    found = [range(count, end), range(end, end + len(free[1]))]
    return ProductDims(
        ((*batch[0], *free[0]), (*batch[1], *free[1])),
        ((*range(count), *found[0]), (*range(count), *found[1])),
        (_last_of(contracted[0]), _last_of(contracted[1])),
        (_last_of(free[0]), _last_of(free[1])),
        (_last_of(found[0]), _last_of(found[1])),
    )


def _last_of(dims: Sequence[int]) -> int | None:
    return dims[-1] if dims else None


def sizes_of(eqn: Any, at: int) -> tuple[int, int, int]:
    """Rows, terms of a sum, and columns, of which operand ``at`` has the last."""
    shape, numbers = eqn.invars[at].aval.shape, eqn.params["dimension_numbers"]
    is_dot = eqn.primitive is lax.dot_general_p
    batches = math.prod(shape[d] for d in numbers[1][at]) if is_dot else 1
    kept = max(math.prod(shape[d] for d in dims_of(eqn).kept[at]), 1)
    rows = math.prod(eqn.outvars[0].aval.shape) // kept
    return rows, math.prod(shape) // kept, kept // max(batches, 1)


def quantized_product(
    eqn: Any,
    recipe: Recipe,
    at: int,
    operands: Sequence[Any],
    seed: Any,
    carried: dict[str, Any],
    first: bool = False,
) -> Any:
    """The result of an equation of which the operand ``at`` is a parameter.

    ``carried`` is what the train state has for scales, by the names of the recipe's fields. With
    ``first`` it is only learned, and scales are of the step itself.
    """
    operands = list(operands)
    if recipe.activation.scale == "pact" and not first:
        x, clip = to_sum_dtype(operands[1 - at]), carried["activation"].reshape(())
        assert recipe.activation.grid is not None
        operands[1 - at] = clipped(x, clip.astype(x.dtype), recipe.activation.grid)
    product = _with_gradients(eqn, recipe, at, first)

    def run(a: Any, b: Any, seed: Any, *values: Any, coded: Any = None) -> Any:
        return product(a, b, seed, dict(zip(carried, values, strict=True)), coded)

    scale_at = 3 + [*carried].index("weight") if "weight" in carried and not first else None
    operands += [seed, *carried.values()]
    closed = jax.make_jaxpr(lambda *args: [run(*args)])(*map(jax.typeof, operands))
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])
    forms = {"default": ClosedJaxpr(jaxpr, []), "plain": eqn, "read": None}
    if gathers_codes(recipe):
        kept = dims_of(eqn).kept[at]
        forms["read"] = CodedWeight(run, recipe.weight, kept, at, len(operands), scale_at)
    (out,) = QUANTIZED.bind(*operands, *closed.consts, **forms)
    return out


class CodedWeight(NamedTuple):
    """A product that gets the codes of its parameter, quantized as devices hold it."""

    fn: Callable[..., jax.Array]  # of operands, and codes with scales
    weight: Quantizer
    kept: Dims  # those of the parameter that the result has
    at: int
    num_operands: int
    scale_at: int | None  # the operand that is what the train state carries for the scale
    carried: Any = None  # which that is

    def __call__(self, evaluator: Evaluator, operands: list[Any]) -> list[jax.Array] | None:
        """The product; None if the rule of the parameter fetches no codes."""
        x = operands[self.at]
        # What other equations read, too, is fetched as it is, once for all of them.
        shared = is_param(x) and x.is_shared and not getattr(x.rule, "is_part", False)
        fetch = None if not is_param(x) or shared else getattr(x.rule, "codes", None)
        if not fetch:
            return None
        carried = None if self.scale_at is None else evaluator.full(operands[self.scale_at])
        coded = fetch(x, self._replace(carried=carried))
        if not coded:
            return None
        evaluator.note(x)
        operands = [*operands[: self.at], coded[0], *operands[self.at + 1 :]]
        assert self.weight.grid is not None
        codes = lax.bitcast_convert_type(coded[1], self.weight.grid.dtype)
        read = map(evaluator.full, operands[: self.num_operands])
        return [self.fn(*read, coded=(codes, *coded[2:]))]

    def has_scales_along(self, dim: int) -> bool:
        """Whether each index of a dim of the parameter has a scale of its own."""
        return self.weight.scale == "row" and dim in self.kept

    def encode(self, shard: jax.Array, of_all: Callable[[jax.Array], jax.Array] | None) -> Any:
        """Codes of a shard, as int8, scales, and what the train state learns of the shard.

        ``of_all`` makes maxima those of all shards.
        """
        seed = jnp.zeros((), jnp.uint32)
        codes, scale = quantized(shard, self.weight, self.kept, None, seed, self.carried, of_all)
        # Not all collectives take floats of 8 bits.
        seen = None if self.carried is None else bin_of(to_sum_dtype(shard))
        return lax.bitcast_convert_type(codes, jnp.int8), scale, seen


def gathers_codes(recipe: Recipe) -> bool:
    """Whether a product can take its parameter in codes of shards."""
    q = recipe.weight
    is_coded = q.grid is not None and q.grid.dtype is not None and not q.stochastic
    # So that shards have the codes of the full array.
    return is_coded and q.scale in ("row", "tensor", "delayed") and not _again(recipe)


def _again(recipe: Recipe) -> bool:
    """Whether the backward pass quantizes the operands of the forward pass once more."""
    return any(q.block or q.hadamard for q in recipe[1:5])


def _with_gradients(eqn: Any, recipe: Recipe, at: int, first: bool) -> Callable[..., jax.Array]:
    dims, again = dims_of(eqn), _again(recipe)
    # The fields of the recipe for each operand, and for the cotangent of its gradient.
    fields, of_gradient = ("activation", "weight"), ("cotangent", recipe.cotangent_of_weight)
    if not at:
        fields, of_gradient = fields[::-1], of_gradient[::-1]

    def coded_as(
        field: str, x: Any, kept: Dims, summed: Any, seed: Any, carried: Any, source: Any = None
    ) -> Any:
        """Codes, scales, and what the train state learns of an operand."""
        scale: Any
        q, own = getattr(recipe, field), carried.get(field)
        codes, scale = quantized(x, q, kept, summed, seed, None if first else own, source=source)
        if own is None or q.scale == "delayed":
            return codes, scale, own if own is None else bin_of(to_sum_dtype(x))
        # PACT's first clip; later it has the gradient that ``clipped`` has.
        return codes, scale, scale.reshape(1) * q.grid.top if first else jnp.zeros(1)

    def forward(
        a: jax.Array, b: jax.Array, seed: jax.Array, carried: Any, coded: Any
    ) -> tuple[jax.Array, Any]:
        both = [
            coded_as(fields[i], x, dims.kept[i], dims.summed[i], seed, carried)
            if coded is None or i != at
            else coded
            for i, x in enumerate((a, b))
        ]
        y = _of_codes(eqn, [codes for codes, *_ in both], eqn.outvars[0].aval.dtype)
        for i, (_, scale, _) in enumerate(both):
            y = _scaled(y, scale, dims.kept[i], dims.in_result[i])
        like = a[:0].ravel(), b[:0].ravel()  # which have the dtypes of gradients
        found = {fields[i]: both[i][2] for i in range(2)}
        stored = [(a, None), (b, None)] if again else [x[:2] for x in both]
        return y.astype(eqn.outvars[0].aval.dtype), (stored, seed, like, carried, found)

    def backward(stored: Any, cotangent: jax.Array) -> Any:
        both, seed, like, carried, found = stored
        wide = to_sum_dtype(cotangent)
        of_rows, _ = both[1 - at]  # codes of activations
        grads = []
        for i in range(2):
            o = 1 - i  # the other operand, which the cotangent is multiplied by
            (other, scale), q = both[o], getattr(recipe, fields[o])
            # One number for all rows leaves this sum, too: both gradients are of the same codes.
            by_row = q.scale == "row"
            g = _scaled(wide, scale if by_row else None, dims.kept[o], dims.in_result[o])
            outer = 1 if by_row or scale is None else scale.reshape(())
            if again:
                other, _ = quantized(other, q, (), dims.free[o], seed)
            kept, summed = dims.in_result[i], dims.free_in_result[o]
            g, scale, seen = coded_as(of_gradient[i], g, kept, summed, seed, carried, of_rows)
            found = found | {of_gradient[i]: seen}
            grad = _gradient(eqn, i, g, other, like[i].dtype)
            grad = _scaled(grad, scale, dims.in_result[i], dims.kept[i]) * outer
            grads.append(grad.astype(like[i].dtype))
        return *grads, None, {k: found[k].astype(x.dtype) for k, x in carried.items()}, None

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
    sizes = dict(zip(sorted(places), scale.shape, strict=False))
    return y * scale.reshape([sizes.get(d, 1) for d in range(y.ndim)])


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
