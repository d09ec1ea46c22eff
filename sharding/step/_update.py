"""The optimizer step on shards: ``tx`` gets global arrays, so that a clip sees the global norm."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_ext import kernels
from sharding._jaxprs import all_equations, inputs_read
from sharding._types import Array, OptState, Tree
from sharding.collectives._dtypes import to_sum_dtype
from sharding.offload._host_update import updated_on_host
from sharding.offload._transformation import streamed
from sharding.placement._layout import Layout, Placement
from sharding.step._gather_updated import gather_updated
from sharding.step._kernel_shards import KernelShards
from sharding.step._precision import Precision
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


def shard_update(layout: Layout, placed: Placement, tx: Any) -> Callable[..., tuple[Any, Any]]:
    """A function of gradients, state and shards, and of extra arguments: ``arrays``, and others."""
    update_params = params_update(tx)

    def advance(arrays: Any, grads: Tree, opt_state: OptState, shards: Tree, **numbers: Any) -> Any:
        with kernels.kernels_on(KernelShards(layout, shards, placed.shards)):
            return update_params(grads, opt_state, shards, **numbers | arrays)

    return advance


def update(
    layout: Layout,
    spec: StepSpec,
    opt_specs: Tree,
    state: Tree,
    grads: Tree,
    transform: Callable[..., tuple[Any, Any]],
    shards: Tree = None,
) -> Any:
    """A train state after one step: the shards are updated, then the parameters gathered.

    The transformation sees arrays with their global shapes; the partitioner inserts the sums over
    shards. Untrained parameters stay unchanged. Runs inside ``on_mesh``. ``opt_specs`` place the
    optimizer state, ``spec.placed.shards`` the ``grads``. ``transform`` is the ``shard_update``
    with its extra arguments; ``shards`` are those of the parameters, if they are taken already.
    """
    placed = spec.placed
    params, opt_state = state if isinstance(state, tuple) else (state.params, state.opt_state)
    with jax.named_scope("update"):
        shards = layout.constrain(params if shards is None else shards, placed.shards)
        grads = layout.constrain(grads, placed.shards)

        def advance(shards: Tree, opt_state: OptState) -> tuple[Any, Any]:
            shards, opt_state = transform(grads, opt_state, shards)
            return shards, layout.constrain(opt_state, opt_specs)

        # Offloaded state streams through the device, or stays where it is.
        if layout.update_on == "host":
            shards, opt_state = updated_on_host(advance, shards, opt_state, layout)
        else:
            specs = (placed.shards, opt_specs)
            shards, opt_state = streamed(advance, shards, opt_state, grads, specs)
    with jax.named_scope("gather_params"):
        new = layout.constrain(shards, placed.shards)
        if layout.stage in (1, 2):
            new = gather_updated(layout, new, params, placed, spec.trained)
        new = layout.constrain(new, placed.params)
        params = jax.tree.map(lambda t, x, old: x if t else old, spec.trained, new, params)
    if isinstance(state, tuple):
        return (params, opt_state)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)


def global_norm(layout: Layout, grads: Tree, placed: Placement) -> jax.Array:
    """The norm of all gradients together, in float32 or wider; inside ``on_mesh``."""
    with jax.named_scope("grad_norm"):
        grads = layout.constrain(grads, placed.shards)
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
    "which view='global' and update='backward' do not have. Use view='device' and update='after', "
    "or leave out gradient_noise_scale."
)


def update_traits(
    transform: Any, params: Tree, opt_state: OptState, precision: Precision, trained: Tree
) -> UpdateTraits:
    """Traces a ``shard_update`` for arguments of the types that it will get, in device memory."""
    leaves = jax.tree.leaves((params, opt_state))
    place = jax.typeof(leaves[0]).sharding.update(spec=PartitionSpec()) if leaves else None

    def like(x: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=place)

    grads = jax.tree.map(
        lambda x, t: like(x, precision.of_result(x.dtype) if t else None), params, trained
    )
    arrays = UNREAD | {"value": like(np.float32(0))}  # in the order of their names
    jaxpr = transform.trace(arrays, grads, *jax.tree.map(like, (opt_state, params))).jaxpr.jaxpr
    return UpdateTraits(inputs_read(jaxpr)[0], any(map(_reduces, all_equations(jaxpr))))


def _reduces(eqn: Any) -> bool:
    """Whether an equation makes arrays smaller: a sum, a largest element, a product of matrices."""
    name = eqn.primitive.name
    is_sum = name.startswith("reduce_") and any(x.aval.ndim for x in eqn.invars)
    return is_sum or name == "dot_general"
