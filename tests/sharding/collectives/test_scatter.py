"""Every form of the reduce-scatter equals ``lax.psum_scatter`` and sends the same bytes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharding.collectives._reduce_scatter import FORMS, choose_form, psum_scatter
from sharding.plan.program._wire import wire_bytes

pytestmark = pytest.mark.usefixtures("x64")
SHAPES = [(1,), (2,), (8,), (2, 4), (4, 2)]


def compiled(form, shape, dim, x, repeat=0):
    """A program that reduce-scatters x (devices, ...) on a mesh of this shape."""
    names = ("a", "b")[: len(shape)]
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)

    def step(x):
        if not repeat:
            return psum_scatter(x[0], names, dim, form)[None]
        shards = lax.scan(
            lambda total, i: (total + psum_scatter(x[0] * i, names, dim, form), None),
            jnp.zeros_like(psum_scatter(x[0], names, dim, "native")),
            jnp.arange(repeat, dtype=x.dtype),
        )
        return shards[0][None]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(names), out_specs=P(names))
    return jax.jit(mapped).lower(x).compile()


@pytest.mark.slow(keep=13)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_sum(form, shape, dim):
    num = math.prod(shape)
    # Devices of different scale; 40 rows over 8 devices are shards of odd length.
    x = np.random.default_rng(0).normal(size=(num, 40, 3, 24)) * 10.0 ** np.arange(num).reshape(
        -1, 1, 1, 1
    )
    expected = np.stack(np.split(x.sum(0), num, dim if dim >= 0 else 2))
    program = compiled(form, shape, dim, x)
    np.testing.assert_allclose(program(x), expected, rtol=1e-12, atol=1e-12 * abs(x).max())
    assert wire_bytes(program) == (num - 1) / num * x[0].nbytes

    integers = np.random.default_rng(2).integers(-1000, 1000, x.shape, np.int32)
    shards = np.stack(np.split(integers.sum(0, dtype=np.int32), num, dim if dim >= 0 else 2))
    found = compiled(form, shape, dim, integers)(integers)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, shards)


@pytest.mark.parametrize("form", FORMS)
def test_under_scan_and_of_one_dim(form):
    x = np.random.default_rng(1).normal(size=(8, 8))  # shards of one element
    program = compiled(form, (2, 4), 0, x, repeat=4)
    np.testing.assert_allclose(program(x), 6 * x.sum(0).reshape(8, 1), rtol=1e-12)


def test_all_to_all_sums_bfloat16_in_float32():
    x = np.full((8, 8), 1.0)
    x[0] = 256.0  # in bfloat16 256 + 1 is 256
    x = jnp.asarray(x, jnp.bfloat16)
    found = compiled("all_to_all", (8,), 0, x)(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), np.full((8, 1), 264.0))


def test_errors():
    with pytest.raises(
        ValueError, match=r"dim 0 of shape \(6, 2\) cannot be sharded over 8 devices"
    ):
        compiled("ring", (8,), 0, np.zeros((8, 6, 2)))
    with pytest.raises(ValueError, match=r"form must be one of native, axes.* got 'tree'"):
        compiled("tree", (8,), 0, np.zeros((8, 8, 2)))


@pytest.mark.parametrize(
    ("platform", "sizes", "shape", "dim", "form"),
    [
        ("gpu", (8,), (4096, 4096), 0, "native"),
        ("cpu", (2, 4), (4096, 4096), 0, "native"),
        ("tpu", (1,), (4096, 4096), 0, "native"),
        ("tpu", (4, 4), (4096, 4096), 0, "axes"),
        ("tpu", (4, 4), (16,), -1, "axes"),  # the last dim is also the first
        ("tpu", (4, 4), (64, 2048), -1, "axes"),  # shards of 128
        ("tpu", (4, 4), (64, 1024), -1, "all_to_all"),
        ("tpu", (16, 1), (4096, 4096), 0, "ring"),  # effectively one axis
        ("tpu", (256,), (512, 512), 0, "all_to_all"),
    ],
)
def test_choice(platform, sizes, shape, dim, form):
    assert choose_form(platform, sizes, shape, dim, jnp.float32) == form
