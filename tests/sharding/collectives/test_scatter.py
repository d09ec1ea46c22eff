"""Every form of the reduce-scatter equals ``lax.psum_scatter`` and sends the same bytes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sharding as shd
from sharding.collectives._reduce_scatter import FORMS, choose_form, psum_scatter
from sharding.plan.audit._program_collectives import wire_bytes

from ..model import mesh_of

pytestmark = pytest.mark.usefixtures("x64")


def on_mesh(fn, shape):
    """``fn(arrays of one device, axes)``, whose arrays have a dim of devices outside."""
    names = ("a", "b")[: len(shape)]
    mesh = mesh_of(**dict(zip(names, shape, strict=True)))

    def run(xs):
        return jax.tree.map(lambda x: x[None], fn(jax.tree.map(lambda x: x[0], xs), names))

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(names), out_specs=P(names)))


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_equals_the_sum(shape):
    """Devices of different scale; 40 rows over 8 devices are shards of odd length."""
    num = math.prod(shape)
    rng = np.random.default_rng(0)
    scale = 10.0 ** np.arange(num).reshape(-1, 1, 1, 1)
    x = rng.normal(size=(num, 40, 3, 24)) * scale
    n = rng.integers(-1000, 1000, x.shape, np.int32)
    one = rng.normal(size=(num, 8))  # shards of one element
    cases = [(form, dim) for form in FORMS for dim in (0, -1)]

    def run(xs, names):
        x, n, one = xs
        # Of numbers that differ by powers of two: equal programs would be one.
        scattered = [
            (
                psum_scatter(x * 2**i, names, dim, form) / 2**i,
                psum_scatter(n * 2**i, names, dim, form) // 2**i,
            )
            for i, (form, dim) in enumerate(cases)
        ]

        def add(total, i):
            return [
                t + psum_scatter(one * i * 2**j, names, 0, form) / 2**j
                for j, (t, form) in enumerate(zip(total, FORMS, strict=True))
            ], None

        zeros = jnp.zeros_like(psum_scatter(one, names, 0, "native"))
        return scattered, lax.scan(add, [zeros] * len(FORMS), jnp.arange(4.0))[0]

    compiled = on_mesh(run, shape).lower((x, n, one)).compile()
    found, scanned = compiled((x, n, one))
    for (form, dim), (floats, integers) in zip(cases, found, strict=True):
        expected = np.stack(np.split(x.sum(0), num, dim if dim >= 0 else 2))
        np.testing.assert_allclose(floats, expected, rtol=1e-12, atol=1e-12 * abs(x).max())
        assert integers.dtype == np.int32
        shards = np.stack(np.split(n.sum(0, dtype=np.int32), num, dim if dim >= 0 else 2))
        np.testing.assert_array_equal(integers, shards, err_msg=form)
    for total in scanned:
        np.testing.assert_allclose(total, 6 * one.sum(0).reshape(num, -1), rtol=1e-12)
    once = len(cases) * (x[0].nbytes + n[0].nbytes) + 4 * len(FORMS) * one[0].nbytes
    assert wire_bytes(compiled) == (num - 1) / num * once


def test_all_to_all_sums_bfloat16_in_float32():
    x = np.full((8, 8), 1.0)
    x[0] = 256.0  # in bfloat16 256 + 1 is 256
    x = x.astype(jnp.bfloat16)
    found = on_mesh(lambda x, names: psum_scatter(x, names, 0, "all_to_all"), (8,))(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.full((8, 1), 264.0))


@pytest.mark.parametrize(
    ("platform", "sizes", "shape", "dim", "form"),
    [
        ("cpu", (2, 4), (4096, 4096), 0, "native"),
        ("tpu", (4, 4), (4096, 4096), 0, "axes"),
        ("tpu", (4, 4), (64, 1024), -1, "all_to_all"),
        ("tpu", (16, 1), (4096, 4096), 0, "ring"),  # effectively one axis
        ("tpu", (256,), (512, 512), 0, "all_to_all"),
    ],
)
def test_choice(platform, sizes, shape, dim, form):
    assert choose_form(platform, sizes, shape, dim, jnp.float32) == form


def test_one_device_sums_no_gradients():
    """XLA for CPUs would copy them."""
    zero, tx = shd.Zero(jax.make_mesh((1,), ("data",))), optax.sgd(0.1)
    step = zero.train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx=tx)
    state = zero.init(lambda: (w := jnp.ones((8, 8)), tx.init(w)), tx=tx)
    text = step.lower(state, zero.put(np.ones((4, 8)))).as_text()
    assert "}) : (tensor<8x8xf64>)" not in text
