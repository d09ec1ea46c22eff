"""What traced functions compute: products, and the time they take on a device."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from optax_ext.execution_order import Equation
from sharding._jaxprs import inner_jaxprs
from sharding.plan.machine._devices import KINDS, DeviceKind
from sharding.plan.machine._tiles import num_bytes

# Where the device is not known: only relative times count then.
_ANY_DEVICE = KINDS["h100"]
# Element-wise operations are fused: of four, about one reads or writes main memory.
_FUSED = 0.25
_FREE = frozenset(
    (
        *("name", "broadcast_in_dim", "iota", "reshape", "squeeze", "optimization_barrier"),
        *("transpose", "reduce_precision"),  # jax.checkpoint rounds what it saves to its own dtype
    )
)


class Work(NamedTuple):
    """Operations and their time."""

    flops: float  # of matrix products
    seconds: float  # of all operations on a device: products at its peak, others at its bandwidth

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(self.flops + other.flops, self.seconds + other.seconds)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.flops - other.flops, self.seconds - other.seconds)

    def times(self, count: int) -> "Work":
        """The work of ``count`` runs."""
        return Work(self.flops * count, self.seconds * count)


def work_of(fn: Callable[..., Any], *args: Any, kind: DeviceKind | None) -> Work:
    """The work of a function; arguments may be abstract."""
    return work_of_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr, kind or _ANY_DEVICE)


def work_of_equation(
    eqn: JaxprEqn | Equation, operands: list[Any], results: list[Any], kind: DeviceKind | None
) -> Work:
    """The work of one operation; operands and results have ``shape`` and ``dtype``."""
    kind = kind or _ANY_DEVICE
    name, params = eqn.primitive.name, eqn.params
    inner = [work_of_jaxpr(jaxpr, kind) for jaxpr in inner_jaxprs(eqn)]
    others = _FUSED * sum(map(num_bytes, results)) / kind.bandwidth
    if inner and "grid_mapping" in params:  # a Pallas kernel, whose values stay on the chip
        flops = sum(work.flops for work in inner) * math.prod(params["grid_mapping"].grid)
        return Work(flops, flops / kind.flops + others)
    if inner and "branches" in params:  # as pl.when, whose other branch is empty
        return max(inner, key=lambda work: work.seconds)
    if inner:
        return sum(inner, Work(0.0, 0.0)).times(params.get("length", 1))
    if name == "dot_general":
        (summed, _), _ = params["dimension_numbers"]
        flops = 2.0 * math.prod(results[0].shape)
        flops *= math.prod(operands[0].shape[dim] for dim in summed)
        return Work(flops, flops / kind.flops)
    if name == "conv_general_dilated":
        spec = params["dimension_numbers"].rhs_spec
        kernel = operands[1].shape
        flops = 2.0 * math.prod(results[0].shape) * math.prod(kernel) / kernel[spec[0]]
        return Work(flops, flops / kind.flops)
    if name in _FREE:
        return Work(0.0, 0.0)
    return Work(0.0, others)


def work_of_jaxpr(jaxpr: Jaxpr, kind: DeviceKind) -> Work:
    """The work of a traced function."""
    total = Work(0.0, 0.0)
    for eqn in jaxpr.eqns:
        operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
        total += work_of_equation(eqn, operands, results, kind)
    return total


def stored_by(fn: Callable[..., Any], params: Any, *args: Any) -> list[Any]:
    """The types of what the vector-Jacobian product of a function stores beside its matrices."""
    matrices = {(x.shape, x.dtype) for x in jax.tree.leaves(params) if len(x.shape) > 1}
    vjp = jax.eval_shape(lambda *args: jax.vjp(lambda *args: fn(*args), *args)[1], params, *args)
    return [x for x in jax.tree.leaves(vjp) if (x.shape, x.dtype) not in matrices]


def products_of(fn: Callable[..., Any], params: Any, *args: Any) -> list[Any]:
    """The types of what the matrix products of a function read and write, without parameters."""
    traced = jax.make_jaxpr(fn)(params, *args).jaxpr
    own = traced.invars[: len(jax.tree.leaves(params))]
    return [var.aval for var in _operands_of_products(traced) if var not in own]


def _operands_of_products(jaxpr: Jaxpr) -> list[Any]:
    """The variables that matrix products read and write, each once; not literals."""
    operands: dict[Any, None] = {}
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            operands |= dict.fromkeys(_operands_of_products(inner))
        if eqn.primitive.name == "dot_general":
            variables = (*eqn.invars, *eqn.outvars)
            operands |= dict.fromkeys(v for v in variables if not hasattr(v, "val"))
    return list(operands)
