"""The loss of one device, and all-gather and reduce-scatter of parameters where it uses them.

It is traced once: what is made of shards alone stays sharded; what else it uses is gathered there,
at stage 3, in a loop over layers by ``Evaluator._scan`` in ``loss/_evaluate``, which asks the rules
of this file. ``gather`` in a loss marks places, or gathers handles. Layers that gather their
own parameters free them after their forward pass, and gather them again in the backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from optax_ext.equations import trace
from optax_ext.traced_graph import bind
from sharding._types import Tree
from sharding.collectives._reduce_scatter import (
    ArrayLayout,
    all_gather_arrays,
    reduce_scatter_arrays,
)
from sharding.loss._diverging import collective_in, diverging
from sharding.loss._evaluate import (
    MOVES,
    EquationRule,
    Evaluator,
    Fetch,
    Param,
    after_input,
    tapped,
    use,
)
from sharding.loss._marks import CALL, MARK, is_marking, marking
from sharding.matmuls._product import CodedWeight
from sharding.placement._layout import Layout
from sharding.placement._on_mesh import NamedAxes
from sharding.placement._specs import by_dim, is_spec, of_last_dims
from sharding.sync import RowMethod

# Operations on one array, and perhaps indices, whose results are parts of it.
PARTS = {"dynamic_slice", "slice", "split"}
# Operations on one array whose results hold it in another order, shape or dtype.
_MOVES = {*MOVES, "mesh_cast", "reshard", "rev", "sharding_constraint", "stop_gradient"}
# Of these and of PARTS, the parameter that has the size of the dim that devices have shards of.
_SIZES = {"dynamic_slice": "slice_sizes", "reshape": "new_sizes", "slice": "limit_indices"}


class DeviceLoss:
    """The traced loss of one device, of its shard of the batch; it may name the user's axes."""

    def __init__(
        self, layout: Layout, fn: Callable[..., Any], params: Tree, specs: Tree, args: Any
    ):
        """Traces ``fn(params, *args)`` of types; ``specs`` are those of ``params`` between steps.

        Raises:
          ValueError: if devices could wait for each other in a collective of the loss.
        """
        self.layout, self._axes = layout, NamedAxes(sorted(layout.other_axes), ("AxisType.Auto.",))
        self.types, treedef = jax.tree.flatten(params)
        self.specs = [layout.other_spec(s) for s in jax.tree.leaves(specs, is_leaf=is_spec)]

        def run(leaves: list[Any], args: Any) -> None:
            self.closed, results = trace(fn, treedef.unflatten(leaves), *args)
            self._results = jax.tree.structure(results)

        with marking(per_device=True):
            self._axes.run(run, (self.specs, PartitionSpec()), self.types, args, of_types=True)
        # What no output needs uses no parameter.
        every = [True] * len(self.closed.jaxpr.outvars)
        live = partial_eval.dce_jaxpr(self.closed.jaxpr, every, instantiate=True)[0]
        self.closed = ClosedJaxpr(live, self.closed.consts)
        varies = [i >= len(self.types) for i in range(len(live.invars))]
        self.apart = frozenset(diverging(live, varies, layout.data_axes))
        if collective := collective_in(live, self.apart):
            raise ValueError(
                f"the loss has a collective ({collective}, such as that of a BatchNorm with the "
                "statistics of all devices) in a branch or a loop that devices take by their own "
                "data: devices would exchange what does not belong together. Move it out of the "
                "branch (docs: understand/meaning)."
            )

    def evaluate(
        self,
        param: Callable[[int, jax.Array, jax.Array], Param | jax.Array],
        held: list[Any],
        taps: list[Any],
        args: Any,
        call: EquationRule,
    ) -> tuple[Any, list[Fetch]]:
        """What it returns for ``param(number, held, tap)`` of each; where it fetches them.

        ``call`` is the rule of ``with_handles``.
        """
        evaluator = Evaluator(self.layout.recomputes, equations={CALL: call})

        def run(held: list[Any], taps: list[Any], args: Any) -> list[Any]:
            params = map(param, range(len(held)), held, taps)
            return evaluator(self.closed, [*params, *jax.tree.leaves(args)])

        leaves = self._axes.run(run, (self.specs, self.specs, PartitionSpec()), held, taps, args)
        return jax.tree.unflatten(self._results, leaves), evaluator.fetches

    def is_early(self, fetch: Fetch) -> bool:
        """Whether more is fetched than is used: before a branch, or by an index of this device."""
        eqn = fetch.eqn
        by_device = id(eqn) in self.apart and eqn.primitive.name in PARTS
        return by_device or fetch.encloses_mark


class DeviceRule(NamedTuple):
    """One parameter, or a view of it, on one device: of the loss of a device, or in a piece."""

    layout: Layout
    # Of what a device holds a shard of: the sharded dim, counted from the end, as loops over layers
    # take dims off the front.
    dim: int
    dtype: Any  # in which the loss gets it
    loss_dtype: Any  # of the parameter in the loss, before views cast it
    gathers: bool = False  # whether devices hold shards
    entries: tuple[Any, ...] = ()  # per dim, the entry of the spec on the user's axes of the mesh
    bits: int | None = None  # of the codes that a matrix is gathered in; None: as it is
    reduce_dtype: Any = None  # in which its gradient is summed over devices; None if it is later
    reduce_axes: tuple[str, ...] = ()  # over which it is
    # ``sync(gradient, dim)``, a gradient sync's own in place of the reduce-scatter.
    sync: Callable[[jax.Array, int], jax.Array] | None = None
    rows: RowMethod | None = None  # the sync of rows that were looked up, if there is one
    apart: frozenset[int] = frozenset()  # ids of equations by which devices go apart
    is_part: bool = False  # whether it is a view, made of shards
    in_piece: bool = False  # of a partitioned loss
    by_use: bool = False
    again: bool = False  # of layers with numbers

    def full_shape(self, held: jax.Array) -> tuple[int, ...]:
        """The shape of what is fetched."""
        shape = list(held.shape)
        if self.gathers and self.dim and -self.dim <= len(shape):
            shape[self.dim] *= self.layout.num_shards
        return tuple(shape)

    def _array_layout(self, x: jax.Array) -> ArrayLayout:
        spec = of_last_dims(self.entries, x.ndim)
        both = zip(by_dim(spec, x.ndim), x.shape, strict=True)
        entries = [entry if size > 1 else None for entry, size in both]
        return ArrayLayout(self.dim, PartitionSpec(*entries))

    # --- What crosses the wire --------------------------------------------------------------------

    def _gathered(self, x: jax.Array) -> jax.Array:
        return all_gather_arrays(self.layout, [x], [self._array_layout(x)], self.bits)[0]

    def fetch(self, held: jax.Array) -> jax.Array:
        """The unsharded parameter."""
        if not self.gathers:
            return held.astype(self.loss_dtype).astype(self.dtype)
        with jax.named_scope("gather"):
            cast = lax.stop_gradient(held).astype(self.loss_dtype).astype(self.dtype)
            return self._gathered(cast)

    def codes(self, x: Param, product: CodedWeight) -> tuple[jax.Array, ...] | None:
        """Zeros, which get the gradient; codes of shards, gathered, and scales of all of it."""
        moved = _made_of_held(x) if self.gathers and not self.bits else None
        rule = self if moved is None else moved.rule
        if moved is None or not rule.dim or rule in x.fetched:
            return None
        with jax.named_scope("gather"):
            held = lax.stop_gradient(moved.held).astype(rule.loss_dtype).astype(rule.dtype)
            by_shard = product.has_scales_along(rule.dim % held.ndim)
            of_all = None if by_shard else functools.partial(lax.pmax, axis_name=rule.layout.axes)
            codes, scale, seen = product.encode(moved.moved(held), of_all)
            codes, scale = rule._gathered(codes), rule._gathered(scale) if by_shard else scale
        zeros = jnp.zeros(rule.full_shape(held), rule.dtype)
        return moved.moved(tapped(rule, zeros, moved.tap)), codes, scale, seen

    def reduce(self, grad: jax.Array, tap: Any) -> jax.Array:
        """This device's shard of the gradient, or, if it is reduced later, all of it."""
        if self.reduce_dtype is None:
            return grad.astype(tap.dtype)
        with jax.named_scope("reduce_scatter"):
            grad = grad.astype(self.reduce_dtype)
            if self.sync:
                return self.sync(grad, self.dim).astype(tap.dtype)
            if self.in_piece and self.layout.platform == "tpu":
                # XLA:TPU lets some products transpose what they return, and then all-reduces it.
                grad = lax.optimization_barrier(grad)
            arrays = [self._array_layout(grad)]
            (shard,) = reduce_scatter_arrays(self.layout, self.reduce_axes, [grad], arrays)
            return shard.astype(tap.dtype)

    # --- What is made of shards -------------------------------------------------------------------

    def view(self, x: Param, eqn: Any, rest: list[Any]) -> list[Param] | None:
        """Parts of a parameter, its elements in another order, casts to fewer bytes."""
        name = eqn.primitive.name
        if name in PARTS:
            moved = _made_of_held(x)
            return moved and moved.rule._of_shards(eqn, moved, rest)
        if name == "convert_element_type" and not x.moves:
            old, new = jnp.dtype(self.dtype), jnp.dtype(eqn.params["new_dtype"])
            floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (old, new))
            if floating and new.itemsize < old.itemsize:
                return [x._replace(rule=self._replace(dtype=new))]  # less is gathered
        if name not in _MOVES:
            return None
        # What a loop or an index has sliced off has no other uses.
        views = self._of_shards(eqn, x, rest) if self.is_part and not x.moves else None
        return views or [x.moved_by(eqn)]

    def stack(self, x: Param) -> Param | None:
        moved = _made_of_held(x)
        return moved if moved and moved.rule.dim != -moved.held.ndim else None

    def layer(self, x: Param) -> Param:
        return x._replace(in_layer=True)

    def _of_shards(self, eqn: Any, x: Param, rest: list[Any]) -> list[Param] | None:
        """The results of a view, made of what is held; None if shards of it are no views."""
        dim = self._dim_in_view(eqn, self.full_shape(x.held))
        # Devices have shards of one slice; in a piece an index may be that of a row.
        if dim is None or id(eqn) in self.apart or (self.in_piece and rest):
            return None

        def of_shard(array: jax.Array) -> Sequence[jax.Array]:
            options, key = dict(eqn.params), _SIZES.get(eqn.primitive.name)
            if self.dim and key:
                sizes = list(options[key])
                sizes[dim] = array.shape[self.dim]
                options[key] = tuple(sizes)
            return bind(eqn, [array, *rest], options)

        held = of_shard(x.held)
        taps = [None] * len(held) if x.tap is None else of_shard(x.tap)
        part = x._replace(rule=self._replace(dim=dim, is_part=True))
        return [part.of_held(*both) for both in zip(held, taps, strict=True)]

    def _dim_in_view(self, eqn: Any, shape: tuple[int, ...]) -> int | None:
        """The sharded dim of a view of an array of a shape; None for what is no view of shards.

        Dims that other axes shard have to stay what and where they are.
        """
        name, options, dims = eqn.primitive.name, eqn.params, list(range(len(shape)))
        # For each dim of the result the unchanged dim that it is: shards of a view are views of
        # shards.
        same: list[int | None]
        match name:
            case "sharding_constraint" | "stop_gradient":
                same = [*dims]
            case "reshape":  # several dims of the first one, for loops within loops
                new, others = options["new_sizes"], len(shape) - 1
                splits = 0 < others < len(new) and new[len(new) - others :] == shape[1:]
                if not splits or options["sharding"]:
                    return None
                same = [*[None] * (len(new) - others), *dims[1:]]
            case "transpose":
                same = [*options["permutation"]]
            case "squeeze":
                same = [d for d in dims if d not in options["dimensions"]]
            case "slice":
                ends = zip(options["start_indices"], options["limit_indices"], strict=True)
                full = [start == 0 and end == shape[d] for d, (start, end) in enumerate(ends)]
                strides = options["strides"] or [1] * len(shape)
                same = [d if full[d] and strides[d] == 1 else None for d in dims]
            case "dynamic_slice":
                same = [d if options["slice_sizes"][d] == shape[d] else None for d in dims]
            case "rev":
                same = [None if d in options["dimensions"] else d for d in dims]
            case "split":
                same = [None if d == options["axis"] else d for d in dims]
            case _:
                return None

        def place(dim: int) -> int | None:
            found = len(shape) + dim
            return same.index(found) - len(same) if found in same else None

        named = [d - len(self.entries) for d, entry in enumerate(self.entries) if entry]
        if any(place(d) != d for d in named if -d <= len(shape)):
            return None
        return place(self.dim) if self.dim else 0


def _made_of_held(x: Param) -> Param | None:
    """A parameter whose moves, but for casts, are made of what is held; None if they cannot."""
    casts = tuple(e for e in x.moves if e.primitive.name == "convert_element_type")
    for eqn in x.moves:
        if eqn not in casts:
            views = x.rule._of_shards(eqn, x, [])
            if views is None:
                return None
            (x,) = views
    return x._replace(moves=casts)


# --- In a loss ------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ParamHandle:
    """A parameter for ``gather`` or ``lookup``: it has a shape and a dtype, but is no array.

    Attributes:
      held: the parameter as this device holds it: a shard at stage 3, else unsharded.
      tap: zeros, of the shape and the dtype of this device's part of the gradient: what is
        differentiated in place of the parameter.
      rule: how it is gathered, and its gradient reduced.
    """

    held: jax.Array
    tap: jax.Array
    rule: DeviceRule = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unsharded parameter."""
        return self.rule.full_shape(self.held)

    @property
    def dtype(self) -> Any:
        """The dtype of the parameter as the loss sees it."""
        return self.rule.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.held.ndim


def gather(tree: Tree) -> Any:
    """The tree with every handle gathered; the gradient is reduce-scattered in the backward pass.

    Arrays are marked, in a loss that is traced to run with parameters that are gathered there.
    """

    def gather_one(x: Any) -> Any:
        if isinstance(x, ParamHandle):
            if -x.rule.dim > x.ndim:
                raise ValueError(
                    f"a parameter of shape {x.held.shape} is sharded along a dim that a loop over "
                    "layers slices off. Name the data axis on another dim of it in param_specs."
                )
            return use(x.rule, x.held, x.tap)
        marked = is_marking() and isinstance(x, jax.Array | np.ndarray)
        return checkpoint_name(x, MARK) if marked else x

    return jax.tree.map(gather_one, tree, is_leaf=lambda x: isinstance(x, ParamHandle))


# --- Layers that gather their own parameters, and free them after their forward pass --------------


def gathered(
    fn: Callable[..., Any], policy: Callable[..., bool] | None, reshard: bool
) -> Callable[..., Any]:
    """``fn(params, ...)`` that gathers its parameters, with ``reshard`` again in backward."""

    @functools.wraps(fn)
    def call(params: Tree, *args: Any, **kwargs: Any) -> Any:
        if not (is_marking() and reshard):
            return fn(gather(params), *args, **kwargs)
        # Leaves that are no arrays, such as functions in a module that is a pytree, stay outside.
        own, join_params = split_arrays(params)
        arrays, join_args = split_arrays((args, kwargs))

        def run(own: list[Any], arrays: list[Any]) -> Any:
            own, arrays = after_input(own, arrays)
            args, kwargs = join_args(arrays)
            return fn(gather(join_params(own)), *args, **kwargs)

        return jax.checkpoint(run, policy=policy)(own, arrays)

    return call


def split_arrays(tree: Tree) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a tree, and a function that puts new ones in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

    def join(arrays: list[Any]) -> Any:
        new = dict(zip(places, arrays, strict=True))
        return treedef.unflatten([new.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], join
