"""``Pipeline``: the layers of a model over a mesh axis, as an ordinary differentiable loss."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from sharding._types import Array, Batch, Tree
from sharding.loss._loss_options import Loss
from sharding.loss._marks import with_handles
from sharding.pipeline import _layers
from sharding.pipeline._differentiable_loss import loss, on_auto_axes
from sharding.pipeline._instructions import Instructions, instructions
from sharding.pipeline._operations import Op
from sharding.pipeline._schedule import Schedule
from sharding.placement._specs import AnyMesh, expand_specs, is_spec
from sharding.step._gather_and_reduce import gather
from sharding.step._loss import join_microbatches, split_microbatches

P = PartitionSpec
GATHERS = ("step", "tick")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Runs a model's layers as the stages of a pipeline, by any schedule, in one SPMD program.

    ``loss`` computes its gradients beside its value; they equal those of the model on one device up
    to rounding.

    Parameters are those of the model with its layers stacked: under the key ``layers`` each array
    is [layers, ...], sharded over ``axis`` along dim 0; everything else is *shared*: replicated
    over ``axis``, and used by embedding, head or both. Optimizers must take dim 0 of layers as a
    stack: ``optax_ext.flax_transformer()``, ``by_path`` with ``last_two_dims(batch=(0,))``,
    ``lamb(stacked=...)``.

    With ``Zero`` over another mesh axis it is given in place of a loss, and ``param_specs`` to
    ``zero.init``. Micro-batches belong here: each of ``train_step`` would flush the pipeline.

    Raises:
      ValueError: if the schedule does not fit the mesh axis or the layers.
      ScheduleError: if the schedule cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, sharding as shd
      >>> n = jax.device_count()
      >>> auto = (jax.sharding.AxisType.Auto,)  # Explicit axes need jax.set_mesh
      >>> pipeline = shd.Pipeline(
      ...     jax.make_mesh((n,), ("pipe",), auto),
      ...     shd.pipeline.one_f_one_b(stages=n, microbatches=2 * n),
      ...     num_layers=2 * n,
      ...     embed=lambda shared, x: x @ shared["in"],
      ...     block=lambda w, x, _: x + jnp.tanh(x @ w),
      ...     head=lambda shared, x, _: (jnp.sum((x @ shared["out"]) ** 2), x.shape[0]),
      ... )
      >>> layers = jnp.ones((2 * n, 16, 16))
      >>> params = pipeline.stack({"in": jnp.ones((3, 16)), "layers": layers, "out": jnp.ones(16)})
      >>> total, weight = jax.jit(pipeline.loss)(params, jnp.ones((4 * n, 3)))
      >>> bool(weight == 4 * n)
      True

    References:
      Those of the schedules. Chen, Xu, He, Guestrin: Training Deep Nets with Sublinear Memory Cost,
      2016, arXiv 1604.06174, for recomputation.
    """

    mesh: AnyMesh  #: Auto and Explicit axes both work
    schedule: Schedule  #: the table, such as ``one_f_one_b(stages, microbatches)``
    _: dataclasses.KW_ONLY
    #: of the model, divided evenly, the first stages with one more if need be; or those of every
    #: virtual stage. Stages with unequal numbers send each other layers in each step
    num_layers: int | Sequence[int]
    #: ``embed(shared, microbatch) -> x``, the activations that enter the first layer: a tree
    embed: Callable[..., Any]
    block: Callable[..., Any]  #: ``block(layer, x, microbatch) -> x``, one layer
    #: ``head(shared, x, microbatch) -> (sum, weight)``: the sum of the losses of a micro-batch, and
    #: of their weights, which must not depend on the parameters. Scale the sum of float16 models
    #: here, not outside. None of the three may close over what is differentiated
    head: Callable[..., Any]
    axis: str = "pipe"  #: the mesh axis of the stages
    layers: str = "layers"  #: the key of the layers in the tree of parameters
    #: the keys of the layers in an unstacked model, such as ``"block_{}"``; None if it has them
    #: stacked under ``layers``
    numbered: str | None = None
    #: whether ``embed``, ``block`` and ``head`` take a key, of micro-batch and layer, at the end
    rngs: bool = False
    #: whether ``head`` returns ``((sum, weight), aux)``. Scalars of ``aux`` are averaged over
    #: micro-batches, batch arrays concatenated; it has no gradients
    has_aux: bool = False
    #: whether backward passes compute their layers again; otherwise forward passes store residuals
    recompute: bool = True
    #: at stage 3, ``"step"`` gathers the layers of a stage once per step, ``"tick"`` each layer
    #: where it runs: less memory, more traffic with more micro-batches; it needs ``recompute``
    gather: str = "step"

    def __post_init__(self) -> None:
        if self.axis not in self.mesh.axis_names:
            raise ValueError(f"axis {self.axis!r} is not in the mesh {self.mesh.axis_names}.")
        size = self.mesh.shape[self.axis]
        if self.schedule.num_stages != size:
            raise ValueError(
                f"the schedule {self.schedule.name} has {self.schedule.num_stages} stages, but "
                f"mesh axis {self.axis!r} has {size} devices."
            )
        if self.gather not in GATHERS:
            raise ValueError(f"gather must be one of {', '.join(GATHERS)}, got {self.gather!r}.")
        if self.gather == "tick" and not self.recompute:
            raise ValueError(
                "gather='tick' needs recompute=True: stored residuals would hold the gathered "
                "layers of every micro-batch."
            )
        if self.numbered is not None and self.numbered.count("{}") != 1:
            raise ValueError(
                f"numbered must hold {{}} once, where the number is, got {self.numbered!r}."
            )
        if np.any(self.schedule.op == Op.UPDATE):
            raise ValueError(
                f"the schedule {self.schedule.name} updates parameters: use AsyncPipeline with it, "
                "and a schedule such as one_f_one_b here."
            )
        if self.schedule.forward_only:
            raise ValueError(
                f"the schedule {self.schedule.name} has no backward passes. Evaluation derives its "
                "own table from the schedule of training."
            )
        self.schedule.check()
        virtual = self.schedule.num_virtual_stages
        if not isinstance(self.num_layers, int):
            object.__setattr__(self, "num_layers", tuple(self.num_layers))
            if len(self.layer_counts) != virtual or min(self.layer_counts) < 1:
                raise ValueError(
                    f"num_layers must name at least one layer for each of the {virtual} virtual "
                    f"stages of {self.schedule.name}, got {self.num_layers}."
                )
        elif self.num_layers < virtual:
            raise ValueError(
                f"{self.num_layers} layers are fewer than the {virtual} virtual stages of "
                f"{self.schedule.name}."
            )
        _ = self._training  # so that a bad schedule is rejected here

    # --- Layers and rows --------------------------------------------------------------------------

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The number of layers of every virtual stage."""
        if not isinstance(self.num_layers, int):
            return tuple(self.num_layers)
        virtual = self.schedule.num_virtual_stages
        fewest, more = divmod(self.num_layers, virtual)
        return tuple(fewest + (v < more) for v in range(virtual))

    @functools.cached_property
    def _rows(self) -> _layers.StageRows:
        held = _layers.owned_virtual_stages(self.schedule)
        return _layers.StageRows(self.axis, _layers.layer_of_row(held, self.layer_counts))

    @functools.cached_property
    def _training(self) -> tuple[Schedule, Instructions]:  # made once, not in every trace
        return self.schedule, instructions(self.schedule, self.recompute)

    @functools.cached_property
    def _evaluation(self) -> tuple[Schedule, Instructions]:
        schedule = self.schedule.without_backward()
        return schedule, instructions(schedule, self.recompute)

    def stack(self, tree: Tree) -> Any:
        """The tree of a model, or of an optimizer's state, with its layers under ``layers``.

        In ``tree`` they are in order, under the key ``layers`` [layers, ...] or under ``numbered``
        keys. Arrays may be abstract.

        Raises:
          ValueError: if there are no layers in it, or not as many as expected.
        """
        if self.numbered is not None:
            tree = _layers.join_numbered(tree, self.numbered, self.layers, sum(self.layer_counts))
        tree, count = self._reorder(tree, self._rows.order, stacking=True)
        if not count:
            raise ValueError(
                f"the tree has no key {self.layers!r} with stacked layers. If a model numbers its "
                "layers, name their keys in numbered, such as 'block_{}'."
            )
        return tree

    def unstack(self, tree: Tree) -> Any:
        """The inverse of ``stack``."""
        tree, _ = self._reorder(tree, np.argsort(self._rows.order))
        if self.numbered is not None:
            tree = _layers.split_numbered(tree, self.numbered, self.layers, sum(self.layer_counts))
        return tree

    def _reorder(self, tree: Tree, order: np.ndarray, stacking: bool = False) -> tuple[Any, int]:
        """A tree with its arrays of layers in another order; and their number."""
        arrays = []

        def layers(x: Array) -> Any:
            self._check_layers(x, stacking)
            arrays.append(x)
            return _layers.reordered(x, order)

        tree = _layers.map_layers(tree, self.layers, functools.partial(jax.tree.map, layers))
        return tree, len(arrays)

    def _check_layers(self, x: Array, stacking: bool = False) -> None:
        total = sum(self.layer_counts)
        if not jnp.ndim(x) or x.shape[0] != total:
            hint = "" if stacking else " Convert the model's parameters with pipeline.stack."
            raise ValueError(
                f"arrays under {self.layers!r} must have {'the ' * stacking}{total} layers along "
                f"dim 0, got shape {jnp.shape(x)}.{hint}"
            )

    def param_specs(self, params: Tree, specs: Tree = None) -> Any:
        """The partition spec of each stacked parameter, for ``zero.init(param_specs=...)``.

        Stages shard dim 0 of layers, or, if it does not divide, the first other dim that does.
        ``specs`` are those on other mesh axes: a tree, or a prefix of one; None replicates.

        Raises:
          ValueError: if a parameter does not have this pipeline's layers, or a spec shards them.
        """
        specs = expand_specs(specs, params)

        def over_stages(spec: Any, x: Array) -> Any:
            self._check_layers(x)
            if len(spec) and spec[0] is not None:
                raise ValueError(f"dim 0 of stacked layers is sharded over stages, got {spec}.")
            return self._rows.spec(x, spec)

        layers, _ = self._parts(params)
        of_layers, _ = self._parts(specs)
        new = jax.tree.map(over_stages, of_layers, layers, is_leaf=is_spec)
        return type(params)({**specs, self.layers: new})

    def _parts(self, params: Tree) -> tuple[Any, Any]:
        """The stacked layers, and the shared parameters."""
        if not isinstance(params, Mapping) or self.layers not in params:
            have = list(params) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"parameters must be a mapping with the stacked layers under {self.layers!r}, got "
                f"{have}."
            )
        return params[self.layers], {k: v for k, v in params.items() if k != self.layers}

    # --- The loss ---------------------------------------------------------------------------------

    def loss(self, params: Tree, batch: Batch, key: Any = None) -> Any:
        """``(sum, weight)``: the sum of the losses of a batch and of their weights; differentiable.

        With ``has_aux`` it is ``((sum, weight), aux)``.

        Args:
          params: stacked; see ``stack``.
          batch: arrays [examples, ...], which the number of micro-batches divides; scalars are the
            same in all micro-batches.
          key: with ``rngs``.

        Raises:
          ValueError: if the batch or the parameters do not fit, or the batch is differentiated.
        """
        self._check_key(key)
        layers, shared = self._parts(params)
        shared = gather(shared)
        if self.gather == "step":
            layers = gather(layers)
        for x in jax.tree.leaves(layers):
            self._check_layers(x)

        def run(*args: Any) -> Any:
            return loss(self, *args)

        call = with_handles if self.gather == "tick" else lambda fn, *args: fn(*args)
        sums, aux = call(run, (layers, shared), self._microbatches(batch), key)
        return (sums, aux) if self.has_aux else sums

    def as_loss(self) -> Loss:
        """Itself with its options, as all take it that take a loss."""
        # Its schedule is of the rows of a device.
        options: Any = {"weighted": True, "rngs": self.rngs, "per_device": True}
        return Loss(self.loss, self.has_aux, **options)

    def _check_key(self, key: Any) -> None:
        if self.rngs != (key is not None):
            raise ValueError(
                "the pipeline takes a key: pass it after the batch."
                if self.rngs
                else "the pipeline takes no key. Make it with rngs=True."
            )

    def _microbatches(self, batch: Batch) -> Any:
        count = self.schedule.num_microbatches
        for x in jax.tree.leaves(batch):
            if jnp.ndim(x) and x.shape[0] % count:
                raise ValueError(
                    f"the schedule {self.schedule.name} has {count} micro-batches, which do not "
                    f"divide the {x.shape[0]} examples of an array of shape {x.shape}."
                )
        return split_microbatches(batch, count)

    def sequential_loss(self, params: Tree, batch: Batch, key: Any = None) -> Any:
        """What ``loss`` computes, layer by layer on one device: a reference, and for debugging."""
        types = map(jax.typeof, jax.tree.leaves((params, batch)))
        if any(AxisType.Explicit in x.sharding.mesh.axis_types for x in types):
            return on_auto_axes(self.mesh, self._sequential_loss, P())(params, batch, key)
        return self._sequential_loss(params, batch, key)

    def _sequential_loss(self, params: Tree, batch: Batch, key: Any) -> Any:
        parts = self._parts(params)
        microbatches = self._microbatches(batch)
        out = []
        for number in range(self.schedule.num_microbatches):
            microbatch = jax.tree.map(lambda x, number=number: x[number], microbatches)
            own = None if key is None else jax.random.fold_in(key, number)
            out.append(self._loss_of_microbatch(*parts, microbatch, own))
        sums, aux = jax.tree.map(lambda *x: jnp.stack(x), *out)
        sums = jax.tree.map(sum, sums)
        aux = jax.lax.stop_gradient(jax.tree.map(join_microbatches, aux))
        return (sums, aux) if self.has_aux else sums

    def _loss_of_microbatch(self, layers: Tree, shared: Tree, microbatch: Batch, key: Any) -> Any:
        total = sum(self.layer_counts)
        x = self.embed(shared, *_keyed(microbatch, key, total))
        for i, row in enumerate(np.argsort(self._rows.order)):
            layer = jax.tree.map(lambda a, row=row: a[row], layers)
            x = self.block(layer, x, *_keyed(microbatch, key, i))
        out = self.head(shared, x, *_keyed(microbatch, key, total + 1))
        return out if self.has_aux else (out, ())


def _keyed(microbatch: Batch, key: Any, number: int) -> tuple[Any, ...]:
    """A micro-batch, and the key of one of its functions if there is any."""
    return (microbatch,) if key is None else (microbatch, jax.random.fold_in(key, number))
