"""Runs an exchange on virtual devices, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding import sync

from .traces import gradients


def mesh_of(num, name="data"):
    return jax.make_mesh((num,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:num])


class Exchange:
    """An exchange between devices, and its state.

    Args:
      exchange: a ``GradientSync``.
      shapes: of the gradients, by name.
      num: of devices.
      dims: along which dims pieces are cut; None for whole means.
    """

    def __init__(self, exchange, shapes, num, dims=None, dtype=jnp.float64):
        params = {k: jnp.zeros(s, dtype) for k, s in shapes.items()}
        self.state = sync.transformation(exchange, "data", num).init(params)
        self.dtype = dtype

        def run(grads, state):
            own, kept = (jax.tree.map(lambda x: x[0], tree) for tree in (grads, state))
            if dims is None:
                out, new = exchange.all_reduce(own, kept, "data")
                out = jax.tree.map(lambda x: x[None], out)  # of every device
            else:
                out, new = exchange.reduce_scatter(own, kept, "data", dims)
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
        """Of every device's gradients, (devices, ...) by name, what comes out; the state advances.

        Whole means are compared: all devices must have the same bits.
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

    def kept(self, name):
        """An array's state, (devices, ...)."""
        return jax.tree.map(np.asarray, self.state.arrays[name])


def stacked(step, shapes, num):
    """Gradients of all devices, (devices, ...) by name."""
    each = [gradients(step, i, shapes) for i in range(num)]
    return {k: np.stack([own[k] for own in each]) for k in shapes}
