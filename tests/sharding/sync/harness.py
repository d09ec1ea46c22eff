"""Runs a gradient sync on virtual devices, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding import sync

from .traces import gradients


def mesh_of(num, name="data"):
    return jax.make_mesh((num,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:num])


class SyncRunner:
    """A gradient sync between devices, and its state.

    Args:
      method: a ``GradientSync``.
      shapes: of the gradients, by name.
      num: the number of devices.
      dims: along which dims means are sharded, by name; None for an all-reduce.
      dtype: of the gradients.
    """

    def __init__(self, method, shapes, num, dims=None, dtype=jnp.float64):
        params = {k: jnp.zeros(s, dtype) for k, s in shapes.items()}
        self.state = sync.transformation(method, "data", num).init(params)
        self.dtype = dtype

        def run(grads, state):
            grads, state = (jax.tree.map(lambda x: x[0], tree) for tree in (grads, state))
            if dims is None:
                out, new = method.all_reduce(grads, state, "data")
                out = jax.tree.map(lambda x: x[None], out)  # (devices, ...)
            else:
                out, new = method.reduce_scatter(grads, state, "data", dims)
            return out, jax.tree.map(lambda x: x[None], new)

        out = P("data")
        if dims is not None:
            ndims = {k: len(s) for k, s in shapes.items()}
            out = {k: P(*[None] * (ndims[k] + d), "data") if d else P() for k, d in dims.items()}
        self.mapped = jax.shard_map(
            run,
            mesh=mesh_of(num),
            in_specs=(P("data"), P("data")),
            out_specs=(out, P("data")),
            check_vma=False,
        )
        self._jitted = jax.jit(self.mapped)

    def __call__(self, grads):
        """The means of gradients (devices, ...) by name; advances the state.

        Asserts that all devices have the same bits of full means.
        """
        out, self.state = self._jitted(
            {k: jnp.asarray(g, self.dtype) for k, g in grads.items()}, self.state
        )
        out = {k: np.asarray(x) for k, x in out.items()}
        for k, x in out.items():
            if x.ndim == grads[k].ndim:
                np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
                out[k] = x[0]
        return out

    def state_of(self, name):
        """The state of one array, (devices, ...)."""
        return jax.tree.map(np.asarray, self.state.arrays[name])


def stacked(step, shapes, num):
    """Gradients of all devices, (devices, ...) by name."""
    each = [gradients(step, i, shapes) for i in range(num)]
    return {k: np.stack([own[k] for own in each]) for k in shapes}
