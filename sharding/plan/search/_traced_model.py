"""A loss of one's own for a search: what its step computes and stores is traced."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext.equations import Name, record_of, trace
from sharding import stored
from sharding._jaxprs import all_equations
from sharding._types import Batch, DType, Tree
from sharding.matmuls._quantized_loss import quantized_matmuls
from sharding.placement._train_state import resolve_trainable
from sharding.plan._format import check_choice
from sharding.plan.cost._parallel_plan import PLANNED
from sharding.plan.machine._devices import num_bytes
from sharding.plan.model._loss_layers import Layer, LossTrace, Run
from sharding.plan.model._models import PRESETS, Decoder
from sharding.plan.model._traced_work import (
    UNIT,
    Traced,
    no_matrices,
    products_of,
    stored_by,
    work_of_jaxpr,
)
from sharding.remat._loss_search import LossSearch, PlannableLoss
from sharding.stored._forms import is_form
from sharding.tiles._tiled_loss import tiled

_MOST_OPERATIONS = 1500  # of a loss with layers, to plan more of which takes minutes

# Of all that ``Decoder`` has, the matrices of its layers.
_MATRICES = "^layers/(query|key|value|out|gate|up|down)$"


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
    """A model of one's own: a loss as it is, its parameters and a batch.

    ``search`` traces its step and compares plans without pipelines. What a plan computes again are
    layers: the bodies of loops over stacked parameters, such as those of ``nn.scan``, or else what
    uses the parameters of one number, such as ``block_3``. ``"minimal"`` stores the results of
    products with matrices; if the loss gives values one of MaxText's names by
    ``jax.ad_checkpoint.checkpoint_name``, all forms store what these say. ``"planned_half"``,
    ``"planned_third"`` and ``"planned_least"`` need no layers: ``sharding.remat`` plans the graph
    of the loss, or its loops, within this share of the bytes that storing all takes.

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
    trainable: Any = None  #: which parameters are trained, as in ``train_step``

    def __post_init__(self) -> None:
        # By this object alone.
        for name in ("abstract", "traced", "in_tiles", "_trace", "_planned"):
            object.__setattr__(self, name, functools.cache(getattr(self, name)))

    @staticmethod
    @functools.lru_cache(maxsize=8)  # searches of one model share its traces
    def fine_tuned(
        model: Decoder, tx: optax.GradientTransformation, *, frozen: int = 0, lora: int = 0
    ) -> tuple["TracedModel", optax.GradientTransformation]:
        """A decoder of which adapters alone are trained, and the transformation of these.

        Its loss decodes one layer at a time. Plans of it have no pipelines and no shared layers.

        Args:
          model: one of ``MODELS``, or a ``Decoder`` of one's own.
          tx: the transformation.
          frozen: bits in which the matrices of its layers are stored, 4 (NF4) or 8; 0: as they are.
          lora: the rank of their adapters.

        Raises:
          ValueError: there are no adapters, their rank is above a dim, or the model has forms of
            its own.

        Example:
          >>> import jax, optax
          >>> from sharding.plan import Decoder, TracedModel
          >>> small = Decoder(2, 64, 2, 2, 128, 96, 16)
          >>> model, tx = TracedModel.fine_tuned(small, optax.adamw(1e-4), frozen=4, lora=8)
          >>> len(jax.tree.leaves(model.trained(model.abstract())))  # two of each of 7 matrices
          14
        """
        if not lora:
            raise ValueError("frozen trains nothing without adapters: give lora, their rank, too.")
        if not isinstance(model, Decoder):
            raise ValueError(
                "frozen and lora are of a Decoder, whose layers are known. A TracedModel has forms "
                "of its own: init by stored.store, loss_fn by stored.loss_of, and trainable."
            )
        steps = (*([stored.frozen(frozen)] if frozen else []), stored.lora(lora))

        def init(dtype: DType) -> Tree:
            return stored.store(model.init(dtype), {_MATRICES: steps}, jax.random.key(0))

        made = TracedModel(
            stored.loss_of(model.make_loss()),
            init,
            model.batch(1),
            model.length,
            trainable=stored.trained,
        )
        made.abstract()  # raises where a form does not suit a matrix
        return made, optax.masked(tx, stored.trained)

    @property
    def tensor(self) -> int:
        """Devices of the other axes of the mesh, which share each layer."""
        return self.zero.mesh.size // self.zero.num_devices if self.zero else 1

    def specs(self, axis: str = "", shards: int = 1, experts: int = 1) -> Any:
        """Those of the parameters, whatever a plan names the axis."""
        return self.param_specs

    def shards_of_tokens(self, shards: int) -> int:
        return shards

    def abstract(self, dtype: DType = jnp.float32) -> Any:
        """The parameters' shapes and dtypes."""
        return jax.eval_shape(lambda: self.init(dtype))

    def trained(self, params: Tree) -> Any:
        """These parameters, with None for each that is not trained."""
        mask = resolve_trainable(params, self.trainable)
        return jax.tree.map(lambda x, is_trained: x if is_trained else None, params, mask)

    def batch(self, size: int) -> Any:
        """The types of a batch of some examples."""

        def of_size(x: Any) -> Any:
            shape = (size, *jnp.shape(x)[1:]) if jnp.ndim(x) else ()
            return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

        return jax.tree.map(of_size, self.example)

    @property
    def size(self) -> int:
        """Examples of ``example``; a ``ValueError`` if it has none."""
        sizes = [jnp.shape(x)[0] for x in jax.tree.leaves(self.example) if jnp.ndim(x)]
        if not sizes:
            raise ValueError("the example of a TracedModel needs an array with examples in dim 0.")
        return sizes[0]

    def loss(
        self,
        recompute: str,
        fn: Callable[..., Any] | None = None,
        device: jax.Device | None = None,
    ) -> Callable[..., Any]:
        """The loss, whose backward pass computes layers or values again.

        In its place ``fn(params, ...)`` may return more; ``device`` is one of those that run it.
        """
        check_choice("recompute", recompute, ("none", *PRESETS, *PLANNED))
        loss = fn or self.loss_fn
        if recompute == "none":
            return loss

        @functools.wraps(loss)
        def call(params: Tree, *args: Any) -> Any:
            if recompute in PLANNED:
                search = self._search_of(loss, params, args, device)
                return search.within(PLANNED[recompute])(params, args)
            return LossTrace(loss, params, *args).run(self._recomputing(recompute), params, *args)

        vars(call)["computes"] = loss  # by which the step proves what it does with rows
        return call

    def in_tiles(self, tiles: int) -> "TracedModel":
        """The model whose loss has large values one tile at a time."""
        return dataclasses.replace(self, loss_fn=tiled(self.loss_fn, tiles).fn)

    def traced(
        self,
        size: int,
        dtype: DType,
        recompute: str,
        tiles: int = 1,
        matmuls: str | None = None,
    ) -> Traced:
        """What so many examples compute and store; parameters are of a dtype."""
        if matmuls:
            fn = quantized_matmuls(self.loss_fn, matmuls).fn
            low = dataclasses.replace(self, loss_fn=fn)
            return low.traced(size, dtype, recompute, tiles)
        if tiles > 1:
            return self.in_tiles(tiles).traced(size, dtype, recompute)
        args = self._args(size, dtype)
        if recompute in PLANNED:
            planned = self._planned(size, jnp.dtype(dtype)).within(PLANNED[recompute])
            found, _ = self._passes(lambda params, batch: planned(params, (batch,)), *args)
            if self.trace.has_loops:  # one layer at a time is computed again
                return found._replace(working=self.traced(size, dtype, "full").working)
            return found._replace(working=max(0.0, planned.peak - found.stored))
        trace = self._trace(size, jnp.dtype(dtype))
        # Layers that compute alike are traced once.
        once = {layer.code: layer for layer in trace.layers}
        runs = {code: jax.jit(self._recomputing(recompute)(once[code])) for code in once}
        run = functools.partial(trace.run, lambda layer: runs[layer.code])
        found, stored = self._passes(run, *args)
        # Temporaries: those of a layer, or the gradient of the largest array that is not a stack of
        # what layers store, of which scans have one layer at a time.
        layers = once.values()
        stacked = {x.shape for layer in layers for x in stored_by(layer.run, *layer.args)}
        others = [x for x in stored if x.shape[1:] not in stacked]
        of_layers = [self._temporaries(layer, recompute) for layer in layers]
        working = max([*map(num_bytes, others), *of_layers], default=0)
        return found._replace(working=float(working))

    @property
    def gathered_once(self) -> str:
        """Matches the paths of parameters outside of layers."""
        return f"^({'|'.join(map(re.escape, self.trace.outside))})$"

    def about_layers(self, in_backward: bool) -> tuple[str, ...]:
        """What was found in the loss, and what an update in the backward pass gains of it."""
        no_gain = (
            "Layers with numbers have no jax.checkpoint: the update in the backward pass holds all "
            "that they store until their gradients exist, and gains no memory by itself. Give each "
            "jax.checkpoint, or stack them for lax.scan."
        )
        gains_none = in_backward and self.trace.numbered_without_checkpoints
        return (self.trace.found, *[no_gain] * gains_none)

    @functools.cached_property
    def names(self) -> set[str]:
        """The values that the loss gives a name of MaxText's."""
        every = map(record_of, all_equations(self.trace.graph.jaxpr))
        found = {record.name for record in every if isinstance(record, Name)}
        return found & {name for preset in PRESETS.values() for name in preset}

    @functools.cached_property
    def trace(self) -> LossTrace:
        """The loss of the example."""
        return self._trace(self.size, jnp.dtype(jnp.bfloat16))

    def _trace(self, size: int, dtype: DType) -> LossTrace:
        return LossTrace(self.loss_fn, *self._args(size, dtype))

    def can_be_planned(self, size: int, dtype: DType) -> bool:
        """Whether ``sharding.remat`` takes the loss, as it does not with callbacks, and soon."""
        # A graph in which layers are decoded has thousands of operations.
        decodes = any(map(is_form, jax.tree.leaves(self.abstract(), is_leaf=is_form)))
        if decodes or (self.trace.layers and len(self.trace.eqns) > _MOST_OPERATIONS):
            return False
        with contextlib.suppress(ValueError):
            return bool(self._planned(size, dtype))
        return False

    def _planned(self, size: int, dtype: DType) -> LossSearch:
        params, batch = self._args(size, dtype)
        return self._search_of(self.loss_fn, params, (batch,), None)

    def _search_of(
        self, loss: Callable[..., Any], params: Tree, args: Any, device: jax.Device | None
    ) -> LossSearch:
        """Of a loss of parameters and a tuple of what else it gets; for any device alike."""

        def of_tuple(params: Tree, args: Any) -> Any:
            return loss(params, *args)

        plannable = PlannableLoss(of_tuple, params, args, device or jax.devices()[0])
        return LossSearch(plannable, None, in_loops=self.trace.has_loops)

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
        return policies.save_only_these_names(*PRESETS[recompute])

    def _temporaries(self, layer: Layer, recompute: str) -> float:
        """Bytes of temporaries of the backward pass of a layer."""
        # The gradient of the largest array; where it is computed again, also what products read and
        # write, without what is saved.
        run = layer.run
        args = layer.args
        if recompute == "none":
            return max(map(num_bytes, stored_by(run, *args)), default=0)
        products = products_of(run, *args)
        inputs = stored_by(jax.checkpoint(run), *args)
        saved = stored_by(jax.checkpoint(run, policy=self._policy(recompute)), *args)
        kept = num_bytes(saved) - num_bytes(inputs)
        return num_bytes(products) - kept + max(map(num_bytes, products), default=0)

    def _passes(self, run: Callable[..., Any], *args: Any) -> tuple[Traced, list[Any]]:
        """What a function computes and stores, without temporaries; the types of what it stores."""

        def passes(params: Tree, batch: Batch) -> Any:
            def of_trained(trained: Tree) -> Any:
                every = jax.tree.map(
                    lambda x, y: x if y is None else y, params, trained, is_leaf=lambda x: x is None
                )
                return run(every, batch)

            loss, vjp = jax.vjp(of_trained, self.trained(params))
            return vjp(jnp.ones_like(loss)), jax.tree.leaves(vjp)

        closed, (_, kept) = trace(passes, *args)
        work = work_of_jaxpr(closed.jaxpr, UNIT)
        stored = no_matrices(kept, args[0])
        nbytes = float(num_bytes(stored))
        traced = Traced(
            flops=work.flops,
            products=work.products,
            touched=work.touched + work.summed,
            moved=work.seconds - work.summed,
            stored=nbytes,
            working=0.0,
            low=work.low,
            convolved=work.convolved,
            filtered=work.filtered,
        )
        return traced, stored


AnyModel = Decoder | TracedModel
