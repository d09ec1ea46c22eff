"""A loss of one's own for a search: what its step computes and stores is traced."""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from optax_ext.traced_graph import Equation
from sharding._jaxprs import all_equations, inner_jaxprs
from sharding._types import Batch, DType, Tree
from sharding.plan.machine._devices import KINDS, DeviceKind
from sharding.plan.machine._tiles import num_bytes
from sharding.plan.model._loss_layers import Layer, LossTrace, Run
from sharding.plan.model._models import PRESETS, Decoder

# Where the device is not known: only relative times count then.
ANY_DEVICE = KINDS["h100"]
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
    products: float = 0.0  # how many matrix products
    touched: float = 0.0  # bytes that these read and write

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(*map(operator.add, self, other))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*map(operator.sub, self, other))

    def times(self, count: int) -> "Work":
        return Work(*(value * count for value in self))


def work_of(fn: Callable[..., Any], *args: Any, kind: DeviceKind | None) -> Work:
    return work_of_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr, kind or ANY_DEVICE)


def work_of_equation(
    eqn: JaxprEqn | Equation, operands: list[Any], results: list[Any], kind: DeviceKind | None
) -> Work:
    """The work of one operation; operands and results have ``shape`` and ``dtype``."""
    kind = kind or ANY_DEVICE
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
        return Work(flops, flops / kind.flops, 1.0, float(num_bytes([*operands, *results])))
    if name == "conv_general_dilated":
        spec = params["dimension_numbers"].rhs_spec
        kernel = operands[1].shape
        flops = 2.0 * math.prod(results[0].shape) * math.prod(kernel) / kernel[spec[0]]
        return Work(flops, flops / kind.flops, 1.0, float(num_bytes([*operands, *results])))
    if name in _FREE:
        return Work(0.0, 0.0)
    return Work(0.0, others)


@functools.lru_cache(maxsize=1024)
def work_of_jaxpr(jaxpr: Jaxpr, kind: DeviceKind) -> Work:
    total = Work(0.0, 0.0)
    for eqn in jaxpr.eqns:
        operands, results = ([v.aval for v in vs] for vs in (eqn.invars, eqn.outvars))
        total += work_of_equation(eqn, operands, results, kind)
    return total


def stored_by(fn: Callable[..., Any], params: Tree, *args: Any) -> list[Any]:
    """The types of what the vector-Jacobian product of a function stores beside its matrices."""
    vjp = jax.eval_shape(lambda *args: jax.vjp(lambda *args: fn(*args), *args)[1], params, *args)
    return _no_matrices(vjp, params)


def _no_matrices(stored: Tree, params: Tree) -> list[Any]:
    matrices = {(x.shape, x.dtype) for x in jax.tree.leaves(params) if len(x.shape) > 1}
    return [x for x in jax.tree.leaves(stored) if (x.shape, x.dtype) not in matrices]


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


# On which the seconds of work are bytes.
_UNIT = dataclasses.replace(KINDS["h100"], flops=math.inf, bandwidth=1.0)


class Traced(NamedTuple):
    """Forward and backward passes of some examples, without parameters."""

    flops: float  # of matrix products, with those that run again
    products: float  # how many
    touched: float  # bytes that these read and write
    moved: float  # bytes that all other operations do
    stored: float  # bytes that the forward pass stores for the backward pass
    working: float  # bytes of temporaries of the backward pass beside these


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
    """A model of one's own: a loss as it is, its parameters and a batch.

    ``search`` traces its step and compares plans without pipelines. What a plan computes again are
    layers: the bodies of loops over stacked parameters, such as those of ``nn.scan``, or else what
    uses the parameters of one number, such as ``block_3``. ``"minimal"`` stores the results of
    products with matrices; if the loss gives values one of MaxText's names by
    ``jax.ad_checkpoint.checkpoint_name``, all forms store what these say.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from sharding.plan import TracedModel, search
      >>> def loss(params, x):
      ...     y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
      ...     return jnp.mean(y**2)
      >>> init = lambda dtype: {"layers": jnp.zeros((16, 4096, 4096), dtype)}
      >>> model = TracedModel(loss, init, jax.ShapeDtypeStruct((2**15, 4096), jnp.bfloat16))
      >>> search(model, optax.adamw(1e-3), "h100x8", sequences=2**15).best.plan.pipe
      1
    """

    loss_fn: Callable[..., Any]  #: ``loss_fn(params, batch)``, a mean over dim 0 of all arrays
    init: Callable[[Any], Any]  #: ``init(dtype)`` makes the parameters; it is traced alone
    example: Any  #: a batch, real or abstract: how many examples it has does not matter
    length: int = 1  #: tokens of an example
    zero: Any = None  #: a ``Zero`` of one's own, whose mesh and axes plans keep
    param_specs: Any = None  #: of the parameters on the other axes of its mesh

    layers = 1  # to plans, which no pipeline shares

    def __post_init__(self) -> None:
        for name in ("abstract", "traced", "_trace"):  # by this object alone
            object.__setattr__(self, name, functools.cache(getattr(self, name)))

    @property
    def tensor(self) -> int:
        """Devices of the other axes of the mesh, which share each layer."""
        return self.zero.mesh.size // self.zero.num_devices if self.zero else 1

    heads = kv_heads = hidden = tensor

    def specs(self, axis: str = "", shards: int = 1) -> Any:
        """Those of the parameters, whatever a plan names the axis."""
        return self.param_specs

    def shards_of_tokens(self, shards: int) -> int:
        return shards

    def placed(self, zero: Any) -> Any:
        """The ``Zero`` of a plan, on the mesh of one's own if there is one."""
        names = ("stage", "shard_state_over_replicas", "offload", "update_on", "sync", "view")
        fields = {name: getattr(zero, name) for name in names}
        return dataclasses.replace(self.zero, **fields) if self.zero else zero

    def abstract(self, dtype: DType = jnp.float32) -> Any:
        """The parameters' shapes and dtypes."""
        return jax.eval_shape(lambda: self.init(dtype))

    def batch(self, size: int) -> Any:
        """The types of a batch of some examples."""

        def of_size(x: Any) -> Any:
            shape = (size, *jnp.shape(x)[1:]) if jnp.ndim(x) else ()
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

        return jax.tree.map(of_size, self.example)

    @property
    def size(self) -> int:
        """Examples of ``example``."""
        return next(jnp.shape(x)[0] for x in jax.tree.leaves(self.example) if jnp.ndim(x))

    def loss(self, recompute: str, fn: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The loss, whose backward pass computes its layers again.

        In its place ``fn(params, ...)`` may return more.
        """
        loss = fn or self.loss_fn
        if recompute == "none":
            return loss

        @functools.wraps(loss)
        def call(*args: Any) -> Any:
            return LossTrace(loss, *args).run(self._recomputing(recompute), *args)

        return call

    def traced(self, size: int, dtype: DType, recompute: str) -> Traced:
        """What so many examples compute and store; parameters are of a dtype."""
        args, trace = self._args(size, dtype), self._trace(size, jnp.dtype(dtype))
        # Layers that compute alike are traced once.
        once = {layer.code: layer for layer in trace.layers}
        runs = {code: jax.jit(self._recomputing(recompute)(once[code])) for code in once}
        run = functools.partial(trace.run, lambda layer: runs[layer.code])

        def passes(params: Tree, batch: Batch) -> Any:
            loss, vjp = jax.vjp(lambda params: run(params, batch), params)
            return vjp(jnp.ones_like(loss)), jax.tree.leaves(vjp)

        closed, (_, kept) = jax.make_jaxpr(passes, return_shape=True)(*args)
        work, stored = work_of_jaxpr(closed.jaxpr, _UNIT), _no_matrices(kept, args[0])
        # Temporaries: those of a layer, or the gradient of the largest array that is not a stack of
        # what layers store, of which scans have one layer at a time.
        layers = once.values()
        stacked = {x.shape for layer in layers for x in stored_by(layer.run, *layer.args)}
        others = [x for x in stored if x.shape[1:] not in stacked]
        of_layers = [self._temporaries(layer, recompute) for layer in layers]
        working = max([*map(num_bytes, others), *of_layers], default=0)
        done = work.flops, work.products, work.touched, work.seconds
        return Traced(*done, float(num_bytes(stored)), float(working))

    @property
    def gathered_once(self) -> str:
        """Matches the paths of parameters outside of layers."""
        return f"^({'|'.join(map(re.escape, self.trace.outside))})$"

    @functools.cached_property
    def names(self) -> set[str]:
        """The values that the loss gives a name of MaxText's."""
        every = all_equations(self.trace.graph.jaxpr)
        found = {eqn.params["name"] for eqn in every if eqn.primitive.name == "name"}
        return found & {name for preset, _ in PRESETS.values() for name in preset}

    @functools.cached_property
    def trace(self) -> LossTrace:
        """The loss of the example."""
        return self._trace(self.size, jnp.dtype(jnp.bfloat16))

    def _trace(self, size: int, dtype: DType) -> LossTrace:
        return LossTrace(self.loss_fn, *self._args(size, dtype))

    def _args(self, size: int, dtype: DType) -> tuple[Any, Any]:
        return self.abstract(dtype), self.batch(size)

    def _recomputing(self, recompute: str) -> Callable[[Layer], Run]:
        if recompute == "none":
            return lambda layer: layer.run
        policy = self._policy(recompute)
        return lambda layer: jax.checkpoint(layer.run, policy=policy)

    def _policy(self, recompute: str) -> Any:
        policies = jax.checkpoint_policies
        if recompute == "minimal" and not self.names:
            return policies.dots_with_no_batch_dims_saveable
        return policies.save_only_these_names(*PRESETS[recompute][0])

    def _temporaries(self, layer: Layer, recompute: str) -> float:
        """Bytes of temporaries of the backward pass of a layer."""
        # The gradient of the largest array; where it is computed again, also what products read and
        # write, without what is saved.
        run, args = layer.run, layer.args
        if recompute == "none":
            return max(map(num_bytes, stored_by(run, *args)), default=0)
        products = products_of(run, *args)
        inputs = stored_by(jax.checkpoint(run), *args)
        saved = stored_by(jax.checkpoint(run, policy=self._policy(recompute)), *args)
        kept = num_bytes(saved) - num_bytes(inputs)
        return num_bytes(products) - kept + max(map(num_bytes, products), default=0)


AnyModel = Decoder | TracedModel
