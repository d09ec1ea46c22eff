"""Runs a gradient sync on virtual devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import sync

from ..model import mesh_of


class SyncRunner:
    """A gradient sync between devices, and its state.

    Args:
      method: a ``GradientSync``.
      shapes: of the gradients, by name.
      num: the number of devices.
      dims: along which dims means are sharded, by name; None for an all-reduce.
      dtype: of the gradients; float64 needs x64.
    """

    def __init__(self, method, shapes, num, dims=None, dtype=jnp.float64):
        self.mesh = mesh_of(data=num)
        self.sharding = NamedSharding(self.mesh, P("data"))
        params = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
        init = sync.transformation(method, "data", num).init
        self.start = jax.jit(lambda: init(params), out_shardings=self.sharding)
        self.types = {k: jax.ShapeDtypeStruct((num, *s), dtype) for k, s in shapes.items()}

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
            out = {
                k: P(*[None] * (len(shapes[k]) + d), "data") if d else P() for k, d in dims.items()
            }
        self.mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(P("data"), P("data")),
            out_specs=(out, P("data")),
            check_vma=False,
        )

    @functools.cached_property
    def state(self):
        """Of all devices, (devices, ...)."""
        return self.start()

    @functools.cached_property
    def compiled(self):
        """The program of one step."""
        shardings = (self.sharding, self.sharding)
        jitted = jax.jit(self.mapped, in_shardings=shardings)
        return jitted.lower(self.types, jax.eval_shape(self.start)).compile()

    def jaxpr(self):
        """The traced step, as text."""
        return str(jax.make_jaxpr(self.mapped)(self.types, jax.eval_shape(self.start)))

    def __call__(self, grads):
        """The means of gradients (devices, ...) by name; advances the state.

        Asserts that all devices have the same bits of full means.
        """
        grads = {k: np.asarray(g, self.types[k].dtype) for k, g in grads.items()}
        out, self.state = self.compiled(jax.device_put(grads, self.sharding), self.state)
        out = {k: np.asarray(x) for k, x in out.items()}
        for k, x in out.items():
            if x.ndim == grads[k].ndim:
                assert all(row.tobytes() == x[0].tobytes() for row in x), k
                out[k] = x[0]
        return out


def gradients(step, device, shapes):
    """Full-rank gradients of a different scale on each device."""
    rng = np.random.default_rng(1000 * step + device)
    return {k: rng.normal(size=s) * 10 ** (device / 3) for k, s in shapes.items()}


def stacked(step, shapes, num):
    """Gradients of all devices, (devices, ...) by name."""
    each = [gradients(step, i, shapes) for i in range(num)]
    return {k: np.stack([own[k] for own in each]) for k in shapes}


def norm(x):
    return float(np.linalg.norm(x))


def assert_close(have, want, tolerance=1e-12):
    """Of arrays by name: in norm."""
    for k, x in want.items():
        assert norm(np.asarray(have[k], np.float64) - x) <= tolerance * norm(x), k
