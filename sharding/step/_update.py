"""The optimizer step on shards: ``tx`` gets global arrays, so that a clip sees the global norm."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_ext import kernels
from sharding._jaxprs import all_equations, inputs_read
from sharding._types import Array, OptState, Tree
from sharding.collectives._reduce_scatter import gather_axis_groups
from sharding.collectives._sum_dtype import to_sum_dtype
from sharding.offload._host_update import updated_on_host
from sharding.offload._transformation import streamed
from sharding.placement._layout import GATHERED_LAYERS, Layout
from sharding.placement._on_mesh import over_data_axes
from sharding.placement._specs import is_spec
from sharding.step._step_plan import StepSpec


def params_update(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """A function of gradients, state, parameters, and extra arguments: new parameters and state."""
    run, update_params = optax.with_extra_args_support(tx).update, kernels.update_params_of(tx)
    if update_params is not None:
        return update_params

    def advance(grads: Tree, opt_state: OptState, params: Tree, **extra_args: Any) -> Any:
        updates, opt_state = run(grads, opt_state, params, **extra_args)
        return optax.apply_updates(params, updates), opt_state

    return advance


def shard_update(spec: StepSpec, tx: Any) -> Callable[..., tuple[Any, Any]]:
    """A function of gradients, state and shards, and of extra arguments: ``arrays``, and others."""
    update_params = params_update(tx)

    def advance(arrays: Any, grads: Tree, opt_state: OptState, shards: Tree, **numbers: Any) -> Any:
        with kernels.kernels_on(KernelShards(spec.layout, shards, spec.placed.shards)):
            return update_params(grads, opt_state, shards, **numbers | arrays)

    return advance


def update(
    spec: StepSpec, state: Tree, grads: Tree, transform: Callable[..., Any], shards: Tree = None
) -> Any:
    """A train state after one step: the shards are updated, then the parameters gathered.

    The transformation sees arrays with their global shapes; the partitioner inserts the sums over
    shards. Untrained parameters stay unchanged. Runs inside ``on_mesh``. ``grads`` are placed as
    ``spec.placed.shards``. ``transform`` is the ``shard_update`` with its extra arguments;
    ``shards`` are those of the parameters, if they are taken already.
    """
    layout, placed = spec.layout, spec.placed
    params, opt_state = state if isinstance(state, tuple) else (state.params, state.opt_state)
    with jax.named_scope("update"):
        shards = layout.constrain(params if shards is None else shards, placed.shards)
        grads = layout.constrain(grads, placed.shards)

        def advance(shards: Tree, opt_state: OptState) -> tuple[Any, Any]:
            shards, opt_state = transform(grads, opt_state, shards)
            return shards, layout.constrain(opt_state, spec.opt_specs)

        # Offloaded state streams through the device, or stays where it is.
        if layout.update_on == "host":
            shards, opt_state = updated_on_host(advance, shards, opt_state, layout)
        else:
            specs = (placed.shards, spec.opt_specs)
            shards, opt_state = streamed(advance, shards, opt_state, grads, specs)
    with jax.named_scope("gather_params"):
        new = layout.constrain(shards, placed.shards)
        if layout.stage in (1, 2):
            new = gather_updated(spec, new, params, spec.trained)
        new = layout.constrain(new, placed.params)
        params = jax.tree.map(lambda t, x, old: x if t else old, spec.trained, new, params)
    if isinstance(state, tuple):
        return (params, opt_state)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)


def global_norm(spec: StepSpec, grads: Tree) -> jax.Array:
    """The norm of all gradients together, in float32 or wider; inside ``on_mesh``."""
    with jax.named_scope("grad_norm"):
        grads = spec.layout.constrain(grads, spec.placed.shards)
        floating = [g for g in jax.tree.leaves(grads) if jnp.issubdtype(g.dtype, jnp.inexact)]
        return optax.tree.norm([to_sum_dtype(g) for g in floating])


class UpdateTraits(NamedTuple):
    """Traits of the update of a transformation."""

    local_norm: bool  # whether it depends on its argument ``local_squared_norm``
    # Whether it reduces arrays, as the norm of a clip and the means of CAME do. Under ZeRO these
    # sums are over all devices: no parameter is updated before the last gradient is there.
    sums: bool


# The argument of an update that does not depend on it, and what is raised if one does.
UNREAD: dict[str, Any] = {"local_squared_norm": np.float32(0)}
NO_LOCAL_NORM = (
    "the transformation reads local_squared_norm, the norms of the gradients of single devices, "
    "which update='backward' does not have. Use update='after', or leave out gradient_noise_scale."
)


def update_traits(spec: StepSpec, tx: Any, params: Tree, opt_state: OptState) -> UpdateTraits:
    """Traces a ``shard_update`` for arguments of the types that it will get, in device memory."""
    leaves = jax.tree.leaves((params, opt_state))
    place = jax.typeof(leaves[0]).sharding.update(spec=PartitionSpec()) if leaves else None

    def like(x: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place)

    grads = jax.tree.map(
        lambda x, t: like(x, spec.precision.of_result(x.dtype) if t else None), params, spec.trained
    )
    arrays = UNREAD | {"value": like(np.float32(0))}  # in the order of their names
    with users_update():
        jaxpr = tx.trace(arrays, grads, *jax.tree.map(like, (opt_state, params))).jaxpr.jaxpr
    return UpdateTraits(inputs_read(jaxpr)[0], any(map(_reduces, all_equations(jaxpr))))


@contextlib.contextmanager
def users_update() -> Iterator[None]:
    """Says what an update gets, where it fails since it needs other arguments."""
    try:
        yield
    except TypeError as error:
        raise ValueError(
            "tx.update gets gradients, state, parameters, and the loss as value=, and failed: "
            f"{str(error).rstrip('.')}. A step cannot give the loss as a function, value_fn, to a "
            "line search: use another optimizer, such as optax.lbfgs(1e-3, linesearch=None)."
        ) from error


def _reduces(eqn: Any) -> bool:
    """Whether an equation makes arrays smaller: a sum, a largest element, a product of matrices."""
    name = eqn.primitive.name
    is_sum = name.startswith("reduce_") and any(x.aval.ndim for x in eqn.invars)
    return is_sum or name == "dot_general"


# --- Kernels on the shards of each device ---------------------------------------------------------


class KernelShards(kernels.Shards):
    """How parameters are sharded on a mesh."""

    def __init__(self, layout: Layout, params: Tree, specs: Tree):
        self.layout = layout
        leaves = jax.tree.leaves_with_path(specs, is_leaf=is_spec)
        self.specs: dict[kernels.Path, PartitionSpec] = dict(leaves)
        self._shapes = {p: x.shape for p, x in jax.tree.leaves_with_path(params)}

    def shape_of(self, path: kernels.Path, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the shape of a shard; None if there is no such parameter of this shape."""
        if self._shapes.get(path) != shape:
            return None
        return NamedSharding(self.layout.mesh, self.specs[path]).shard_shape(shape)

    def run(
        self,
        path: kernels.Path,
        fn: Callable[..., list[jax.Array]],
        operands: Sequence[jax.Array],
        dims: Sequence[tuple[int, ...]],
        result_dims: Sequence[tuple[int, ...]],
    ) -> list[jax.Array]:
        """Calls a function of one device's arrays on all; ``dims`` are those of the parameter."""
        entries = self.specs[path]

        def spec(of: tuple[int, ...]) -> PartitionSpec:
            return PartitionSpec(*(entries[d] if d < len(entries) else None for d in of))

        specs = tuple(map(spec, dims)), list(map(spec, result_dims)), self.layout.mesh.axis_names
        return over_data_axes(self.layout, fn, *specs)(*operands)


# --- The gather of updated parameters, group by group ---------------------------------------------


class _Updated(NamedTuple):
    """A sharded parameter between its update and its gather."""

    old: jax.Array
    shard: jax.Array
    shard_spec: PartitionSpec
    spec: PartitionSpec
    dim: int


def gather_updated(spec: StepSpec, shards: Tree, old: Tree, trained: Tree) -> Tree:
    """The trained parameters, gathered group by group into the memory of the old ones.

    Runs on global arrays, inside ``on_mesh``. A compiler for GPUs would gather all
    before it copies the first one, and hold the parameters twice: here each group waits until the
    one before it is in place.
    """
    layout, placed = spec.layout, spec.placed
    new, treedef = jax.tree.flatten(old)
    columns = map(treedef.flatten_up_to, (shards, placed.shards, placed.params, placed.dims))
    leaves = [_Updated(*fields) for fields in zip(new, *columns, strict=True)]
    sharded: dict[int, int] = {}  # bytes
    for i, choice in enumerate(treedef.flatten_up_to(trained)):
        if choice and leaves[i].dim:
            sharded[i] = leaves[i].old.nbytes
        elif choice:
            new[i] = leaves[i].shard
    group: list[int] = []
    for following in _gather_groups(layout, sharded):
        xs = [leaves[i].shard for i in following]
        if group:
            xs, done = jax.lax.optimization_barrier((xs, [new[i] for i in group]))
            for i, full in zip(group, done, strict=True):
                new[i] = full
        for i, x in zip(following, xs, strict=True):
            new[i] = _gather_into_old(layout, leaves[i]._replace(shard=x))
        group = following
    return treedef.unflatten(new)


def _gather_groups(layout: Layout, sizes: dict[int, int]) -> Iterator[list[int]]:
    """Consecutive parameters, of as many bytes together as a group has at most, or one alone."""
    group: list[int] = []
    total = 0
    for i, size in sizes.items():
        if group and total + size > layout.gather_group_bytes:
            yield group
            group, total = [], 0
        group.append(i)
        total += size
    if group:
        yield group


def _gather_into_old(layout: Layout, leaf: _Updated) -> jax.Array:
    """One parameter; a stack is gathered and stored some layers at a time, unless it is small.

    The compiler stores transposed what it gathers along another dim than the first, at the end.
    """
    old, x, shard_spec, spec, dim = leaf
    small = old.nbytes <= layout.gather_group_bytes // 8
    gather = functools.partial(gather_shard, layout, shard_spec=shard_spec, spec=spec)
    if small or x.ndim < 3 or dim == -x.ndim or shard_spec[0]:
        return gather(x)

    def gather_layers(first: Any, num: int, full: jax.Array) -> jax.Array:
        # One by one: for several the compiler would transpose the full stack.
        for i in range(num):
            layer = jax.lax.dynamic_slice_in_dim(x, first + i, 1)
            layer = gather(layout.constrain(layer, shard_spec))
            full = jax.lax.dynamic_update_slice_in_dim(full, layer, first + i, 0)
        return full

    num = x.shape[0]
    at_once = max(1, min(num * layout.gather_group_bytes // old.nbytes, GATHERED_LAYERS))
    full = jax.lax.fori_loop(
        0, num // at_once, lambda i, full: gather_layers(i * at_once, at_once, full), old
    )
    return gather_layers(num - num % at_once, num % at_once, full)


def gather_shard(
    layout: Layout, x: jax.Array, shard_spec: PartitionSpec, spec: PartitionSpec
) -> jax.Array:
    """An array with a spec, from its shards."""
    remaining = list(layout.axes)
    for axes in gather_axis_groups(layout)[:-1]:
        remaining = [axis for axis in remaining if axis not in axes]
        x = layout.constrain(x, layout.keep_axes(shard_spec, remaining))
    return layout.constrain(x, spec)
