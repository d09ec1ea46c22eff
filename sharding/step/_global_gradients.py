"""Gradients of a partitioned loss: that of plain jit, of the whole batch on the mesh.

The partitioner reduces gradients; hooks tell it to which shards, where layers make them, and to
gather parameters of stage 3 where layers use them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext.equations import trace
from optax_ext.traced_graph import bind
from sharding._types import Batch, Tree
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.loss._derivatives import bits
from sharding.loss._evaluate import MOVES, Evaluator, Param, is_cast, tapped
from sharding.loss._marks import marking
from sharding.loss._stack import numbered_layers, params_of_one_loop
from sharding.matmuls._product import CodedWeight
from sharding.offload._host_memory import DEVICE, HOST, on_host
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import NamedAxes
from sharding.placement._specs import (
    by_dim,
    entry_of,
    explicit_axes,
    is_spec,
    leaf_names,
    of_last_dims,
    only_axes,
)
from sharding.step._device_pieces import DevicePiece, PiecesEvaluator, pieces_of
from sharding.step._loss import (
    Inputs,
    StepLoss,
    Sums,
    inverse_weight,
    loss_args,
    microbatch_key,
)
from sharding.step._step_plan import StepSpec

P = PartitionSpec


class GlobalRule(NamedTuple):
    """One parameter: its specs between steps, while it is used, and of its gradient."""

    layout: Layout
    held: P
    used: P
    shard: P
    dim: int  # that devices have shards of, counted from the end; 0 if there is none
    ndim: int
    dtype: Any  # in which the loss gets it
    reduce_dtype: Any
    trained: bool
    hosted: bool  # whether it is in host memory, as its gradient then is
    # The uses of a table that is a head, too, are far apart: no gradient waits for the other.
    by_use: bool = True
    again: bool = False  # of layers with numbers

    @property
    def is_sharded(self) -> bool:
        """Whether devices have shards of it, or of its gradient."""
        return bool(self.dim) and (self.layout.stage == 3 or self.trained)

    def of_slice(self, spec: P, ndim: int) -> P:
        """A spec for an array that lacks leading dims, which loops over layers took off."""
        return of_last_dims(by_dim(spec, self.ndim), ndim)

    def _placed(self, x: jax.Array, spec: P) -> jax.Array:
        """An array, or a slice of it, with a sharding; by its type where axes are Explicit."""
        spec = self.of_slice(spec, x.ndim)
        explicit = explicit_axes(jax.sharding.get_abstract_mesh())
        if explicit:
            return jax.sharding.reshard(x, only_axes(spec, explicit))
        return self.layout.constrain(x, spec)

    def fetch(self, held: jax.Array) -> jax.Array:
        if on_host(held):
            held = jax.device_put(held, DEVICE).astype(self.dtype)
        if self.layout.stage < 3 or self.held == self.used:
            return held
        with jax.named_scope("gather"):
            # Held as shards up to here, so that no layer before it is gathered at once.
            return self._placed(self._placed(held, self.held), self.used)

    def codes(self, x: Param, product: CodedWeight) -> tuple[jax.Array, ...] | None:
        """As those of ``DeviceRule``; the partitioner makes the scales of all shards."""
        if self.layout.stage < 3 or self.held == self.used or x.moves or on_host(x.held):
            return None
        with jax.named_scope("gather"):
            codes, *of_scale = product.encode(self._placed(x.held, self.held), None)
            codes = self._placed(self._placed(codes, self.held), self.used)
        return tapped(self, jnp.zeros(x.held.shape, x.held.dtype), x.tap), codes, *of_scale

    def reduce(self, grad: jax.Array, tap: Any) -> jax.Array:
        grad = grad.astype(self.reduce_dtype)
        with jax.named_scope("reduce_scatter"):
            # XLA:TPU reduces a product step by step, as it computes it: on 8 devices that sends
            # 9 / 7 of the bytes. A sum that is sliced becomes a reduce-scatter on the chips of a
            # host, and an all-reduce on more of them.
            if self.layout.is_one_host_of_tpus:
                grad = self._placed(grad, self.used)
            grad = self._placed(grad, self.shard)
        return jax.device_put(grad, HOST) if tap.memory_space == HOST else grad

    def tap(self, shape: tuple[int, ...], dtype: Any = None) -> jax.Array:
        """Zeros: what is differentiated in the place of a parameter, or of a slice of it."""
        zeros = jnp.zeros(shape, dtype or self.reduce_dtype)
        return self.layout.constrain(zeros, self.of_slice(self.shard, len(shape)))

    def full_tap(self, shape: tuple[int, ...], dtype: Any = None) -> jax.Array:
        """``tap`` of the whole parameter; of a stack in host memory it is there, too."""
        if not self.hosted:
            return self.tap(shape, dtype)
        layer = self.tap(shape[1:], dtype)
        return lax.scan(lambda *_: (None, jax.device_put(layer, HOST)), None, length=shape[0])[1]

    # --- What comes before it is fetched ----------------------------------------------------------

    def view(self, x: Param, eqn: Any, rest: list[Any]) -> list[Param] | None:
        if is_cast(eqn) and not (x.moves or on_host(x.held)):  # less is fetched, often
            return [x.of_held(bind(eqn, [x.held])[0], x.tap)]
        return None if rest or eqn.primitive.name not in MOVES else [x.moved_by(eqn)]

    def stack(self, x: Param) -> Param | None:
        """Nothing is computed in host memory: a layer is cast once it is loaded."""
        return x if not x.moves or (on_host(x.held) and all(map(is_cast, x.moves))) else None

    def layer(self, x: Param) -> Param:
        """All uses of a layer of a stack in host memory give one gradient, on the device."""
        hosted = x.tap is not None and on_host(x.tap)
        return x._replace(in_layer=True, tap=jax.device_put(x.tap, DEVICE) if hosted else x.tap)


class GlobalLoss:
    """A loss of the whole batch, of parameters as they are held between steps."""

    def __init__(
        self, spec: StepSpec, fn: Callable[..., Any], params: Tree, in_pieces: bool = False
    ):
        """With ``in_pieces`` what keeps rows apart runs per device; ``pieces`` says what did."""
        self.layout, self.fn, self._axes = spec.layout, fn, loss_axes(spec.layout)
        self._in_pieces = in_pieces
        self.pieces: list[DevicePiece] = [] if spec.pieces is None else spec.pieces
        leaves, treedef = jax.tree.flatten(params)
        self.treedef = treedef
        columns = map(treedef.flatten_up_to, (*spec.placed[:3], spec.trained))
        self.leaves: list[GlobalRule] = []
        numbered = numbered_layers(leaf_names(params))
        for layer, x, held, shard, dim, trained in zip(numbered, leaves, *columns, strict=True):
            dtype = spec.precision.of_loss(x.dtype)
            of_array = held, self.layout.other_spec(held), shard, dim, x.ndim, dtype
            of_grad = spec.precision.of_sum(dtype), trained, on_host(x)
            again = layer != "" and self.layout.stage == 3 and not on_host(x)
            self.leaves.append(GlobalRule(self.layout, *of_array, *of_grad, again=again))

    @property
    def trained(self) -> list[GlobalRule]:
        return [leaf for leaf in self.leaves if leaf.trained]

    def cast(self, params: list[jax.Array]) -> list[Any]:
        """Parameters in the dtypes that the loss gets; types of those in host memory."""
        return [
            jax.ShapeDtypeStruct(x.shape, leaf.dtype) if on_host(x) else x.astype(leaf.dtype)
            for x, leaf in zip(params, self.leaves, strict=True)
        ]

    def __call__(
        self, params: list[jax.Array], taps: list[jax.Array], args: tuple[Any, ...], specs: Tree
    ) -> Any:
        """What the loss returns for ``params``, as between steps, and ``args`` of ``specs``.

        ``taps`` are differentiated in the place of the trained ones, and placed as their gradients.
        """
        # Of what is in host memory the loss casts what it loads.
        both = zip(params, self.cast(params), strict=True)
        held = [x if on_host(x) else cast for x, cast in both]
        own = [leaf.held for leaf in self.leaves], [leaf.shard for leaf in self.trained]
        run = functools.partial(self._run, jax.tree.leaves(specs, is_leaf=is_spec))
        return self._axes.run(run, (*own, *specs), held, taps, *args)

    def _run(self, specs: list[P], held: list[jax.Array], taps: list[jax.Array], *args: Any) -> Any:
        params = self.treedef.unflatten(map(self._type, self.leaves, held))
        with marking():
            closed, results = trace(self.fn, params, *args)
        streamed = bits(i for i, leaf in enumerate(self.leaves) if leaf.hosted and leaf.trained)
        in_loops = params_of_one_loop(closed, streamed) if streamed else set()
        given, own = iter(taps), []
        for i, (leaf, x) in enumerate(zip(self.leaves, held, strict=True)):
            tap = next(given) if leaf.trained else None
            # Gradients of several uses, or of other uses than a loop's, are summed on the device.
            if tap is not None and on_host(tap) and i not in in_loops:
                tap = jax.device_put(tap, DEVICE)
            own.append(Param(i, leaf, x, tap, {}))
        # Of what is in host memory the backward pass stores nothing on the devices either.
        hosted = bool(self.trained) and any(leaf.hosted for leaf in self.leaves)
        evaluator = Evaluator(self.layout.recomputes or hosted)
        if self._in_pieces and not self._axes.are_named and self._is_scattered:
            with marking():
                pieces = pieces_of(self.layout, self.fn, closed, params, args, specs)
            if isinstance(pieces, str):
                self.pieces[:] = [DevicePiece("the loss", "", False, pieces)]
            else:
                evaluator = PiecesEvaluator(self.layout, pieces, self.pieces)
        outs = evaluator(closed, [*own, *jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    @property
    def _is_scattered(self) -> bool:
        """Whether something is gathered or scattered, in device memory."""
        is_hosted = any(leaf.hosted for leaf in self.leaves)
        return not is_hosted and any(leaf.is_sharded for leaf in self.leaves)

    def _type(self, leaf: GlobalRule, held: jax.Array) -> Any:
        """What the loss is traced with."""
        sharding = None
        if self._axes.are_named:
            mesh = jax.sharding.get_abstract_mesh()
            sharding = NamedSharding(mesh, only_axes(leaf.used, self._axes.axes))
        return jax.ShapeDtypeStruct(held.shape, leaf.dtype, sharding=sharding)


def loss_axes(layout: Layout) -> NamedAxes:
    """The axes that a loss may name in types."""
    # How jax rejects shardings in types, such as of out_sharding, reshard and closures.
    said = "AxisType.Auto", "the aval mesh", "should match the mesh passed to shard_map"
    return NamedAxes(layout.loss_axes, said)


def eval_global(spec: StepSpec, fn: Callable[..., Any], params: Tree, args: Any) -> Any:
    """What a function of parameters, a batch and perhaps a model state returns."""
    specs = spec.layout.batch_specs(args[0]), *jax.tree.map(lambda _: P(), args[1:])
    run = GlobalLoss(spec, fn, params, in_pieces=spec.layout.stage == 3)
    return run(jax.tree.leaves(params), [], args, specs)


# --- The step -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Batch:
    """The loss of the whole batch, and its derivative."""

    run: GlobalLoss
    loss: StepLoss
    params: list[jax.Array]  # as between steps
    arguments: Callable[..., tuple[Any, ...]]  # of the loss, of a model state and a micro-batch
    divides_first: bool  # before it is differentiated

    def zeros(self, dtype_of: Callable[[Any], Any] = lambda _: None) -> list[jax.Array]:
        """Taps of trained parameters; or, in their dtypes, sums of gradients."""
        both = zip(self.run.leaves, self.params, strict=True)
        return [leaf.full_tap(x.shape, dtype_of(x.dtype)) for leaf, x in both if leaf.trained]

    def total_loss(
        self, taps: list[jax.Array], args: tuple[Any, ...], model_state: Tree
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """The sum of the losses of a micro-batch; its weight, what divides it, and the rest."""
        specs = [self.run.layout.batch_specs(x) for x in args]
        if self.loss.model_state:
            specs[1] = jax.tree.map(lambda _: P(), model_state)
        out = self.run(self.params, taps, args, tuple(specs))
        total, weight, new, aux = self.loss.split(out, model_state)
        divisor = lax.stop_gradient(weight) if self.divides_first else 1.0
        divisor = jnp.asarray(divisor, total.dtype)
        return total * inverse_weight(divisor), (weight, divisor, new, aux)

    def microbatch(self, model_state: Tree, numbered: Any) -> tuple[Any, tuple[Sums, Any]]:
        """The model state after a micro-batch, its sums and its aux."""
        args = self.arguments(model_state, numbered)
        with jax.named_scope("loss_and_grad"):
            derivative = jax.value_and_grad(self.total_loss, has_aux=True)
            (total, more), grads = derivative(self.zeros(), args, model_state)
        weight, divisor, model_state, aux = more
        if self.divides_first:
            grads = [_by_layer(lambda g: to_sum_dtype(g) * to_sum_dtype(divisor), g) for g in grads]
        total = to_sum_dtype(total) * to_sum_dtype(divisor)
        return model_state, (Sums(total, jnp.asarray(weight, total.dtype), [], grads), aux)


def global_gradients(
    spec: StepSpec, loss: StepLoss, params: Tree, inputs: Inputs
) -> tuple[Any, dict[str, Any], Any]:
    """Gradients of the mean loss over a batch, its metrics, the new model state; in ``on_mesh``.

    Each device computes micro-batches of its own rows, as where it runs the loss by itself.
    """
    layout = spec.layout
    scatters = layout.stage >= (1 if loss.microbatches == 1 else 2)  # the gradients of each
    run = GlobalLoss(spec, loss.fn, params, in_pieces=scatters)
    each, arguments = split_rows(layout, loss, inputs)
    leaves = jax.tree.leaves(params)
    dtypes = (x.dtype for x, leaf in zip(leaves, run.leaves, strict=True) if leaf.trained)
    batch = _Batch(run, loss, leaves, arguments, spec.precision.divides_first(dtypes))

    def step(carry: Any, numbered: Any) -> Any:
        before, model_state = carry
        model_state, (sums, aux) = batch.microbatch(model_state, numbered)
        # Without the barrier XLA:TPU would reduce after the loop what is summed in it.
        sums = lax.optimization_barrier(sums)
        added = [
            _by_layer(functools.partial(_add_as_shard, layout, leaf), a, g)
            for leaf, a, g in zip(run.trained, before, sums.grads, strict=True)
        ]
        return (added, model_state), (sums._replace(grads=[]), aux)

    if loss.microbatches == 1:
        model_state, (sums, aux) = batch.microbatch(inputs.model_state, each)
    else:
        start = batch.zeros(spec.precision.of_accumulator), inputs.model_state
        (grads, model_state), (found, aux) = lax.scan(step, start, each)
        sums = jax.tree.map(lambda x: jnp.sum(x, 0), found)._replace(grads=grads)
        aux = join_rows(layout, inputs.batch, aux)

    scale, metrics = mean_metrics(loss, sums.loss, sums.weight, aux)
    in_order = iter(sums.grads)
    grads = []
    for x, leaf in zip(leaves, run.leaves, strict=True):
        dtype = spec.precision.of_result(x.dtype)
        scaled = lambda g, dtype=dtype: (g * scale).astype(dtype)  # noqa: E731
        zeros = functools.partial(jnp.zeros_like, dtype=x.dtype)
        grads.append(_by_layer(scaled, next(in_order)) if leaf.trained else _by_layer(zeros, x))
    return run.treedef.unflatten(grads), metrics, model_state


def _add_as_shard(layout: Layout, leaf: GlobalRule, total: jax.Array, grad: jax.Array) -> jax.Array:
    shard = leaf.of_slice(leaf.shard, total.ndim)
    return layout.constrain(total + grad.astype(total.dtype), shard)


def _by_layer(fn: Callable[..., jax.Array], *stacks: jax.Array) -> jax.Array:
    """A function of each element; of stacks in host memory it loads a layer at a time."""
    if not on_host(stacks[0]):
        return fn(*stacks)

    def one(_: None, layers: Any) -> tuple[None, jax.Array]:
        return None, jax.device_put(fn(*jax.device_put(layers, DEVICE)), HOST)

    return lax.scan(one, None, stacks)[1]


def mean_metrics(loss: StepLoss, total: Any, weight: Any, aux: Any, devices: int = 1) -> Any:
    """What sums over all micro-batches of some devices are multiplied by, and the metrics."""
    scale = inverse_weight(weight) if loss.weighted else 1.0 / (loss.microbatches * devices)
    metrics = {"loss": total * scale}
    metrics |= {"weight": weight} if loss.weighted else {}
    return scale, metrics | ({"aux": aux} if loss.has_aux else {})


def split_rows(layout: Layout, loss: StepLoss, inputs: Inputs) -> tuple[Any, Callable[..., Any]]:
    """The micro-batches, each of rows of every device, stacked if there are several.

    And the arguments of the loss, of a model state and a micro-batch.
    """
    steps, by_example = loss.microbatches, loss.rngs == "per_example"
    all_keys = microbatch_key(loss.rngs, inputs.key, 0, inputs.batch) if by_example else None

    def split(x: jax.Array) -> jax.Array:
        """(examples, ...) to (micro-batch, examples, ...)."""
        if not jnp.ndim(x):
            return jnp.full(steps, x)
        rows, more = x.shape[0] // (layout.num_devices * steps), x.shape[1:]
        x = x.reshape(layout.num_devices, steps, rows, *more).swapaxes(0, 1)
        spec = P(None, entry_of(layout.data_axes))
        return layout.constrain(x.reshape(steps, -1, *more), spec)

    def arguments(model_state: Tree, numbered: Any) -> tuple[Any, ...]:
        index, batch, keys = numbered
        if not by_example:
            keys = microbatch_key(loss.rngs, inputs.key, index, batch)
        return loss_args(loss, batch, model_state, keys)

    if steps == 1:
        return (jnp.zeros((), jnp.int32), inputs.batch, all_keys), arguments
    return (jnp.arange(steps), *jax.tree.map(split, (inputs.batch, all_keys))), arguments


def join_rows(layout: Layout, batch: Batch, aux: Tree) -> Any:
    """Undoes ``split_rows``; what is not one for each example is averaged."""
    size = next((x.shape[0] for x in jax.tree.leaves(batch) if jnp.ndim(x)), 0)

    def join(x: jax.Array) -> jax.Array:
        steps, more = x.shape[0], x.shape[2:]
        if x.ndim == 1 or x.shape[1] * steps != size:
            return jnp.mean(x, axis=0)
        x = x.reshape(steps, layout.num_devices, -1, *more).swapaxes(0, 1)
        return layout.constrain(x.reshape(size, *more), P(entry_of(layout.data_axes)))

    return jax.tree.map(join, aux)
