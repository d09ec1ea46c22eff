"""A model of one's own for a search: what its step computes and stores is traced."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from optax_ext.traced_graph import Equation
from sharding._jaxprs import inner_jaxprs
from sharding._types import DType, Tree
from sharding.plan.machine._devices import KINDS, DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._models import PRESETS, Decoder

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
        return Work(*map(operator.add, self, other))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*map(operator.sub, self, other))

    def times(self, count: int) -> "Work":
        return Work(*(value * count for value in self))


def work_of(fn: Callable[..., Any], *args: Any, kind: DeviceKind | None) -> Work:
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
    total = Work(0.0, 0.0)
    for eqn in jaxpr.eqns:
        operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
        total += work_of_equation(eqn, operands, results, kind)
    return total


def stored_by(fn: Callable[..., Any], params: Tree, *args: Any) -> list[Any]:
    """The types of what the vector-Jacobian product of a function stores beside its matrices."""
    matrices = {(x.shape, x.dtype) for x in jax.tree.leaves(params) if len(x.shape) > 1}
    vjp = jax.eval_shape(lambda *args: jax.vjp(lambda *args: fn(*args), *args)[1], params, *args)
    return [x for x in jax.tree.leaves(vjp) if (x.shape, x.dtype) not in matrices]


def products_of(fn: Callable[..., Any], params: Tree, *args: Any) -> list[Any]:
    """The types of what the matrix products of a function read and write, without parameters."""
    traced = jax.make_jaxpr(fn)(params, *args).jaxpr
    own = traced.invars[: len(jax.tree.leaves(params))]

    def touched(jaxpr: Jaxpr) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            for inner in inner_jaxprs(eqn):
                yield from touched(inner)
            if eqn.primitive.name == "dot_general":
                yield from (var for var in (*eqn.invars, *eqn.outvars) if not hasattr(var, "val"))

    return [var.aval for var in dict.fromkeys(touched(traced)) if var not in own]


_Layer = Callable[..., Any]
# On which the seconds of work are bytes.
_UNIT = dataclasses.replace(KINDS["h100"], flops=math.inf, bandwidth=1.0)


class Traced(NamedTuple):
    """One micro-batch of one device."""

    flops: float  # of matrix products, forward and backward, with those that run again
    moved: float  # bytes that all other operations read and write
    stored: float  # bytes that the forward pass stores for the backward pass, without parameters
    working: float  # bytes of temporaries of the backward pass beside these


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
    """A model of one's own: parameters, a loss, and the layer that it calls again and again.

    ``search`` traces its step and compares plans without pipelines. What a plan computes again is
    the layer, as a whole or but for values that ``jax.ad_checkpoint.checkpoint_name`` gives one of
    MaxText's names.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from sharding.plan import TracedModel, search
      >>> def make_loss(layer):
      ...     def loss(params, x):
      ...         y, _ = jax.lax.scan(lambda y, w: (layer(w, y), None), x, params["layers"])
      ...         return jnp.mean(y**2)
      ...     return loss
      >>> model = TracedModel(
      ...     init=lambda dtype: {"layers": jnp.zeros((16, 4096, 4096), dtype)},
      ...     apply_layer=lambda w, x: x + jnp.tanh(x @ w),
      ...     make_loss=make_loss,
      ...     example=jax.ShapeDtypeStruct((4096,), jnp.bfloat16),
      ... )
      >>> search(model, optax.adamw(1e-3), "h100x8", sequences=2**15).best.plan.pipe
      1
    """

    init: Callable[[Any], Any]  #: ``init(dtype)`` makes the parameters; it is traced alone
    apply_layer: _Layer  #: the layer; its first argument is its parameters
    #: ``make_loss(layer)`` makes ``loss(params, batch)``, a mean over dim 0 of all arrays of the
    #: batch, with a layer that does what ``apply_layer`` does
    make_loss: Callable[[_Layer], Callable[[Any, Any], Any]]
    example: Any  #: the types of the arrays of one example, without that dim
    tokens: int = 1  #: of one example
    gathered_once: str = r"^(?!layers(/|$))"  #: matches paths of parameters outside of layers

    # To plans it is one layer, which neither a pipeline nor tensor parallelism shares.
    layers = heads = kv_heads = hidden = 1

    def abstract(self, dtype: DType = jnp.float32) -> Any:
        """The parameters' shapes and dtypes."""
        return jax.eval_shape(lambda: self.init(dtype))

    def batch(self, size: int) -> Any:
        """The types of a batch of some examples."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), self.example)

    @property
    def length(self) -> int:
        """Tokens of an example, as a model of sequences has it."""
        return self.tokens

    def flops(self, num_tokens: float, length: int) -> float:
        """Operations of a training step, ``length`` tokens an example: no layer runs twice."""
        return num_tokens / length * self.traced(1, jnp.bfloat16, "none").flops

    def traced(self, size: int, dtype: DType, recompute: str) -> Traced:
        """What a micro-batch of one device computes and stores; parameters are of a dtype."""
        layer = self._layer(recompute)
        loss, args = self.make_loss(layer), (self.abstract(dtype), self.batch(size))
        work = work_of(jax.value_and_grad(loss), *args, kind=_UNIT)
        stored = stored_by(loss, *args)
        # Temporaries: those of a layer, or the gradient of the largest array that is not a stack of
        # what layers store, of which scans have one layer at a time.
        calls = self._calls(size, dtype)
        stacked = {x.shape for call in calls for x in stored_by(self.apply_layer, *call)}
        others = [x for x in stored if x.shape[1:] not in stacked]
        of_layers = [self._temporaries(layer, call, recompute) for call in calls]
        working = max([*map(num_bytes, others), *of_layers], default=0)
        return Traced(work.flops, work.seconds, float(num_bytes(stored)), float(working))

    def _temporaries(self, layer: _Layer, call: tuple[Any, ...], recompute: str) -> float:
        """Bytes of temporaries of the backward pass of a layer."""
        # The gradient of the largest array; where it is computed again, also what products read and
        # write, without what is saved.
        if recompute == "none":
            return max(map(num_bytes, stored_by(self.apply_layer, *call)), default=0)
        products = products_of(self.apply_layer, *call)
        inputs = stored_by(jax.checkpoint(self.apply_layer), *call)
        kept = num_bytes(stored_by(layer, *call)) - num_bytes(inputs)
        return num_bytes(products) - kept + max(map(num_bytes, products), default=0)

    def _layer(self, recompute: str) -> _Layer:
        if recompute == "none":
            return self.apply_layer
        policy = jax.checkpoint_policies.save_only_these_names(*PRESETS[recompute][0])
        return jax.checkpoint(self.apply_layer, policy=policy)

    def _calls(self, size: int, dtype: DType) -> list[tuple[Any, ...]]:
        """The types of the arguments of each call of the layer in a loss; a scan calls it once."""
        calls = []

        def layer(*args: Any) -> Any:
            calls.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))
            return self.apply_layer(*args)

        jax.eval_shape(self.make_loss(layer), self.abstract(dtype), self.batch(size))
        return calls


AnyModel = Decoder | TracedModel
