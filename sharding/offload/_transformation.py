"""Optimizer state in the host's memory."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext.schedule import Graph, run_by_leaf
from sharding.offload._stream import HOST, Streamed, on_host
from sharding.placement._specs import is_spec

KIND = "pinned_host"


def offload(
    inner: optax.GradientTransformation, *, min_size: int = 4096
) -> optax.GradientTransformationExtraArgs:
    """Keeps the state of any transformation in the host's memory, and streams it in each step.

    The update is that of ``inner``. What one parameter's update needs is brought to the device, and
    has gone back before what the next but one needs is brought, so that about three parameters'
    state is there at a time. Stacks of layers (three or more along the first dim, of 2**18 elements
    or more each) go layer by layer, if ``inner`` treats each layer by itself; a sum over the
    whole stack makes them go whole.

    For use inside ``jit`` on one device, or on arrays that are cut along other dims than a
    stack's first. With ``Zero`` use ``Zero(offload="optimizer")``, which knows how arrays are cut.
    Arrays return to the memory they come from. A jitted step to which the state is donated must be
    told all ``in_shardings`` and ``out_shardings``: without, JAX (0.10 to 0.12) may write a result
    of the device where an array of the host of the same shape was, and abort.

    Args:
      inner: any transformation, such as a ``low_precision_state`` (8 bits: a quarter of the
        traffic).
      min_size: arrays of fewer elements stay on the device.

    Returns:
      A ``GradientTransformation`` that takes what ``inner`` takes.

    Raises:
      ValueError: if the devices have no ``pinned_host`` memory.

    Warns:
      UserWarning: if every parameter's update needs most of the state, as after a clip by global
        norm behind the moments: then all of it is on the device at once.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sharding as shd
      >>> tx = shd.offload(optax.adam(1e-3))
      >>> params = {"w": jnp.ones((64, 128)), "b": jnp.zeros(128)}
      >>> state = tx.init(params)
      >>> state[0].mu["w"].sharding.memory_kind, state[0].mu["b"].sharding.memory_kind
      ('pinned_host', 'device')
      >>> at, home = jax.tree.map(lambda x: x.sharding, (params, state))
      >>> places = {"in_shardings": (at, home, at), "out_shardings": (at, home)}
      >>> step = jax.jit(tx.update, donate_argnums=1, **places)
      >>> updates, state = step(params, state, params)
      >>> state[0].mu["w"].sharding.memory_kind
      'pinned_host'

    References:
      Ren, Rajbhandari, Aminabadi, Ruwase, Yang, Zhang, Li, He: ZeRO-Offload: Democratizing
      Billion-Scale Model Training, USENIX ATC 2021, arXiv 2101.06840.
    """
    inner = optax.with_extra_args_support(inner)

    def put(x: Any) -> Any:
        if not is_large(x, min_size):
            return x
        if isinstance(x, jax.core.Tracer):
            return jax.device_put(x, HOST)
        return jax.device_put(x, _on_host(x.sharding))

    def init(params: optax.Params) -> optax.OptState:
        return jax.tree.map(put, inner.init(params))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        return streamed(
            lambda updates, state: inner.update(updates, state, params, **extra_args),
            updates,
            state,
            after=updates,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def streamed(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    tree: Any,
    state: Any,
    after: Any,
    specs: Any = None,
) -> tuple[Any, Any]:
    """``fn(tree, state)``, a new tree and a new state, streaming what of the state is on the host.

    Args:
      fn: the function; sees all arrays as on the device.
      tree: parameters, or updates: what comes after the other.
      state: the state.
      after: gradients; nothing is loaded before they are there.
      specs: how both lie on the mesh; None for not known.
    """
    if not any(map(on_host, jax.tree.leaves(state))):
        return fn(tree, state)
    free: list[bool] | None = None
    if specs is not None:
        free = [not spec or spec[0] is None for spec in jax.tree.leaves(specs, is_leaf=is_spec)]

    def make_run(graph: Graph, inputs: list[Any]) -> Streamed:
        return Streamed(graph, inputs, jax.tree.leaves(after), lambda i: free is None or free[i])

    # Only operations that machines have in common can be done layer by layer.
    return run_by_leaf(fn, tree, state, on_host, make_run, simple=True)


def is_large(x: Any, min_size: int) -> bool:
    """Whether an array is moved."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return not is_key and math.prod(x.shape) >= min_size


def host_shardings(shardings: Any, tree: Any, min_size: int) -> Any:
    """Shardings of a tree with its large arrays in the host's memory."""
    return jax.tree.map(
        lambda sharding, x: _on_host(sharding) if is_large(x, min_size) else sharding,
        shardings,
        tree,
    )


def _on_host(sharding: Any) -> Any:
    moved = sharding.with_memory_kind(KIND)
    if moved.memory_kind != KIND:
        kinds = sorted({d.device_kind for d in sharding.device_set})
        raise ValueError(
            f"offload needs devices with {KIND} memory, got {', '.join(kinds)}. GPUs that are "
            "only compiled for do not tell of theirs; a real one does."
        )
    return moved
