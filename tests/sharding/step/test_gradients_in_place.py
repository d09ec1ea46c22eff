"""Micro-batches whose backward passes add gradients to refs: any operation on a parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding as shd
from sharding.step import _gradients, _step_plan

from ...tiers import tiers
from .. import model

pytestmark = pytest.mark.usefixtures("x64")
OPERATIONS = {
    "slice": lambda p: p[:, 2:6],
    "strides": lambda p: p[::2],
    "index": lambda p: p[1],
    "dynamic": lambda p: jax.lax.dynamic_slice_in_dim(p, jnp.argmax(p[0, 0]), 3, 1),
    "rows": lambda p: jnp.take(p, jnp.array([3, 0, 3]), axis=1),
    "stack": lambda p: jax.lax.scan(lambda x, q: (x + q[:4] @ q.T, None), jnp.ones((4, 8)), p)[0],
    "mixed": lambda p: jax.lax.scan(
        lambda x, q: (x @ jnp.sin(q[0]) @ q[1].T + jnp.cos(q[2]) @ q[1].T, None),
        jnp.ones((8, 8)),
        (jnp.sin(p), p, p * p),
    )[0],
    "unrolled": lambda p: sum(q[1:3].sum() ** 2 for q in p),
    "again": lambda p: p @ p.swapaxes(1, 2) + p[:, :, :1],
    "branch": lambda p: jax.lax.cond(p.sum() > 0, lambda p: p[2:] ** 2, lambda p: p[:2] ** 3, p),
    "remat": jax.checkpoint(lambda p: jnp.sin(p[0, 1:]) * jnp.cos(p[1, 1:])),
    "jit": jax.jit(lambda p: p.reshape(4, -1)[1:]),
}


@pytest.mark.parametrize(
    ("operation", "stage"),
    tiers(
        [(name, stage) for name in OPERATIONS for stage in (0, 3)],
        [(name, 3 * (i % 2)) for i, name in enumerate(OPERATIONS)],
    ),
)
def test_equals_one_backward_pass(operation, stage):
    rng = np.random.default_rng(0)
    params, x = rng.normal(size=(4, 8, 16)), rng.normal(size=(48, 3))

    def loss(params, x):
        out = OPERATIONS[operation](params)
        return jnp.mean(x) * jnp.sum(jnp.sin(out)) + jnp.mean(x**2) * jnp.sum(out)

    value, grads = jax.jit(jax.value_and_grad(loss))(params, x)
    zero = model.zero_on(8, stage=stage)
    run = zero.value_and_grad(lambda p, x: loss(zero.gather(p), x), microbatches=3)
    have = run(zero.place(params), zero.put(x))
    assert abs(have[0] - value) < 1e-13 * abs(value)
    model.assert_close(have[1], grads, 1e-13)


@pytest.mark.skipif(not _step_plan.IN_PLACE, reason="jax 0.10 adds after each backward pass")
@pytest.mark.parametrize(("stage", "saved"), [(0, 0.0), (1, 0.4)])
def test_layers_add_their_gradients_to_wider_sums(stage, saved, monkeypatch):
    """The same bits as sums of full gradients, which are in memory no more."""
    shapes = {"up": (8, 64, 256), "down": (8, 256, 64)}
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=s).astype(np.float32) / s[1] for k, s in shapes.items()}
    x = rng.normal(size=(48, 64)).astype(np.float32)
    zero = model.zero_on(8, stage=stage, precision=shd.Precision(accumulate=jnp.float64))
    layer = jax.checkpoint(
        zero.gathered(lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"]), prevent_cse=False
    )

    def loss(params, x):
        x = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]
        return jnp.mean(jnp.sin(x) ** 2)

    def run():
        args = zero.place(params), zero.put(x), None, None
        program = zero.value_and_grad(loss, microbatches=3).lower(*args).compile()
        return program(*args)[-1], program.memory_analysis().temp_size_in_bytes

    have, held = run()
    for module in (_gradients, _step_plan):
        monkeypatch.setattr(module, "IN_PLACE", False)
    want, more = run()
    jax.tree.map(np.testing.assert_array_equal, have, want)
    assert more - held >= saved * sum(p.nbytes for p in params.values())
