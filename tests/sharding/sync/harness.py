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
    """A gradient sync between ``num`` devices, and its state.

    Means are sharded along ``dims``, by name; None for an all-reduce.
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


def stacked(step, shapes, num):
    """Full-rank gradients of all devices, (devices, ...) by name, each of a different scale."""
    draws = [(np.random.default_rng(1000 * step + i).normal, 10 ** (i / 3)) for i in range(num)]
    return {k: np.stack([draw(size=s) * x for draw, x in draws]) for k, s in shapes.items()}


def room(density, slots, lists):
    """How many rows a list has room for: those of the fullest of so many."""
    expected = density * slots
    margin = np.sqrt(2 * np.log(100 * lists) * expected * (1 - density))
    return int(np.ceil(expected + margin))


def norm(x):
    return float(np.linalg.norm(x))


def assert_close(have, want, tolerance=1e-12):
    """Of arrays by name: in norm."""
    for k, x in want.items():
        assert norm(np.asarray(have[k], np.float64) - x) <= tolerance * norm(x), k
